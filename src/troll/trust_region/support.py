"""What a support is made of: its tokens, their log-probabilities, floors, and the checks of what is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Tail = Literal["bucket", "floor"]
TAILS: tuple[Tail, ...] = ("bucket", "floor")

#: Smaller probabilities are raised to this before a projection, and the distribution renormalised.
PROBABILITY_FLOOR = 1e-12

#: The K blocks of so many logits with the largest maxima contain the K largest logits, so only those are sorted.
BLOCK = 64

#: An engine's rounding may let its probabilities add up to so much; more, and they are something else.
LARGEST_TOTAL = 1.01


class Top(NamedTuple):
    """The largest logits of a distribution, and what normalises them."""

    ids: Tensor
    """(..., K), larger logit first, then smaller id."""
    logits: Tensor
    """(..., K)."""
    sampled_logit: Tensor
    """(..., 1)."""
    log_total: Tensor
    """Log-sum-exp of all tokens, (..., 1); NaN for a row that is no distribution."""
    log_rest: Tensor
    """Log-sum-exp of all but the K and the sampled one, (..., 1); −inf where there is no other."""


def as_float(tensor: Tensor) -> Tensor:
    """Float64 stays what it is; everything else is computed in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def log_count(count: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of some integers, which torch alone would give in float32 whatever the policy's dtype."""
    return count.to(dtype).log()


def floored(log_probs: Tensor, present: Tensor) -> Tensor:
    """Raises probabilities below 1e-12 and renormalises, (..., M); outcomes that are not `present` get −inf.

    No gradient flows through a floored entry.
    """
    raised = log_probs.clamp(min=math.log(PROBABILITY_FLOOR))
    return torch.log_softmax(raised.masked_fill(~present, -torch.inf), dim=-1)


def normaliser(z: Tensor) -> Tensor:
    """Log-sum-exp, (..., V) to (..., 1); NaN for a row with NaN, +inf, or nothing but −inf."""
    return nan_unless_finite(torch.logsumexp(z, dim=-1, keepdim=True))


def nan_unless_finite(log_total: Tensor) -> Tensor:
    """A normaliser, with NaN where it says that a row is no distribution."""
    return log_total.masked_fill(~log_total.isfinite(), torch.nan)


def top_ids(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries, (..., V) to (..., k): larger value first, then smaller id.

    The same as a stable descending sort; `topk` does not say which of equal values it takes.
    """
    blocks = z.shape[-1] // BLOCK
    if blocks > 2 * k:
        maxima = z[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1)
        beyond = torch.arange(blocks * BLOCK, z.shape[-1], device=z.device).expand(*z.shape[:-1], -1)
        candidates = torch.cat([candidate_ids(maxima, k), beyond], dim=-1)
        return candidates.gather(-1, top_ids(z.gather(-1, candidates), k))
    if z.dtype == torch.float64:
        return z.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One integer a token that orders like (value, −id). Adding 0 makes −0 equal to 0.
    bits = (z + 0.0).view(torch.int32)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    minus_id = torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    return z.shape[-1] - 1 - (((value.long() << 32) | minus_id).topk(k, dim=-1).values & 0xFFFFFFFF)


def candidate_ids(maxima: Tensor, k: int) -> Tensor:
    """Ids that contain the k largest, (..., blocks) to (..., at most k · 64), ascending: those of k blocks.

    Ascending, so that the smaller position is the smaller id.
    """
    chosen = top_ids(maxima, min(k, maxima.shape[-1])).sort(dim=-1).values
    return (chosen.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=maxima.device)).flatten(-2)


def missing_from(token_ids: Tensor, ids: Tensor) -> Tensor:
    """The ids that a support lacks, (..., K) and (..., M) to (..., M), −1 in place of all others."""
    return ids.masked_fill((ids.unsqueeze(-1) == token_ids.unsqueeze(-2)).any(-1), -1)


def keep(top: Top, sampled: Tensor, mass_threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of a capture: tokens until they cover ``1 − mass_threshold``, and always the sampled one.

    Args:
        top: See there.
        sampled: (..., 1).
        mass_threshold: δ; 0 keeps all.

    Returns:
        Token ids (..., K), −1 in unused slots; log-probabilities (..., K), −inf there; and that of the rest, (...).
    """
    ids = top.ids
    log_probs, sampled_log_prob, rest = (x - top.log_total for x in (top.logits, top.sampled_logit, top.log_rest))

    # A slot is used while it and everything after it hold more than the threshold, summed from the smallest up.
    in_top = (ids == sampled).any(-1, keepdim=True)
    outside = torch.where(in_top, rest, torch.logaddexp(rest, sampled_log_prob))
    remaining = outside.exp() + log_probs.exp().flip(-1).cumsum(-1).flip(-1)
    used = (remaining > mass_threshold) if mass_threshold > 0 else torch.ones_like(remaining, dtype=torch.bool)

    last = used.sum(-1, keepdim=True).clamp(max=ids.shape[-1] - 1)
    takes_last = ~(used & (ids == sampled)).any(-1, keepdim=True)
    takes_last = takes_last & (torch.arange(ids.shape[-1], device=ids.device) == last)
    dropped = (~used | takes_last) & (ids != sampled)
    tail_log_prob = torch.logsumexp(torch.cat([rest, log_probs.masked_fill(~dropped, -torch.inf)], -1), dim=-1)

    ids = torch.where(takes_last, sampled, ids.masked_fill(~used, -1))
    return ids, torch.where(takes_last, sampled_log_prob, log_probs.masked_fill(~used, -torch.inf)), tail_log_prob


def top_of_log_probs(ids: Tensor, log_probs: Tensor, sampled: Tensor, k: int, vocab_size: int) -> Top:
    """What a capture needs, from some log-probabilities with the sampled token's among them.

    Args:
        ids: (..., M), −1 in unused entries.
        log_probs: (..., M).
        sampled: (..., 1).
        k: K.
        vocab_size: V; everything but `ids` has what they leave of 1, and at least 1e-12.
    """
    ids, used = ids.long(), ids >= 0
    z = as_float(log_probs).masked_fill(~used, -torch.inf)
    # In float64, since a sum close to 1 in float32 knows the rest to 1e-7 only.
    log_covered = normaliser(z.double())
    left = (-torch.expm1(log_covered)).clamp(min=PROBABILITY_FLOOR).log()
    left = left.masked_fill(used.sum(-1, keepdim=True) == vocab_size, -torch.inf)
    log_total, left = torch.logaddexp(log_covered, left).to(z.dtype), left.to(z.dtype)

    # Among entries in ascending order, the unused ones last, ties go to the smaller position as to the smaller id.
    order = ids.masked_fill(~used, vocab_size).argsort(dim=-1)
    ids, z = ids.gather(-1, order), z.gather(-1, order)
    position = top_ids(z, min(k, ids.shape[-1]))
    others = z.scatter(-1, position, -torch.inf).masked_fill(ids == sampled, -torch.inf)
    empty = (0, k - position.shape[-1])
    return Top(
        ids=torch.nn.functional.pad(ids.gather(-1, position), empty, value=-1),
        logits=torch.nn.functional.pad(z.gather(-1, position), empty, value=-torch.inf),
        sampled_logit=z.masked_fill(ids != sampled, -torch.inf).amax(-1, keepdim=True),
        log_total=log_total,
        log_rest=torch.logsumexp(torch.cat([left, others], -1), -1, keepdim=True),
    )


def check_tokens(token_ids: Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError unless `token_ids` are integers of the given shape."""
    if token_ids.shape != torch.Size(shape):
        raise ValueError(f"token_ids must be {shape_text(shape)}, got {shape_text(token_ids.shape)}")
    check_integers("token_ids", token_ids)


def check_integers(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor is of integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")


def check_logits(logits: Tensor, token_ids: Tensor, rows: Tensor | None = None) -> None:
    """Raises ValueError unless (..., V) logits and (...) token ids have the shapes and dtypes of such.

    With `rows`, logits are (L, V), and rows and token ids (N,).
    """
    if logits.dim() == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point (..., V), got {logits.dtype} {shape_text(logits.shape)}")
    if rows is None:
        check_tokens(token_ids, logits.shape[:-1])
        return
    check_integers("rows", rows)
    if logits.dim() != 2 or rows.dim() != 1:
        raise ValueError(
            f"rows (N,) go with logits (L, V), got {shape_text(rows.shape)} and {shape_text(logits.shape)}"
        )
    check_tokens(token_ids, rows.shape)


def check_top_log_probs(top_token_ids: Tensor, top_log_probs: Tensor, token_ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless (..., M) entries fit each other, −1 if unused, and hold the (...) sampled tokens."""
    check_integers("token_ids", token_ids)
    check_integers("top_token_ids", top_token_ids)
    if not top_log_probs.is_floating_point():
        raise ValueError(f"top_log_probs must be floating point, got {top_log_probs.dtype}")
    for name, tensor in (("top_token_ids", top_token_ids), ("top_log_probs", top_log_probs)):
        if tensor.dim() == 0 or tensor.shape[-1] == 0 or tensor.shape != (*token_ids.shape, top_token_ids.shape[-1]):
            expected = shape_text((*token_ids.shape, "M"))
            raise ValueError(f"{name} must be {expected}, with one M of at least 1, got {shape_text(tensor.shape)}")
    check_tokens_in(token_ids, vocab_size)
    outside = (top_token_ids < -1) | (top_token_ids >= vocab_size)
    if bool(outside.any()):
        got = top_token_ids[outside][0].item()
        raise ValueError(f"top_token_ids must be in [0, {vocab_size}), or -1 if unused, got {got}")
    ordered = top_token_ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise ValueError(f"top_token_ids must differ in a row, got {ordered[..., 1:][twice][0].item()} twice")
    missing = ~(top_token_ids == token_ids.unsqueeze(-1)).any(-1)
    if bool(missing.any()):
        raise ValueError(
            f"token_ids must be among top_token_ids, got {token_ids[missing][0].item()} without its log-probability"
        )
    total = as_float(top_log_probs).masked_fill(top_token_ids < 0, -torch.inf).exp().sum(-1)
    if bool((total > LARGEST_TOTAL).any()):
        raise ValueError(f"top_log_probs must be log-probabilities, got some that add up to {total.max().item():.3g}")


def check_capture(top_k: int, mass_threshold: float, tail: str) -> None:
    """Raises ValueError on parameters of a capture that are out of their range."""
    if not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k}")
    if not 0 <= mass_threshold < 1:
        raise ValueError(f"mass_threshold must be in [0, 1), got {mass_threshold}")
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {tail!r}")


def check_tokens_in(token_ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless all `token_ids` are in [0, vocab_size)."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        raise ValueError(f"token_ids must be in [0, {vocab_size}), got {token_ids[outside][0].item()}")


def shape_text(shape: Sequence[object]) -> str:
    """A shape as error messages show it."""
    return f"({', '.join(map(str, shape))})"
