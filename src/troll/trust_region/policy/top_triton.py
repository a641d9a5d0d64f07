"""The Triton counterpart of `top._slots`: one program a token."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import launching_on
from ..probabilities_triton import log_add_exp, log_sum_exp, nan_unless_finite, program_of, sortable

#: Entries with which all others are compared at once.
COMPARED = 4


def slots(
    top: tuple[Tensor, ...], sampled: Tensor, vocab_size: int, mass_threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of `top._slots`, from the fields of a `top.Top` in float32."""
    (tokens, k), z = top[0].shape, top[1]
    ids, log_probs = top[0].new_empty((tokens, k)), z.new_empty((tokens, k))
    order = torch.empty_like(ids, dtype=torch.int32)
    tail, slot = log_probs.new_empty(tokens), ids.new_empty(tokens)
    if tokens:
        with launching_on(ids.device):
            _slots_kernel[(tokens,)](
                *(part for x in top for part in (x, x.stride(0))),
                sampled.contiguous(),
                vocab_size,
                k,
                float(mass_threshold),
                order,
                ids,
                log_probs,
                tail,
                slot,
                KEEPS_ALL=mass_threshold == 0,
                COMPARED=COMPARED,
                **program_of(k + 1),
            )
    return ids, log_probs, tail, slot


@triton.jit
def _slots_kernel(
    ids,  # (N, k), and the two after it, each with the distance of its rows
    ids_stride,
    logits,
    logits_stride,
    tail_logits,
    tail_logits_stride,
    sampled_logit,  # (N,), like the next two parameters
    sampled_logit_stride,
    log_rest,
    log_rest_stride,
    sampled,
    vocab_size,
    k,
    mass_threshold,
    order,  # (N, k): the entries' positions, larger ones first
    kept_ids,  # (N, k), like the next parameter
    kept_log_probs,
    tail_log_prob,  # (N,), like the next parameter
    sampled_slot,
    KEEPS_ALL: tl.constexpr,
    COMPARED: tl.constexpr,
    OUTCOMES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wanted, wanted_z = tl.load(sampled + row), tl.load(sampled_logit + row * sampled_logit_stride)
    valid = (wanted >= 0) & (wanted < vocab_size)
    rest = tl.where(valid, tl.load(log_rest + row * log_rest_stride), float("nan"))
    wanted = tl.where(valid, wanted, 0)
    first = row * k
    ids += row * ids_stride
    logits += row * logits_stride
    tail_logits += row * tail_logits_stride
    lane = tl.arange(0, OUTCOMES)
    inside = lane < k

    token = tl.load(ids + lane, mask=inside, other=-1)
    z = tl.load(logits + lane, mask=inside, other=float("-inf"))
    is_wanted = inside & (token == wanted)
    in_top = tl.sum(is_wanted.to(tl.int32), axis=0) > 0
    wanted_z = tl.where(in_top, tl.sum(tl.where(is_wanted, z, 0.0), axis=0), wanted_z)
    outside = tl.where(in_top, rest, log_add_exp(rest, wanted_z))
    total = nan_unless_finite(log_sum_exp(tl.where(lane == k, outside, z)))
    # No sort: an entry's rank is the number of those that come before it. All others remain with it.
    key = sortable(z)
    rank = tl.zeros([OUTCOMES], tl.int32)
    remaining = tl.zeros([OUTCOMES], tl.float32) + tl.exp(outside - total)
    for start in range(0, k, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_z = tl.load(logits + other, mask=other < k, other=float("-inf"))
        other_key = sortable(other_z)
        larger = other_key[None, :] > key[:, None]
        earlier = (other_key[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
        before = larger | earlier
        rank += tl.sum((before & (other < k)[None, :]).to(tl.int32), axis=1)
        if not KEEPS_ALL:
            remaining += tl.sum(tl.where(before, 0.0, tl.exp(other_z - total)[None, :]), axis=1)
    # A slot is used while it and all smaller ones hold more than the threshold: so the used ones are the largest.
    used = inside & (token >= 0)
    if not KEEPS_ALL:
        used &= remaining > mass_threshold
    count = tl.sum(used.to(tl.int32), axis=0)
    tl.store(order + first + rank, lane, mask=inside)

    # A thread reads positions that others wrote.
    tl.debug_barrier()
    at = tl.load(order + first + lane, mask=inside, other=0)
    token = tl.load(ids + at, mask=inside, other=-1)
    z = tl.load(logits + at, mask=inside, other=float("-inf"))
    tail_z = tl.load(tail_logits + at, mask=inside, other=float("-inf"))
    used = lane < count
    contains = tl.sum((used & (token == wanted)).to(tl.int32), axis=0) > 0
    last = tl.minimum(count, k - 1)
    takes_last = (lane == last) & (contains == 0)
    dropped = inside & ((used == 0) | takes_last) & (token != wanted)
    tail = log_sum_exp(tl.where(lane == k, rest, tl.where(dropped, tail_z, float("-inf"))))

    token = tl.where(takes_last, wanted, tl.where(used, token, -1))
    z = tl.where(takes_last, wanted_z, tl.where(used, z, float("-inf")))
    # Normalised with the operations of a step, so that equal policies are equal to the last digit.
    total = nan_unless_finite(log_sum_exp(tl.where(lane == k, tail, z)))
    tl.store(kept_ids + first + lane, token, mask=inside)
    tl.store(kept_log_probs + first + lane, tl.where(token >= 0, z - total, float("-inf")), mask=inside)
    tl.store(tail_log_prob + row, tail - total)
    slot = tl.min(tl.where(inside & (token == wanted), lane, OUTCOMES), axis=0)
    tl.store(sampled_slot + row, slot.to(tl.int64))
