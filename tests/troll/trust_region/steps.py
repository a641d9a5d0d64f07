"""Policies for the tests of a step in Triton, and how closely float32 has to agree with float64 on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.troll.trust_region.cases import bounds, pairs, tensor
from troll.trust_region import step_triton
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import Pull, TrustRegionStep, trust_region_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIFFERENTIABLE = ("log_ratio", "regression", "log_prob", "entropy")
#: Those that every step has; `kept_log_mass` belongs to truncated policies.
FIELDS = [field.name for field in dataclasses.fields(TrustRegionStep) if field.name not in ("kept_log_mass", "scored")]

#: Of a float32 number.
ROUNDING = 2.0**-24

#: Roundings that an exponential or a logarithm may be off by: CUDA's `ex2.approx` and `lg2.approx` take 2 ulp.
APPROXIMATION = 4 if DEVICE == "cuda" else 1


class Case(NamedTuple):
    """Two policies on K slots and a tail, in float32."""

    logits: Tensor
    tail_logit: Tensor
    tail_entropy: Tensor
    ids: Tensor
    old_log_probs: Tensor
    old_tail: Tensor
    slot: Tensor
    bound: Tensor
    vocab_size: int

    def each(self, change: Callable[[Tensor], Tensor]) -> Case:
        """With every tensor changed."""
        return Case(*(change(x) if isinstance(x, Tensor) else x for x in self))  # type: ignore[arg-type]

    def policies(self) -> tuple[PolicyOnSupport, SparsePolicy]:
        """p̃, without the entropy of its tail, and p."""
        new = PolicyOnSupport(self.ids, self.logits, self.tail_logit, self.vocab_size)
        return new, SparsePolicy(self.ids, self.old_log_probs, self.old_tail, self.slot, self.vocab_size, 0.0)

    def to(self, dtype: torch.dtype) -> Case:
        return self.each(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def moved(self, seed: int) -> Case:
        """Numbers that float32 may take these for on the way: 4 roundings of the largest off, the bound 2.3e-5.

        That is the tolerance of the search, and the error of KL(τ).
        """
        generator = torch.Generator().manual_seed(seed)

        def move(x: Tensor) -> Tensor:
            size = 1 + x.abs().masked_fill(x.isinf(), 0).amax(-1, keepdim=x.dim() > 1)
            return x + (torch.randn(x.shape, generator=generator).to(x) * 4 * ROUNDING * size)

        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in MOVED}
        case = self._replace(**moved)
        return case._replace(bound=self.bound * (1 + 2.3e-5 * (-1) ** seed))


MOVED = ("logits", "tail_logit", "old_log_probs", "old_tail", "tail_entropy")


def case_of(family: str, rows: int, size: int, seed: int = 0) -> Case:
    """Pairs of a family; half of them with unused slots, a quarter without a tail."""
    old, new = (tensor(x) for x in pairs(family, rows, size, seed))
    rng = np.random.default_rng(seed)
    k = size - 1
    slot = rng.integers(k, size=rows)
    unused = rng.random((rows, k)) < 0.3
    unused[1::2] = False
    unused[np.arange(rows), slot] = False
    unused_slots = torch.tensor(unused)
    old[:, :k][unused_slots] = -math.inf
    new[:, :k][unused_slots] = -math.inf
    old[::4, k], new[::4, k] = -math.inf, -math.inf
    excluded = rng.random((rows, k)) < 0.2  # by the old policy only
    excluded[::2] = False
    excluded[np.arange(rows), slot] = False
    old[:, :k][torch.tensor(excluded)] = -math.inf
    old = old.log_softmax(-1).float().to(DEVICE)
    new = new.float().to(DEVICE)
    bound = tensor(bounds(rows, seed=seed), torch.float32).to(DEVICE)
    bound[::11] = math.inf
    return Case(
        new[:, :k],
        new[:, k],
        tensor(rng.uniform(0, 3, rows), torch.float32).to(DEVICE),
        torch.arange(k).masked_fill(unused_slots, -1).to(DEVICE),
        old[:, :k],
        old[:, k],
        torch.tensor(slot).to(DEVICE),
        bound,
        k + 1000,
    )


def triton_step(
    new: PolicyOnSupport,
    old: SparsePolicy,
    kl_bound: float | Tensor,
    pull: Pull = "projection",
) -> TrustRegionStep:
    """What `trust_region_step` makes of the kernel's numbers."""
    return TrustRegionStep(*step_triton.step(new, old, kl_bound, proximal=pull == "proximal"))  # type: ignore[arg-type]


def run(
    case: Case,
    weights: dict[str, Tensor] | None = None,
    *,
    pull: Pull = "projection",
    by_triton: bool = False,
) -> tuple[TrustRegionStep, list[Tensor]]:
    """The step, and the gradient of its weighted outputs, as far as there are any: of logits, tail and its entropy."""
    leaves = [x.detach().clone().requires_grad_() for x in case[:3]]
    _, old = case.policies()
    new = PolicyOnSupport(case.ids, leaves[0], leaves[1], case.vocab_size, leaves[2])
    if by_triton:
        made = triton_step(new, old, case.bound, pull)
    else:
        made = trust_region_step(new, old, case.bound, pull=pull)
    weights = {name: torch.ones_like(case.tail_logit) for name in DIFFERENTIABLE} if weights is None else weights
    # In torch, a regression of tokens none of which is projected is a constant.
    outputs = {name: getattr(made, name) for name in weights if getattr(made, name).requires_grad}
    arriving = [weights[name].to(leaves[0]) for name in outputs]
    if not outputs:
        return made, [torch.zeros_like(x) for x in leaves]
    grads = torch.autograd.grad(list(outputs.values()), leaves, arriving, allow_unused=True)
    return made, [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def numbers(made: TrustRegionStep, grads: list[Tensor]) -> dict[str, Tensor]:
    values = {name: getattr(made, name).detach() for name in FIELDS if getattr(made, name) is not None}
    return values | dict(zip(("logits", "tail_logit", "tail_entropy"), grads, strict=True))


def assert_agrees(case: Case, weights: dict[str, Tensor] | None = None, pull: Pull = "projection") -> TrustRegionStep:
    """With float64, up to three times what that makes of numbers that are as far off as float32 may take them."""
    made, grads = run(case, weights, pull=pull, by_triton=True)
    actual = numbers(made, grads)
    expected = numbers(*run(case.to(torch.float64), weights, pull=pull))
    others = [numbers(*run(case.to(torch.float64).moved(seed), weights, pull=pull)) for seed in range(6)]
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, name
        if name == "projected":
            assert got.dtype == torch.bool
            assert all(torch.equal(want, other[name]) for other in others), "too close a case to compare"
            assert torch.equal(got, want)
            continue
        assert got.dtype == torch.float32, name
        infinite = want.isinf()
        assert torch.equal(got[infinite], want[infinite].float()), name
        spread = torch.stack([(other[name] - want).abs() for other in others]).amax(0)
        tolerance = 3 * (spread + 8 * APPROXIMATION * ROUNDING * (1 + want.abs()))
        wrong = ~infinite & ~((got - want).abs() <= tolerance)
        assert not wrong.any(), f"{name}: {got[wrong]} is not {want[wrong]} up to {tolerance[wrong]}"
    return made
