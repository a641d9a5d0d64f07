"""The objective: the trust region at the sampled tokens, and the loss computed from it."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from troll.trust_region.metrics import Totals
from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail, check_tail
from troll.trust_region.policy.values import shape_text
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.pull import Pull, check_pull
from troll.trust_region.projecting.step import TrustRegionStep, step
from troll.trust_region.reading.capture import capture
from troll.trust_region.reading.logits import Logits
from troll.trust_region.reading.read import read
from troll.trust_region.reading.source import Source

RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["sequence_mean", "token_mean", "fixed_length"]
RATIO_LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)

#: With more mass than this outside its support, a policy is too flat for `tail="floor"`.
FLOORED_MASS = 1e-3


def trust_region_step(
    source: Source | Outcomes | Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    *,
    tail: Tail = "bucket",
    solver: str = "newton",
    constraint: Constraint | None = None,
    pull: Pull = "projection",
    entropy: bool = False,
) -> TrustRegionStep:
    """The trust region of one optimisation step: each sampled token's ratio, and the pull.

    Use `step.log_ratio` where a trainer would use the difference of log-probabilities, switch the clip off, and add
    `regression_weight * step.regression`; [troll_loss][troll.troll_loss] does all three.

    Args:
        source: The new policy: logits (..., V), aligned with the tokens and divided by the sampling temperature; or any
            source: [Logits][troll.Logits], [LMHead][troll.LMHead], or outcomes that have been read at the old tokens.
        old: The old policy, (...), as captured.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (...). See [project][troll.project].
        tail: "bucket" makes the tail one more outcome with its exact mass. "floor" follows the paper's code: every
            token outside both policies' supports has probability 1e-12. It is meant for comparisons, waits for the
            device, and warns where it sees divergences that do not exist.
        solver: "newton", or "bracket", the paper's search.
        constraint: Which of the tokens (...) share one multiplier and one bound; None gives each token its own.
        pull: What `step.regression` is: "projection", the paper's KL(p̃ ‖ ⌊q⌋), which acts outside the ball only; or
            "proximal", KL(p ‖ p̃), which keeps the network near the old policy at every token. With a bound of infinity
            nothing is projected, and the latter is a KL penalty.
        entropy: Whether the step's `entropy` is computed.

    Raises:
        ValueError: If the positions or the vocabulary do not fit, ε ≤ 0, or a name is unknown.
    """
    check_tail(tail)
    check_pull(pull)
    source = Logits(source) if isinstance(source, Tensor) else source
    old.check_positions(source.shape)
    if tail == "floor":
        _warn_of_floor(old)
    if isinstance(source, Outcomes):
        return step(source, old, kl_bound, tail, solver, constraint, pull)
    if source.vocabulary.size != old.vocab_size:
        raise ValueError(f"source must have the old policy's {old.vocab_size} tokens, got {source.vocabulary.size}")
    token_ids = old.token_ids
    if tail == "floor":
        sampled = token_ids.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
        token_ids = support(source, token_ids, sampled, tail, old.mass_threshold)
    return step(read(source, token_ids, entropy=entropy), old, kl_bound, tail, solver, constraint, pull)


def support(source: Source, old_token_ids: Tensor, sampled: Tensor, tail: Tail, mass_threshold: float) -> Tensor:
    """The tokens at which a step reads the new policy, (..., K'), −1 in unused slots.

    These are the old policy's tokens; for `tail="floor"`, the tokens that a capture of the new policy would keep
    follow.

    Args:
        source: The new policy, (...).
        old_token_ids: The old policy's tokens, (..., K).
        sampled: The sampled tokens, (...).
        tail: "bucket" or "floor".
        mass_threshold: δ of the old policy's capture.
    """
    if tail == "bucket":
        return old_token_ids
    own = capture(source, sampled, top_k=old_token_ids.shape[-1], mass_threshold=mass_threshold).token_ids
    known = (own.unsqueeze(-1) == old_token_ids.unsqueeze(-2)).any(-1)
    return torch.cat([old_token_ids, own.masked_fill(known, -1)], -1)


def _warn_of_floor(old: SparsePolicy) -> None:
    if bool((old.tail_log_prob.exp() > FLOORED_MASS).any()):
        # The text has no counts, so that Python shows it once and not in every step.
        warnings.warn(
            f"tail='floor' sees divergences that do not exist: at some tokens more than {FLOORED_MASS:g} of the old "
            f"policy's mass is outside its {old.top_k} tokens. Use tail='bucket', or raise top_k",
            stacklevel=3,
        )


def troll_loss(
    step: TrustRegionStep,
    advantages: Tensor,
    mask: Tensor,
    *,
    regression_weight: float = 1.0,
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "sequence_mean",
    max_length: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, `−q(o)/p(o) · A + α · pull`, aggregated over the tokens, and metrics.

    The pull is the step's: KL(p̃ ‖ ⌊q⌋), or KL(p ‖ p̃) at every token.

    Args:
        step: What [trust_region_step][troll.trust_region_step] returned for (B, T) tokens.
        advantages: A: (B,), one per sequence, or (B, T).
        mask: (B, T), true (or 1) where a token counts. Values elsewhere do not matter, NaN included.
        regression_weight: α ≥ 0, the weight of the pull; with 0 there is only the projected ratio.
        ratio_level: "token"; or "sequence", the mean of log q/p over the sequence (GSPO).
        aggregation: "sequence_mean", the mean over a sequence's tokens, then over sequences (GRPO); "token_mean", over
            all tokens (DAPO); "fixed_length", the sum divided by `B · max_length` (Dr.GRPO).
        max_length: Tokens per sequence to divide by, for "fixed_length" only.
        num_tokens: Tokens to divide by, for "token_mean" only, if a batch is spread over micro-batches or processes;
            None for the tokens of the mask.

    Returns:
        The loss, a scalar, and metrics of the trust region by name, 0-d tensors. Nothing waits for the device.

    Raises:
        ValueError: If shapes do not fit, a name is unknown, α < 0, or `max_length` or `num_tokens` is missing or not
            used.
    """
    shape = step.log_ratio.shape
    if len(shape) != 2:
        raise ValueError(f"step must hold (B, T) tokens, got {shape_text(shape)}")
    if mask.shape != shape:
        raise ValueError(f"mask must be {shape_text(shape)} like the step, got {shape_text(mask.shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages must be {shape_text(shape[:1])} or {shape_text(shape)}, got {shape_text(advantages.shape)}"
        )
    if not regression_weight >= 0:
        raise ValueError(f"regression_weight must be at least 0, got {regression_weight}")
    if ratio_level not in RATIO_LEVELS:
        raise ValueError(f"ratio_level must be one of {', '.join(RATIO_LEVELS)}, got {ratio_level!r}")

    mask = mask.bool()
    log_ratio = torch.where(mask, step.log_ratio, 0.0)
    if ratio_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else torch.where(mask, advantages, 0.0)
    per_token = -torch.exp(log_ratio) * advantages + regression_weight * step.regression
    loss = aggregate(per_token, mask, aggregation, max_length, num_tokens)
    return loss, Totals.of(step, mask).metrics()


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "sequence_mean",
    max_length: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Aggregates (B, T) values over the tokens of the mask; arguments as for [troll_loss][troll.troll_loss]."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    if (max_length is not None) != (aggregation == "fixed_length"):
        raise ValueError(f"max_length goes with aggregation 'fixed_length', got {max_length} with {aggregation!r}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if num_tokens is not None and aggregation != "token_mean":
        raise ValueError(f"num_tokens goes with aggregation 'token_mean', got {num_tokens} with {aggregation!r}")
    mask = mask.bool()
    per_token = torch.where(mask, per_token, 0.0)
    if aggregation == "sequence_mean":
        return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(len(mask), 1)
    if aggregation == "token_mean":
        return per_token.sum() / (mask.sum().clamp(min=1) if num_tokens is None else num_tokens)
    return per_token.sum() / (max(len(mask), 1) * max_length)  # type: ignore[operator]
