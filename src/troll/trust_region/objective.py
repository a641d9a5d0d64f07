"""The objective: trust-region log-probabilities of the sampled tokens, and the loss made of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from troll.trust_region.constraint import Constraint
from troll.trust_region.head import Head
from troll.trust_region.kernels import token, use_triton
from troll.trust_region.kernels.tile import Transform
from troll.trust_region.kernels.token import TrustRegionStep
from troll.trust_region.policy import SparsePolicy, present_outcomes
from troll.trust_region.support import check_logits, check_tokens_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["sequence_mean", "token_mean", "fixed_length"]
RATIO_LEVELS: tuple[RatioLevel, ...] = ("token", "sequence")
AGGREGATIONS: tuple[Aggregation, ...] = ("sequence_mean", "token_mean", "fixed_length")


def trust_region_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    solver: str = "newton",
    constraint: Constraint | None = None,
    *,
    vocab_group: ProcessGroup | None = None,
) -> TrustRegionStep:
    """Log-probabilities of the sampled tokens under the trust-region policy q, and the pull of the network towards it.

    Use ``step.log_probs`` where a trainer would use the raw log-probability, switch the clip off, and add
    ``regression_weight * step.regression`` (see :func:`troll_loss`).

    Args:
        logits: Of the new policy, (..., V), aligned with `token_ids` and divided by the sampling temperature.
        token_ids: The sampled tokens, (...), the same with which `old` was captured.
        old: The old policy, with its tail as captured.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (...). See :func:`~troll.project`.
        solver: "newton" or "bracket".
        constraint: Which of the tokens (...) share one multiplier and one bound; None for one each. See
            :class:`~troll.trust_region.constraint.Constraint`.
        vocab_group: The n processes over which the vocabulary is spread. Each then passes its slice of the logits,
            (..., V/n), the one of rank r the tokens ``[r·V/n, (r + 1)·V/n)``, and everything else alike; gets the same
            step, bit for bit; and is to compute the same loss of it, whose gradient with respect to its slice is what
            the backward pass returns: that communicates nothing. The forward takes one all-reduce of K + 2n numbers a
            token; for a floored tail on up to 2K slots, and an all-gather of 2 min(K, V/n) + 3 numbers before it.

    Raises:
        ValueError: On shapes that do not fit, tokens outside the vocabulary or the old support, ε ≤ 0, or an unknown
            solver.
    """
    check_logits(logits, token_ids)
    check_tokens_in(token_ids, old.vocab_size)
    old.check_positions(token_ids)
    new = old.new_policy(logits, token_ids, vocab_group=vocab_group)
    return trust_region_step(new, token_ids, old, kl_bound, solver, constraint)


def trust_region_log_probs_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    solver: str = "newton",
    constraint: Constraint | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    vocab_group: ProcessGroup | None = None,
) -> TrustRegionStep:
    """:func:`trust_region_log_probs` of the LM head's logits, without ever holding (tokens x vocabulary) numbers.

    Forward and backward go over the vocabulary in tiles, and the backward computes each tile anew. Gradients reach
    hidden states, weight and bias, accumulated in float32.

    Args:
        hidden: Hidden states of the new policy, (..., H), aligned with `token_ids`.
        lm_head_weight: (V, H).
        token_ids: As in `trust_region_log_probs`.
        old: As there; :meth:`SparsePolicy.from_hidden` captures it in the same way.
        kl_bound: As there.
        solver: As there.
        constraint: As there.
        bias: (V,), of the LM head.
        temperature: The sampling temperature.
        logit_scale: What the model multiplies its logits by.
        softcap: The model's final logit softcap.
        entropy: Whether the step's `entropy` is computed.
        vocab_group: As there; each process then passes its rows of `lm_head_weight` and `bias`, (V/n, H) and (V/n,),
            and the same hidden states. Their gradient is the whole one on every process: the backward pass adds up the
            slices' parts, in float32. So what is passed has to be the hidden states themselves. Behind Megatron's
            ``copy_to_tensor_model_parallel_region``, or a gather of sequence-parallel ones with
            ``tensor_parallel_output_grad=True``, they would be summed a second time: pass what goes into the former,
            and gather with False. With `entropy`, 3n instead of 2n numbers are exchanged a token.

    Raises:
        ValueError: As `trust_region_log_probs`, and on parts of the head that do not fit each other.
    """
    head = Head(lm_head_weight, bias, Transform(temperature, logit_scale, softcap), vocab_group=vocab_group)
    head.check(hidden, token_ids)
    old.check_positions(token_ids)
    new, entropies = old.new_policy_from_head(hidden, head, token_ids, entropy=entropy)
    step = trust_region_step(new, token_ids, old, kl_bound, solver, constraint)
    return dataclasses.replace(step, entropy=entropies)


def trust_region_step(
    new: SparsePolicy,
    token_ids: Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    solver: str = "newton",
    constraint: Constraint | None = None,
) -> TrustRegionStep:
    """:func:`trust_region_log_probs` of a new policy that has been read already (:meth:`SparsePolicy.new_policy`)."""
    old.check_positions(token_ids)
    slot = old.slot(token_ids)
    old = old.on_outcomes_of(new)
    present = present_outcomes(new, old)
    # The Triton program solves for one token, and knows nothing of others.
    if constraint is None and solver == "newton" and use_triton(new.log_probs, present.shape[-1]):
        from troll.trust_region.kernels import token_triton

        return token_triton.trust_region_step(new.outcomes, old.outcomes, present, slot, kl_bound)
    return token.trust_region_step(new.outcomes, old.outcomes, present, slot, kl_bound, solver, constraint)


def troll_loss(
    step: TrustRegionStep,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    regression_weight: float = 1.0,
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "sequence_mean",
    max_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, ``−q(o)/p(o) · A + α KL(p̃ ‖ ⌊q⌋)``, aggregated over the tokens, and metrics.

    Args:
        step: Of (B, T) tokens.
        old_log_probs: log p of the sampled tokens, (B, T): ``old.log_prob(token_ids)``.
        advantages: (B,), one per sequence, or (B, T).
        mask: (B, T), true (or 1) where a token counts. What stands elsewhere never matters, NaN included.
        regression_weight: α ≥ 0.
        ratio_level: "token"; or "sequence", the mean of log q/p over the sequence (GSPO).
        aggregation: "sequence_mean", the mean over a sequence's tokens, then over sequences (GRPO); "token_mean", over
            all tokens (DAPO); "fixed_length", the sum divided by ``B · max_length`` (Dr.GRPO).
        max_length: Tokens per sequence to divide by, for "fixed_length" alone.

    Returns:
        The loss, and the metrics of :func:`trust_region_metrics`; neither waits for the device.

    Raises:
        ValueError: On shapes that do not fit, an unknown name, α < 0, or a missing or needless `max_length`.
    """
    shape = step.log_probs.shape
    if len(shape) != 2:
        raise ValueError(f"step must hold (B, T) tokens, got {tuple(shape)}")
    for name, tensor in (("old_log_probs", old_log_probs), ("mask", mask)):
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} like the step, got {tuple(tensor.shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(f"advantages must be {tuple(shape[:1])} or {tuple(shape)}, got {tuple(advantages.shape)}")
    if not regression_weight >= 0:
        raise ValueError(f"regression_weight must be at least 0, got {regression_weight}")
    if ratio_level not in RATIO_LEVELS:
        raise ValueError(f"ratio_level must be one of {', '.join(RATIO_LEVELS)}, got {ratio_level!r}")

    mask = mask.bool()
    log_ratio = torch.where(mask, step.log_probs - old_log_probs, 0.0)
    if ratio_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else torch.where(mask, advantages, 0.0)
    per_token = -torch.exp(log_ratio) * advantages + regression_weight * step.regression
    loss = aggregate(per_token, mask, aggregation, max_length)
    return loss, trust_region_metrics(*trust_region_statistics(step, mask))


def aggregate(
    per_token: Tensor, mask: Tensor, aggregation: Aggregation = "sequence_mean", max_length: int | None = None
) -> Tensor:
    """Aggregates (B, T) values over the tokens of the mask; arguments as for :func:`troll_loss`."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    if (max_length is not None) != (aggregation == "fixed_length"):
        raise ValueError(f"max_length goes with aggregation 'fixed_length', got {max_length} with {aggregation!r}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    mask = mask.bool()
    per_token = torch.where(mask, per_token, 0.0)
    if aggregation == "sequence_mean":
        return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(len(mask), 1)
    if aggregation == "token_mean":
        return per_token.sum() / mask.sum().clamp(min=1)
    return per_token.sum() / (max(len(mask), 1) * max_length)  # type: ignore[operator]


def trust_region_statistics(step: TrustRegionStep, mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima over the tokens of the mask, 0-d and without gradient.

    Sums add, and maxima combine by maximum, across micro-batches and processes; :func:`trust_region_metrics` turns
    them into metrics. Tokens whose logits are no distribution are counted as "nonfinite" and left out of the rest.
    """
    mask = mask.bool()
    finite = mask & step.kl_before.isfinite()

    def total(values: Tensor) -> Tensor:
        return torch.where(finite, values.detach(), 0.0).sum()

    def largest(values: Tensor) -> Tensor:
        zero = values.new_zeros(1)
        return torch.cat([torch.where(finite, values, 0.0).flatten(), zero]).max()

    sums = {
        "tokens": finite.sum().to(step.kl_before.dtype),
        "nonfinite": (mask & ~finite).sum().to(step.kl_before.dtype),
        "projected": total(step.projected.to(step.kl_before.dtype)),
        "kl_before": total(step.kl_before),
        "kl_after": total(step.kl_after),
        "multiplier": total(step.multiplier),
        "regression": total(step.regression),
    }
    return sums, {"kl_before": largest(step.kl_before), "kl_after": largest(step.kl_after)}


def trust_region_metrics(sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics over the tokens from :func:`trust_region_statistics`, 0-d.

    Returns:
        ``kl_before_mean``, ``kl_before_max``, ``kl_after_mean``, ``kl_after_max``, ``projected_fraction``,
        ``multiplier`` (η, mean over the projected tokens; 0 if there are none), ``regression`` (mean over all tokens)
        and ``nonfinite`` (a count).
    """
    tokens = sums["tokens"].clamp(min=1)
    return {
        "kl_before_mean": sums["kl_before"] / tokens,
        "kl_before_max": maxima["kl_before"],
        "kl_after_mean": sums["kl_after"] / tokens,
        "kl_after_max": maxima["kl_after"],
        "projected_fraction": sums["projected"] / tokens,
        "multiplier": sums["multiplier"] / sums["projected"].clamp(min=1),
        "regression": sums["regression"] / tokens,
        "nonfinite": sums["nonfinite"],
    }
