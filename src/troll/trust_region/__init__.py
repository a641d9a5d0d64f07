"""The mathematics of TROLL: needs only torch, and imports nothing else of the project. Begin with `projection`.

The folder works under any name and in any package, so it can be copied into another project. Triton needs the files
whose names end in `_triton`; nothing else does.

projection      the problem, and the gradient of its solution
dual            the multiplier of each token, by Newton's method
constraint      tokens that share one multiplier
step            one optimisation step: the new policy is read, projected, and reduced to a few numbers per token
loss            the loss of these numbers
paper           the paper's own step, for comparison
metrics         sums over micro-batches and processes; diagnostics: measurements made once in many steps
policy/         policies as values: sparse, packed, or on a given support
reading/        from logits or an LM head to a policy, tile by tile
probabilities   the floor, divergence and entropy that all of these share; checks: of arguments
kernels         torch or Triton; a file with the suffix `_triton` has the kernels of the file without it
"""
