"""Measurements of the trust region beyond the metrics of every step: docs/diagnostics.md explains the numbers.

These are pure functions without gradient, to be called once in many steps. The reports return a `Tally` of 0-d tensors,
which adds up across micro-batches and processes. Values outside the mask do not matter, NaN included, and tokens whose
logits are not a distribution are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_mask_fits, check_shape
from .constraint import Constraint
from .dual import newton
from .metrics import Tally
from .policy.on_support import PolicyOnSupport, sparse_entropy
from .policy.sparse import SparsePolicy
from .probabilities import PROBABILITY_FLOOR, as_float, divergence, floored
from .projection import broadcast_bound, outside_ball
from .step import common_outcomes, pull_to_old


@torch.no_grad()
def sequence_report(token_kl: Tensor, log_ratio: Tensor, mask: Tensor) -> Tally:
    """Estimates KL(p ‖ p̃) between the policies' whole sequences, on sequences that the old policy sampled.

    By the chain rule this KL is `E[Σ_t KL(p_t ‖ p̃_t)]` over prefixes sampled from the old policy, so all three
    estimates are unbiased; `sequence_kl` has the least variance, as it is the mean of either of the others over the
    next token given the prefix. KL(p̃ ‖ p), the `kl_before` of a step, is the other direction and has no such estimate.

    Args:
        token_kl: KL(p ‖ p̃), (B, T), in nats, from [old_to_new_kl][troll.diagnostics.old_to_new_kl]. On K + 1 outcomes
            it is a lower bound, by the gap of [tail_gap][troll.diagnostics.tail_gap] with the two policies exchanged.
        log_ratio: `log p̃ − log p` of the sampled tokens, (B, T), of the network itself, not of its projection.
        mask: (B, T), true (or 1) where a token counts.

    Returns:
        Means over the sequences that have a token: `sequence_kl`, `Σ_t KL(p_t ‖ p̃_t)` over the sampled prefixes; and
        from the sampled tokens only, with `r = (p̃/p)(o_t)`, `sequence_kl_k1`, `−Σ_t log r`, and `sequence_kl_k3`,
        `Σ_t r − 1 − log r`.

    Raises:
        ValueError: If the tensors differ in shape, or are not (B, T).
    """
    check_shape("mask", mask, ("B", "T"))
    check_mask_fits(mask, token_kl=token_kl, log_ratio=log_ratio)
    # A row with an invalid token has no divergence: it becomes NaN, and is left out.
    token_kl, log_ratio = (torch.where(mask.bool(), as_float(x), 0.0) for x in (token_kl, log_ratio))
    estimates = {
        "sequence_kl": token_kl,
        "sequence_kl_k1": -log_ratio,
        "sequence_kl_k3": torch.expm1(log_ratio) - log_ratio,
    }
    sequences = mask.bool().any(-1)
    return Tally({name: _total(_counted(terms.sum(-1), sequences)) for name, terms in estimates.items()})


class TailGap(NamedTuple):
    """The result of [tail_gap][troll.diagnostics.tail_gap], each (...), in nats."""

    gap: Tensor
    bound: Tensor


@torch.no_grad()
def tail_gap(new_logits: Tensor, old_logits: Tensor, old: SparsePolicy) -> TailGap:
    """Computes by how much KL(p̃ ‖ p) over the vocabulary exceeds that over the K + 1 outcomes, on a sample of tokens.

    By the chain rule, `KL_full = KL_bucket + p̃(T) · KL(p̃(·|T) ‖ p(·|T))` with the tail T. The last term is computed
    directly, since the difference of the other two would cancel. Probabilities are floored at f = 1e-12, as by
    `project`.

    The bound holds for any logits. Let a, b be the tails' masses once floored and normalised by Z. The gap is
    `Σ_T p̃ log(p̃/a) + Σ_T p̃ log(b/p)`. No term of the first sum is above 0, and `p ≥ f/Z` in the second, so the gap
    is at most `a log(bZ/f)`. With n tokens in the tail and masses ã, b̃ before flooring, `a ≤ ã + nf` and
    `bZ ≤ b̃ + nf`, so it is at most `(ã + nf) log(b̃/f + n)`. The gap comes close to this bound if the new policy's
    whole tail is one token that the old policy nearly excludes.

    Args:
        new_logits: (..., V), the network's logits now.
        old_logits: (..., V), the logits that the policy was captured from, or their log-probabilities.
        old: p on its support, at the same positions (...).

    Returns:
        `gap`, the last term of the chain rule, and `bound`, its upper bound for these tail masses; in nats, each (...).

    Raises:
        ValueError: If shapes do not fit.
    """
    for name, logits in (("new_logits", new_logits), ("old_logits", old_logits)):
        check_shape(name, logits, (*old.shape, old.vocab_size))
    new_raw, old_raw = (torch.log_softmax(as_float(logits), dim=-1) for logits in (new_logits, old_logits))
    in_tail = outside_support(old)
    count = in_tail.sum(-1)
    new_tail, old_tail = (x.masked_fill(~in_tail, -torch.inf).logsumexp(-1).exp() for x in (new_raw, old_raw))
    bound = (new_tail + count * PROBABILITY_FLOOR) * torch.log(old_tail / PROBABILITY_FLOOR + count)

    present = torch.ones_like(in_tail)
    log_new, log_old = (floored(x, present).masked_fill(~in_tail, -torch.inf) for x in (new_raw, old_raw))
    new_within, old_within = log_new.log_softmax(-1), log_old.log_softmax(-1)
    gap = log_new.logsumexp(-1).exp() * divergence((new_within - old_within).masked_fill(~in_tail, 0.0), old_within)
    return TailGap(*(x.masked_fill(count == 0, 0.0) for x in (gap, bound)))


def outside_support(old: SparsePolicy) -> Tensor:
    """(..., V) bool, true for the tokens that the old policy does not keep."""
    outside = old.used.new_ones((*old.shape, old.vocab_size + 1))
    # Unused slots fill a column that is cut off: a position may have no other ones.
    return outside.scatter(-1, old.token_ids.where(old.used, old.vocab_size), False)[..., :-1]


@torch.no_grad()
def tail_report(gap: TailGap, mask: Tensor) -> Tally:
    """Reports the part of KL(p̃ ‖ p) that the K + 1 outcomes miss.

    Args:
        gap: From [tail_gap][troll.diagnostics.tail_gap], (...).
        mask: (...), true (or 1) where a token counts.

    Returns:
        Over tokens: the means `tail_gap` and `tail_gap_bound`, in nats, and the largest of each under `_max`.

    Raises:
        ValueError: If the positions are not those of the mask.
    """
    check_mask_fits(mask, gap=gap.gap)
    gaps, limits = _counted(gap.gap, mask), _counted(gap.bound, mask)
    return Tally(
        {"tail_gap": _total(gaps), "tail_gap_bound": _total(limits)},
        {"tail_gap_max": _largest(gaps), "tail_gap_bound_max": _largest(limits)},
    )


@torch.no_grad()
def old_to_new_kl(new: PolicyOnSupport, old: SparsePolicy) -> Tensor:
    """KL(p ‖ p̃) over the outcomes that the step compares, in nats; both policies floored at 1e-12.

    Args:
        new: p̃ at (...), from [log_probs_at][troll.log_probs_at] at the old policy's tokens.
        old: p, at the same positions.

    Returns:
        (...), at least 0.

    Raises:
        ValueError: If the new policy was read at other tokens.
    """
    return pull_to_old(common_outcomes(new, old))


@torch.no_grad()
def dual_report(
    new: PolicyOnSupport,
    old: SparsePolicy,
    mask: Tensor,
    kl_bound: float | Tensor = 0.05,
    constraint: Constraint | None = None,
) -> Tally:
    """Solves the dual problem again, and reports how hard it was.

    There is one root for each projected token or, with a constraint, for each projected group; σ² and KL of a group are
    weighted sums.

    Args:
        new: p̃ at (...), as for [old_to_new_kl][troll.diagnostics.old_to_new_kl].
        old: p, at the same positions.
        mask: (...), true (or 1) where a token counts.
        kl_bound: ε, in nats, as in the step.
        constraint: Groups of tokens that share a multiplier, as in the step; if it spans processes, all of them must
            call this function.

    Returns:
        Over roots: `solver_evaluations`, mean and `_max`; `bisected_fraction`, the share of roots at which a bisection
        replaced a Newton step; `conditioning_min` and `_p50` (of each call, averaged over calls) of
        `d log KL/d log τ = τ²σ²/KL`, where σ² is the variance of log p̃ − log p under q; and `constraint_error_max`, the
        largest `|KL(q ‖ p)/ε − 1|`.

    Raises:
        ValueError: If the positions are not those of the mask, or ε ≤ 0.
    """
    check_mask_fits(mask, new=new.tail_logit, old=old.tail_log_prob)
    counts = mask.bool()
    log_new, log_old, present = (x[counts] for x in common_outcomes(new, old))
    bound = broadcast_bound(kl_bound, mask.shape, log_new)[counts]
    if constraint is not None:
        constraint = constraint.flat(mask.shape)[counts.reshape(-1)]
    s = (log_new - log_old).masked_fill(~present, 0.0)
    kl = divergence(s, log_old)

    outside = outside_ball(kl, bound, constraint)
    log_old, s, bound = log_old[outside.row_index], s[outside.row_index], outside.root_bound
    root = newton(outside.curve(log_old, s), bound)
    at_root = outside.curve(log_old, s)
    at_root.at(root.tau)  # the second time, s is centred where rounding is least
    kl, variance = at_root.at(root.tau)
    evaluations = as_float(root.evaluations)
    conditioning = root.tau.square() * variance / kl
    totals = {"solver_evaluations": _total(evaluations), "bisected_fraction": _total((root.bisections > 0).to(kl))}
    return Tally(
        totals | _quantiles("conditioning", conditioning, (50,)),
        {"solver_evaluations_max": _largest(evaluations), "constraint_error_max": _largest((kl / bound - 1).abs())},
        {"conditioning_min": -_largest(-conditioning)},
    )


@torch.no_grad()
def ratio_report(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2) -> Tally:
    """Reports the ratio r = p̃/p of the sampled tokens, and how often PPO's clip would have acted on it.

    Args:
        log_ratio: `log p̃ − log p`, (...), of the network itself, not of its projection.
        advantages: A: (B,), one per sequence, or (...), as in [troll_loss][troll.troll_loss].
        mask: (...), true (or 1) where a token counts.
        clip: c > 0, the half-width of the clip's interval [1 − c, 1 + c].

    Returns:
        `ratio_p1`, `ratio_p50`, `ratio_p99` (of each call, averaged over calls), `ratio_max`; and `clip_fraction`, the
        fraction of tokens whose gradient a clip would have set to zero: `A > 0` and `r > 1 + c`, or `A < 0` and
        `r < 1 − c`.

    Raises:
        ValueError: If the shapes do not fit, or c ≤ 0.
    """
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip}")
    check_mask_fits(mask, log_ratio=log_ratio)
    counts = mask.bool() & log_ratio.isfinite()
    check_shape("advantages", advantages, mask.shape[:1], mask.shape)
    if advantages.dim() < mask.dim():
        advantages = advantages.view(-1, *[1] * (mask.dim() - 1)).expand(mask.shape)
    advantages = advantages[counts]
    ratio = as_float(log_ratio)[counts].exp()
    cut = ((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip))
    totals = _quantiles("ratio", ratio, (1, 50, 99)) | {"clip_fraction": _total(cut.to(ratio))}
    return Tally(totals, {"ratio_max": _largest(ratio)})


@torch.no_grad()
def coverage(old: SparsePolicy, mask: Tensor) -> Tally:
    """Reports how much of the old policy's mass is on its support.

    Args:
        old: The old policy as captured, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.

    Returns:
        `kept_tokens` and `covered_mass` (1 − tail), the means over tokens, and their 5, 50 and 95 % quantiles under
        `_p5`, `_p50` and `_p95` (of each call, averaged over calls); and `old_entropy`, the mean of the entropy over
        the K + 1 outcomes.

    Raises:
        ValueError: If the positions are not those of the mask.
    """
    check_mask_fits(mask, old=old.tail_log_prob)
    old = old[mask.bool() & old.log_probs[..., 0].isfinite()]
    totals = _distribution("kept_tokens", as_float(old.used.sum(-1)))
    totals |= _distribution("covered_mass", 1 - old.tail_log_prob.exp())
    return Tally(totals | {"old_entropy": _total(sparse_entropy(old))})


def support_too_small(tail_mass: float, *, top_k: int, threshold: float = 0.1, setting: str = "top_k") -> str | None:
    """The text of a warning if K is too small for the distributions, or None.

    The bucket does not see changes within the tail, and the share of KL(p̃ ‖ p) that it misses is usually about the
    tail's mass: docs/diagnostics.md has figures. A tail above δ is not worth a warning: most tokens of a small
    model have one.

    Args:
        tail_mass: The mean mass outside the support, in [0, 1]: `1 − covered_mass` of
            [coverage][troll.diagnostics.coverage].
        top_k: K of the capture.
        threshold: The largest mass without a warning, in [0, 1).
        setting: The name of the setting for a larger K; the warning names it.

    Raises:
        ValueError: If the threshold is out of its range.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    if not tail_mass > threshold:
        return None
    return (
        f"{tail_mass:.0%} of the old policy's mass is outside the {top_k} tokens that are kept, and the trust region "
        "does not see changes within it, usually about the same share of the divergence. Raise "
        f"{setting} to {4 * top_k}, or sample at a lower temperature; tail_gap measures what is missed"
    )


def _counted(values: Tensor, mask: Tensor) -> Tensor:
    """The finite values of the mask, (n,)."""
    return as_float(values)[mask.bool() & values.isfinite()]


def _total(values: Tensor) -> Tensor:
    """Sum and count of (n,) values, (2,): a mean that adds up."""
    return torch.stack([values.sum(), values.new_tensor(float(len(values)))])


def _largest(values: Tensor) -> Tensor:
    """The largest of (n,) values; −inf if there are none."""
    return values.max() if len(values) else values.new_tensor(-torch.inf)


def _quantiles(name: str, values: Tensor, percents: Sequence[int]) -> dict[str, Tensor]:
    """Percentiles of (n,) values, each as a sum and a count that weights it n times in a mean."""
    if len(values) == 0:
        return {f"{name}_p{percent}": values.new_zeros(2) for percent in percents}
    weight = values.new_tensor(float(len(values)))
    sums = weight * torch.quantile(values, values.new_tensor([percent / 100 for percent in percents]))
    return {f"{name}_p{percent}": torch.stack([x, weight]) for percent, x in zip(percents, sums, strict=True)}


def _distribution(name: str, values: Tensor) -> dict[str, Tensor]:
    """The mean of (n,) values, and their 5, 50 and 95 % quantiles."""
    return {name: _total(values)} | _quantiles(name, values, (5, 50, 95))
