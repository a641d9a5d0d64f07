"""The mathematics of TROLL: needs only torch, and imports nothing else of the project. Begin with `projection`.

projection      the problem, and the gradient of its solution
dual            the multiplier of each token: Newton's method, and the paper's search
constraint      tokens that share one multiplier
step            one optimisation step: the new policy is read, projected, and reduced to a few numbers per token
loss            the loss of these numbers
metrics         sums over micro-batches and processes; diagnostics: measurements made once in many steps
policy/         policies as values: sparse, packed, serialized, or on a given support
reading/        from logits or an LM head to a policy, tile by tile
probabilities   the floor, divergence and entropy that all of these share; checks: of arguments
kernels         torch or Triton; a file with the suffix `_triton` has the kernels of the file without it
"""
