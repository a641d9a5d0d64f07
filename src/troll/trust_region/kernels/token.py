"""Everything that follows the head for one token: K + 1 outcomes of two policies in, a few scalars out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troll.trust_region.constraint import Constraint
from troll.trust_region.dual import divergence
from troll.trust_region.projection import Projection, project_outcomes
from troll.trust_region.support import as_float, floored


@dataclass(frozen=True)
class TrustRegionStep:
    """What the trust region says of one optimisation step, each (...), log-probabilities and KL in nats.

    Attributes:
        log_probs: log q of the sampled token, differentiable; its raw log-probability where not projected.
        new_log_probs: Its raw log-probability under p̃, the network itself, differentiable.
        regression: KL(p̃ ‖ ⌊q⌋), differentiable; 0 where not projected.
        kl_before: KL(p̃ ‖ p); NaN, as are all but the flags, where the logits are no distribution.
        kl_after: KL(q ‖ p).
        multiplier: η; 0 where not projected.
        projected: bool.
        entropy: Of p̃ over the whole vocabulary, differentiable; None unless asked for.
    """

    log_probs: Tensor
    new_log_probs: Tensor
    regression: Tensor
    kl_before: Tensor
    kl_after: Tensor
    multiplier: Tensor
    projected: Tensor
    entropy: Tensor | None = None


def trust_region_step(
    new: Tensor,
    old: Tensor,
    present: Tensor,
    slot: Tensor,
    kl_bound: float | Tensor,
    solver: str,
    constraint: Constraint | None = None,
) -> TrustRegionStep:
    """The trust region of every token, from both policies' raw log-probabilities on the same outcomes.

    Args:
        new: p̃, (..., M), the tail last; differentiable. Absent outcomes may hold anything.
        old: p, (..., M); without gradient.
        present: (..., M) bool; probabilities below 1e-12 are floored among these.
        slot: The outcome that was sampled, (...) int64; present.
        kl_bound: ε > 0; a float, or a tensor that broadcasts to (...).
        solver: A key of :data:`~troll.trust_region.dual.SOLVERS`.
        constraint: On the tokens (...); None for a multiplier each.

    Raises:
        ValueError: On ε ≤ 0, a bound that does not broadcast, an unknown solver, or a constraint that does not fit.
    """
    new_outcomes, old_outcomes = (floored(as_float(outcomes), present) for outcomes in (new, old))
    projection = project_outcomes(new, new_outcomes, old_outcomes, present, kl_bound, solver, constraint)
    at = slot.unsqueeze(-1)
    return TrustRegionStep(
        log_probs=projection.log_probs.gather(-1, at).squeeze(-1),
        new_log_probs=new.gather(-1, at).squeeze(-1),
        regression=_regression(new_outcomes, projection, present),
        kl_before=projection.kl_before,
        kl_after=projection.kl_after,
        multiplier=projection.multiplier,
        projected=projection.projected,
    )


def _regression(new_outcomes: Tensor, projection: Projection, present: Tensor) -> Tensor:
    """KL(p̃ ‖ ⌊q⌋), (...): exactly 0, and without gradient, where nothing was projected."""
    log_q = projection.log_probs.detach()
    counts = present & projection.projected.unsqueeze(-1)
    return divergence(torch.where(counts, new_outcomes - log_q, 0.0), log_q.masked_fill(~present, -torch.inf))
