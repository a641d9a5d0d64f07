"""Everything per token that follows the reading: from K + 1 outcomes of two policies to a few numbers.

`step_triton` does the same in one program for each token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from troll.trust_region.kernels import use_triton
from troll.trust_region.policy.outcomes import Outcomes, present_outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.policy.values import LOG_FLOOR, as_float, floored, log_count
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.projection import Ball
from troll.trust_region.projecting.pull import Pull, to_old, to_projection


@dataclass(frozen=True, eq=False)
class TrustRegionStep:
    """The trust region in one optimisation step, each (...); log-probabilities and divergences in nats.

    Attributes:
        log_ratio: log q(o)/p(o) of the sampled token, differentiable; log p̃(o)/p(o) where not projected.
        regression: The pull, differentiable: KL(p̃ ‖ ⌊q⌋), 0 where not projected; or, if it is proximal, KL(p ‖ p̃).
        log_probs: log p̃(o) of the sampled token, by the network itself, differentiable.
        kl_before: KL(p̃ ‖ p). Where the logits are no distribution it is NaN, like all others except `projected`.
        kl_after: KL(q ‖ p): ε where projected, to the solver's precision. Where tokens share a constraint, the
            bound is on their weighted sum.
        multiplier: η; 0 where not projected.
        projected: bool, true where q differs from p̃.
        entropy: The entropy of p̃ over the whole vocabulary, differentiable; None unless the source was read with it.
    """

    log_ratio: Tensor
    regression: Tensor
    log_probs: Tensor
    kl_before: Tensor
    kl_after: Tensor
    multiplier: Tensor
    projected: Tensor
    entropy: Tensor | None = None


def step(
    new: Outcomes,
    old: SparsePolicy,
    kl_bound: float | Tensor,
    tail: Tail = "bucket",
    solver: str = "newton",
    constraint: Constraint | None = None,
    pull: Pull = "projection",
) -> TrustRegionStep:
    """The trust region of every token.

    With `tail="bucket"`, the ratio of a projected token is `τ s_o − A(τ)`, where τ and A come from the floored and
    renormalised outcomes, and s_o from both policies' raw log-probabilities: so it is continuous at KL = ε, even for a
    token below the floor. With "floor", every token outside the two supports has probability 1e-12 in both policies,
    and everything is computed from these, ratios included.

    Args:
        new: p̃, (...), read at the tokens of `old`; for "floor", at the tokens of both supports, the old one's first.
        old: p, (...), as captured.
        kl_bound: ε > 0 in nats; a float, or a tensor that broadcasts to (...).
        tail: "bucket" or "floor".
        solver: A key of `SOLVERS`.
        constraint: Which of the tokens (...) share a multiplier; None gives each its own.
        pull: "projection" or "proximal".

    Raises:
        ValueError: On policies that do not fit each other, ε ≤ 0, a bound that does not broadcast, an unknown solver,
            or a constraint that does not fit.
    """
    old = on_tokens_of(new, old, tail)
    # The Triton program solves for one token at a time, without a constraint.
    if constraint is None and solver == "newton" and use_triton(new.logits, new.logits.shape[-1] + 1):
        from troll.trust_region.projecting import step_triton

        return TrustRegionStep(*step_triton.step(new, old, kl_bound, tail, pull))  # type: ignore[arg-type]

    raw = as_float(new.outcomes)
    log_new, log_old, present = common_outcomes(new, old, tail)
    at = old.slot.unsqueeze(-1)
    of, to = (log_old, log_new) if tail == "floor" else (old.log_probs.to(raw.dtype), raw)
    log_p, log_p_new = of.gather(-1, at).squeeze(-1), to.gather(-1, at).squeeze(-1)
    # What the old policy excludes cannot have been sampled from it, and has no ratio.
    sampled_s = torch.where(log_p == -torch.inf, 0.0, log_p_new - log_p)

    ball = Ball.of(log_new, log_old, sampled_s, present, kl_bound, solver, constraint)
    if pull == "proximal":
        regression = to_old(log_new, log_old, present).reshape(-1)
    else:
        regression = to_projection(ball, *(x.reshape(-1, x.shape[-1]) for x in (log_new, present)))
    regression, shape = regression.masked_fill(ball.broken, torch.nan), new.shape
    broken, entropy = ball.broken.view(shape), new.entropy
    return TrustRegionStep(
        log_ratio=ball.log_ratio.view(shape),
        regression=regression.view(shape),
        log_probs=torch.where(broken, torch.nan, raw.gather(-1, at).squeeze(-1)),
        kl_before=ball.kl_before.view(shape),
        kl_after=ball.kl_after.view(shape),
        multiplier=ball.multiplier.view(shape).masked_fill(broken, torch.nan),
        projected=ball.projected.view(shape),
        entropy=None if entropy is None else torch.where(broken, torch.nan, entropy),
    )


def common_outcomes(new: Outcomes, old: SparsePolicy, tail: Tail = "bucket") -> tuple[Tensor, Tensor, Tensor]:
    """Both policies' floored log-probabilities on the same outcomes, and which of these are present.

    Args:
        new: p̃, as in `step`, differentiable.
        old: p, as in `step`.
        tail: "bucket" or "floor".

    Returns:
        log p̃, log p and a mask, each (..., K' + 1) with the tail last; −inf where not present.
    """
    old = on_tokens_of(new, old, tail)
    raw = as_float(new.outcomes)
    before = old.outcomes.to(raw.dtype)
    if tail == "bucket":
        present = present_outcomes(new, old)
    else:
        outside = log_count(new.vocab_size - new.used.sum(-1, keepdim=True), raw.dtype) + LOG_FLOOR
        present = torch.cat([new.used, outside > -torch.inf], -1)
        # NaN has to remain in a row that is no distribution.
        raw, before = (
            torch.cat([x[..., :-1], torch.where(x[..., -1:].isnan(), torch.nan, outside)], -1) for x in (raw, before)
        )
    return floored(raw, present), floored(before, present), present


def on_tokens_of(new: Outcomes, old: SparsePolicy, tail: Tail) -> SparsePolicy:
    """The old policy on the new one's slots: with "floor", these are more than its own, and it has no mass there.

    Raises:
        ValueError: If the new policy was read at other tokens.
    """
    old.check_positions(new.shape)
    slots = old.top_k
    more = new.token_ids.shape[-1] - slots
    if more == 0 and new.token_ids is old.token_ids:
        return old
    if more < 0 or (tail == "bucket" and more):
        raise ValueError(f"new must be read at the old policy's {slots} slots, got {new.token_ids.shape[-1]}")
    # On a GPU this would wait for the device.
    if new.token_ids.device.type == "cpu" and not torch.equal(new.token_ids[..., :slots], old.token_ids):
        raise ValueError("new must be read at the old policy's tokens: log_probs_at(_, old.token_ids)")
    log_probs = torch.nn.functional.pad(old.log_probs, (0, more), value=-torch.inf)
    return dataclasses.replace(old, token_ids=new.token_ids, log_probs=log_probs)
