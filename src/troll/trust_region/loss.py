"""The loss: the projected ratio times the advantage, and the pull, aggregated over tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from .checks import check_choice, check_shape
from .metrics import step_tally
from .step import TrustRegionStep

RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["sequence_mean", "token_mean", "fixed_length"]
RATIO_LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


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
    """Computes the loss to minimise, `−q(o)/p(o) · A + α · pull`, aggregated over the tokens, and metrics.

    The pull is `step.regression`: KL(p̃ ‖ ⌊q⌋), where ⌊q⌋ is q without gradient, or KL(p ‖ p̃) at every token.

    Args:
        step: The result of [trust_region_step][troll.trust_region_step] for (B, T) tokens.
        advantages: A: (B,), one per sequence, or (B, T).
        mask: (B, T), true (or 1) where a token counts. Values elsewhere do not matter, NaN included. On a GPU, where
            checking would need a host sync, a token that counts but has the label −100 in a step of
            [troll.huggingface][] becomes NaN, and the metrics count it as "nonfinite".
        regression_weight: α ≥ 0, the weight of the pull; with 0 there is only the projected ratio.
        ratio_level: "token"; or "sequence", the mean of log q/p over the sequence (GSPO).
        aggregation: "sequence_mean", the mean over a sequence's tokens, then over sequences (GRPO); "token_mean", over
            all tokens (DAPO); "fixed_length", the sum divided by `B · max_length` (Dr.GRPO).
        max_length: Tokens per sequence to divide by, for "fixed_length" only.
        num_tokens: Tokens to divide by, for "token_mean" only, if a batch is spread over micro-batches or processes:
            those of the whole batch, divided by the number of processes where gradients are averaged over these, as by
            DDP and FSDP. None for the tokens of the mask.

    Returns:
        The loss, a scalar, and metrics of the trust region by name, 0-d tensors; without a host sync. Where there was
        nothing to measure they are 0, except for "kl_before_mean", which is NaN: a KL of 0 would tell
        [KLTarget][troll.KLTarget] that the policy does not move.

    Raises:
        ValueError: If shapes do not fit, a name is unknown, α < 0, `max_length` or `num_tokens` is missing or not used,
            or (on a CPU) the mask counts tokens that the step did not score.
    """
    shape = step.log_ratio.shape
    check_shape("step", step.log_ratio, ("B", "T"))
    check_shape("mask", mask, shape)
    check_shape("advantages", advantages, shape[:1], shape)
    if not regression_weight >= 0:
        raise ValueError(f"regression_weight must be at least 0, got {regression_weight}")
    if isinstance(num_tokens, int | float) and not num_tokens >= 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)

    mask = mask.bool()
    step = _counting(step, mask)
    log_ratio = torch.where(mask, step.log_ratio, 0.0)
    if ratio_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else torch.where(mask, advantages, 0.0)
    per_token = -torch.exp(log_ratio) * advantages + regression_weight * step.regression
    loss = aggregate(per_token, mask, aggregation, max_length, num_tokens)
    tally = step_tally(step, mask)
    kl, count = tally.totals["kl_before_mean"]
    return loss, tally.values(empty=0.0) | {"kl_before_mean": kl / count}  # NaN for 0 / 0


def _counting(step: TrustRegionStep, mask: Tensor) -> TrustRegionStep:
    """The step, if it is about every token of a mask.

    On a GPU, where finding out would need a host sync, other tokens become NaN, which the metrics count.

    Raises:
        ValueError: On a CPU, if the mask counts other tokens.
    """
    if step.scored is None:
        return step
    others = mask & ~step.scored
    if mask.device.type != "cpu":
        broken = {name: getattr(step, name) for name in ("log_ratio", "regression", "kl_before", "kl_after")}
        return dataclasses.replace(
            step, **{name: values.masked_fill(others, torch.nan) for name, values in broken.items()}
        )
    if bool(others.any()):
        raise ValueError(
            f"mask must count only tokens that the step scored, got {int(others.sum())} of {int(mask.sum())} whose "
            "label is -100: use mask=labels[:, 1:] != -100, or a part of it"
        )
    return step


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "sequence_mean",
    max_length: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Aggregates (B, T) values over the tokens of the mask; arguments as for [troll_loss][troll.troll_loss]."""
    check_choice("aggregation", aggregation, AGGREGATIONS)
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
        total = mask.sum() if num_tokens is None else num_tokens
        return per_token.sum() / (total + (total == 0))
    return per_token.sum() / (max(len(mask), 1) * max_length)  # type: ignore[operator]
