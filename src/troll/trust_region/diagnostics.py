"""What the trust region did, beyond the metrics of every step: docs/diagnostics.md says what to make of the numbers.

Pure functions without gradient, for every so many steps. The reports return a `Tally` of 0-d tensors, which adds up
across micro-batches and processes. No value outside the mask matters, NaN included, and tokens whose logits are no
distribution are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.policy.values import PROBABILITY_FLOOR, as_float, divergence, floored, shape_text
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.dual import SOLVERS
from troll.trust_region.projecting.projection import broadcast_bound, outside_ball
from troll.trust_region.projecting.step import common_outcomes
from troll.trust_region.tally import Tally, check_shapes, counted, largest, mean, quantiles


class SequenceKL(NamedTuple):
    """Estimates of KL(old ‖ new) between the two policies' sequences, each (B,), in nats."""

    kl: Tensor
    """``Σ_t KL(p_t ‖ p̃_t)``: exact over each next token, so that only the prefixes are sampled."""
    k1: Tensor
    """``Σ_t (log p − log p̃)(o_t)``."""
    k3: Tensor
    """``Σ_t r − 1 − log r`` with ``r = (p̃/p)(o_t)``."""


@torch.no_grad()
def sequence_kl(token_kl: Tensor, log_ratio: Tensor, mask: Tensor) -> SequenceKL:
    """Three estimates of the divergence between sequences, from sequences that the old policy sampled.

    By the chain rule it is ``E[Σ_t KL(p_t ‖ p̃_t)]`` over prefixes sampled from the old policy, so all three are
    unbiased; `kl` has the least variance, as it is the mean of either k1 or k3 over the next token given the prefix.
    KL(p̃ ‖ p), the `kl_before` of a step, is the other direction and has no such estimate.

    Args:
        token_kl: KL(p ‖ p̃), (B, T), as [old_to_new_kl][] has it. On K + 1 outcomes it is a lower bound, by the gap of
            [tail_gap][] with the two policies exchanged.
        log_ratio: ``log p̃ − log p`` of the sampled tokens, of the network itself, not of its projection, (B, T).
        mask: (B, T), true (or 1) where a token counts.

    Raises:
        ValueError: On tensors of different shapes, or that are not (B, T).
    """
    if mask.dim() != 2:
        raise ValueError(f"mask must be (B, T), got {shape_text(mask.shape)}")
    check_shapes(mask, token_kl=token_kl, log_ratio=log_ratio)
    # A row with a token that is no distribution has no divergence, and comes out as NaN.
    token_kl, log_ratio = (torch.where(mask.bool(), as_float(x), 0.0) for x in (token_kl, log_ratio))
    return SequenceKL(token_kl.sum(-1), -log_ratio.sum(-1), (torch.expm1(log_ratio) - log_ratio).sum(-1))


@torch.no_grad()
def sequence_report(token_kl: Tensor, log_ratio: Tensor, mask: Tensor) -> Tally:
    """[sequence_kl][], the mean over the sequences that have a token: `sequence_kl`, and with `_k1` and `_k3`."""
    sequences = mask.bool().any(-1)
    kl, k1, k3 = sequence_kl(token_kl, log_ratio, mask)
    estimates = {"sequence_kl": kl, "sequence_kl_k1": k1, "sequence_kl_k3": k3}
    return Tally({name: mean(counted(estimate, sequences)) for name, estimate in estimates.items()})


class TailGap(NamedTuple):
    """What the K + 1 outcomes do not see of KL(p̃ ‖ p), each (...), in nats."""

    gap: Tensor
    """``p̃(T) · KL(p̃(·|T) ‖ p(·|T))`` over the tail T."""
    bound: Tensor
    """The largest gap that the two tail masses allow."""


@torch.no_grad()
def tail_gap(new_logits: Tensor, old_logits: Tensor, old: SparsePolicy) -> TailGap:
    """By how much KL(p̃ ‖ p) over the vocabulary exceeds that over the K + 1 outcomes, on a sample of tokens.

    By the chain rule, ``KL_full = KL_bucket + p̃(T) · KL(p̃(·|T) ‖ p(·|T))``: the last term is computed itself, since the
    difference of the other two would cancel. Probabilities are floored at f = 1e-12 over the vocabulary, as ``project``
    does for dense policies.

    The bound holds for any logits. Let a, b be the tails' masses once floored and normalised by Z. The gap is
    ``Σ_T p̃ log(p̃/a) + Σ_T p̃ log(b/p)``; no term of the first sum is above 0, and ``p ≥ f/Z`` in the second, so that it
    is at most ``a log(bZ/f)``. With n tokens in the tail and masses ã, b̃ before flooring, ``a ≤ ã + nf`` and
    ``bZ ≤ b̃ + nf``, and the gap is at most ``(ã + nf) log(b̃/f + n)``. It comes close where the new policy puts its
    whole tail on one token that the old one all but excludes.

    Args:
        new_logits: (..., V), of the network now.
        old_logits: (..., V), those that the policy was captured from; log-probabilities serve as well.
        old: At the same positions.

    Raises:
        ValueError: On shapes that do not fit.
    """
    for name, logits in (("new_logits", new_logits), ("old_logits", old_logits)):
        if logits.shape != (*old.shape, old.vocab_size):
            raise ValueError(
                f"{name} must be {shape_text((*old.shape, old.vocab_size))}, got {shape_text(logits.shape)}"
            )
    new_raw, old_raw = (torch.log_softmax(as_float(logits), dim=-1) for logits in (new_logits, old_logits))
    # Unused slots stand in for the first one.
    ids = torch.where(old.used, old.token_ids, old.token_ids[..., :1])
    in_tail = torch.ones_like(new_raw, dtype=torch.bool).scatter(-1, ids, False)
    count = in_tail.sum(-1)
    new_tail, old_tail = (_only(log_probs, in_tail).logsumexp(-1).exp() for log_probs in (new_raw, old_raw))
    bound = (new_tail + count * PROBABILITY_FLOOR) * torch.log(old_tail / PROBABILITY_FLOOR + count)

    present = torch.ones_like(in_tail)
    new, before = (_only(floored(log_probs, present), in_tail) for log_probs in (new_raw, old_raw))
    mass = new.logsumexp(-1)
    new_within, old_within = new.log_softmax(-1), before.log_softmax(-1)
    gap = mass.exp() * divergence((new_within - old_within).masked_fill(~in_tail, 0.0), old_within)
    return TailGap(*(x.masked_fill(count == 0, 0.0) for x in (gap, bound)))


@torch.no_grad()
def tail_report(gap: TailGap, mask: Tensor) -> Tally:
    """Of [tail_gap][] over tokens: `tail_gap` and `tail_gap_bound`, the means, and both with `_max`."""
    check_shapes(mask, gap=gap.gap)
    parts = {"tail_gap": counted(gap.gap, mask), "tail_gap_bound": counted(gap.bound, mask)}
    return Tally(
        {name: mean(values) for name, values in parts.items()},
        {f"{name}_max": largest(values) for name, values in parts.items()},
    )


@torch.no_grad()
def old_to_new_kl(new: Outcomes, old: SparsePolicy, tail: Tail = "bucket") -> Tensor:
    """KL(p ‖ p̃) over the outcomes that the step compares, (...), in nats; both floored at 1e-12."""
    log_new, log_old, present = common_outcomes(new, old, tail)
    return divergence((log_old - log_new).masked_fill(~present, 0.0), log_new)


@torch.no_grad()
def dual_report(
    new: Outcomes,
    old: SparsePolicy,
    mask: Tensor,
    kl_bound: float | Tensor = 0.05,
    tail: Tail = "bucket",
    solver: str = "newton",
    constraint: Constraint | None = None,
) -> Tally:
    """Solves the dual problem once more, and says how hard it was.

    A root is one token's that is projected, or one group's, where tokens share a constraint; σ² and KL are then its
    weighted sums.

    Args:
        new: p̃, as the step read it.
        old: p, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.
        kl_bound: As in the step.
        tail: As in the step.
        solver: As in the step.
        constraint: As in the step; where it spans processes, all of them take part.

    Returns:
        Over roots: `solver_evaluations`, mean and `_max`; `bisected_fraction`, the roots for which Newton's method
        needed help; `variance` (σ²), `curvature` (τ²σ²) and `conditioning` (``d log KL/d log τ = τ²σ²/KL``), each with
        `_min` and `_p50` (of each call, averaged over calls); and `constraint_error_max`, the largest
        ``|KL(q ‖ p)/ε − 1|``.

    Raises:
        ValueError: On positions that are not those of the mask, ε ≤ 0, or an unknown solver.
    """
    check_shapes(mask, new=new.tail_logit, old=old.tail_log_prob)
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
    counts = mask.bool()
    log_new, log_old, present = (x[counts] for x in common_outcomes(new, old, tail))
    bound = broadcast_bound(kl_bound, mask.shape, log_new)[counts]
    if constraint is not None:
        constraint = constraint.flat(mask.shape)[counts.reshape(-1)]
    s = (log_new - log_old).masked_fill(~present, 0.0)
    kl = divergence(s, log_old)

    outside = outside_ball(kl, bound, constraint)
    log_old, s, bound = log_old[outside.rows], s[outside.rows], outside.bound
    # Not tokens: a process without any takes part in the sums of the others.
    if bound.numel() == 0:
        none = bound.new_zeros(0)
        return _roots(none, none, none, none, none, none)

    root = SOLVERS[solver](outside.curve(log_old, s), bound)
    at_root = outside.curve(log_old, s)
    at_root.at(root.tau)  # the second time, s is centred where rounding is least
    kl, variance = at_root.at(root.tau)
    return _roots(root.tau, variance, kl, bound, as_float(root.evaluations), as_float(root.bisections))


def _roots(tau: Tensor, variance: Tensor, kl: Tensor, bound: Tensor, evaluations: Tensor, bisections: Tensor) -> Tally:
    curvature = tau.square() * variance
    parts = {"variance": variance, "curvature": curvature, "conditioning": curvature / kl}
    totals = {"solver_evaluations": mean(evaluations), "bisected_fraction": mean((bisections > 0).to(tau))}
    for name, values in parts.items():
        totals |= quantiles(name, values, (50,))
    return Tally(
        totals,
        {"solver_evaluations_max": largest(evaluations), "constraint_error_max": largest((kl / bound - 1).abs())},
        {f"{name}_min": -largest(-values) for name, values in parts.items()},
    )


@torch.no_grad()
def ratio_report(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2) -> Tally:
    """The ratio r = p̃/p of the sampled tokens, and what PPO's clip would have done to it.

    Args:
        log_ratio: ``log p̃ − log p``, (...), of the network itself, not of its projection.
        advantages: Broadcast to (...): (B, 1) for one per sequence.
        mask: (...), true (or 1) where a token counts.
        clip: c > 0.

    Returns:
        `ratio_p1`, `ratio_p50`, `ratio_p99` (of each call, averaged over calls), `ratio_max`; and `clip_fraction`, the
        fraction of tokens whose gradient a clip would have cut: ``A > 0`` and ``r > 1 + c``, or ``A < 0`` and
        ``r < 1 − c``.

    Raises:
        ValueError: On shapes that do not fit, or c ≤ 0.
    """
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip}")
    check_shapes(mask, log_ratio=log_ratio)
    counts = mask.bool() & log_ratio.isfinite()
    try:
        advantages = advantages.expand(mask.shape)[counts]
    except RuntimeError:
        raise ValueError(
            f"advantages must broadcast to {shape_text(mask.shape)}, got {shape_text(advantages.shape)}"
        ) from None
    ratio = as_float(log_ratio)[counts].exp()
    cut = ((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip))
    totals = quantiles("ratio", ratio, (1, 50, 99)) | {"clip_fraction": mean(cut.to(ratio))}
    return Tally(totals, {"ratio_max": largest(ratio)})


def _only(log_probs: Tensor, which: Tensor) -> Tensor:
    return log_probs.masked_fill(~which, -torch.inf)
