"""Old policies as records with checksums, one for each sequence, for buffers and networks that carry only tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..checks import shared
from .packed import PackedPolicy
from .sparse import common_temperature

#: The words of a record that come before its counts.
HEADER = 13

# "TRL" and the number of the layout. Another layout, or another meaning of a word, takes another number.
_MAGIC, _VERSION = 0x54524C00, 4
_CHECKSUM_AT = 8


class CorruptPolicy(ValueError):
    """Raised when a record differs from what `to_records` wrote."""


def to_records(policy: PackedPolicy, lengths: Sequence[int]) -> list[Tensor]:
    """Writes old policies as one tensor for each sequence, with a header and a checksum.

    A record is 52 bytes, 12 for each position and 8 for each slot. In int32 words: format, words in all, positions,
    slots, `top_k`, `vocab_size`, two of `mass_threshold`, two of the checksum, whether it is truncated, two of
    `temperature` (NaN if it is not known); then the count, the bits of the tail's log-probability and the sampled
    token's slot of each position, and the id and the bits of the log-probability of each slot.

    It waits for the device once. For a moment it holds a second copy of all records, and three int64 for each word.

    Args:
        policy: (N,), the positions of all sequences one after another.
        lengths: Positions of each sequence, which add up to N.

    Returns:
        1-D int32 tensors on the policy's device, each in its own storage, so that a pickle of one holds only that one.

    Raises:
        ValueError: If the lengths do not fit the policy, its log-probabilities are not float32, or its counts do not
            add up to its slots.
    """
    sizes = list(lengths)
    if len(policy.shape) != 1 or sum(sizes) != policy.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"lengths must be at least 0 and add up to N of a policy of shape (N,), got {len(sizes)} lengths of "
            f"{sum(sizes)} in all for shape {tuple(policy.shape)}"
        )
    for name in ("log_probs", "tail_log_prob"):
        dtype = getattr(policy, name).dtype
        if dtype != torch.float32:
            raise ValueError(f"policy must have float32 {name}, got {dtype}")
    if not sizes:
        return []
    device = policy.counts.device
    edges = policy.offsets[_on(device, [0, *accumulate(sizes)])].tolist()
    if edges[-1] != policy.token_ids.numel():
        raise ValueError(f"policy has counts of {edges[-1]} slots in all, and {policy.token_ids.numel()} slots")
    slots = [end - start for start, end in pairwise(edges)]
    temperature = math.nan if policy.temperature is None else policy.temperature
    threshold, temperature_words = (
        struct.unpack("<2i", struct.pack("<d", x)) for x in (policy.mass_threshold, temperature)
    )
    captured = [policy.top_k, policy.vocab_size, *threshold, 0, 0, int(policy.truncated), *temperature_words]
    words = [HEADER + 3 * positions + 2 * used for positions, used in zip(sizes, slots, strict=True)]
    headers = [[_MAGIC | _VERSION, *own, *captured] for own in zip(words, sizes, slots, strict=True)]
    records = zip(
        _on(device, headers, torch.int32).unbind(),
        policy.counts.split(sizes),
        policy.tail_log_prob.view(torch.int32).split(sizes),
        policy.slot.split(sizes),
        policy.token_ids.split(slots),
        policy.log_probs.view(torch.int32).split(slots),
        strict=True,
    )
    flat = torch.cat([part for record in records for part in record])
    starts = _on(device, [0, *accumulate(words[:-1])])
    flat[starts.unsqueeze(-1) + _on(device, [_CHECKSUM_AT, _CHECKSUM_AT + 1])] = _checksums(flat, words)
    return [record.clone() for record in flat.split(words)]


def from_records(records: Sequence[Tensor]) -> PackedPolicy:
    """Undoes `to_records`, for some or all records of one capture, in any order.

    A checksum of 64 bits covers every word and its place: it finds each flipped bit, and any other damage except for
    one case in about 2⁶⁴. Nothing else is checked, since a record that passes is as it was written. The checksum is no
    signature: anyone who can write records can also write checksums.

    It waits for the device once, for all records together.

    Args:
        records: 1-D int32 tensors on one device.

    Returns:
        The policy, (N,): the positions of all records one after another.

    Raises:
        CorruptPolicy: If a record is truncated, damaged, of another layout, or not a record; names the first such one.
        ValueError: If there are no records, or they are on several devices or were captured differently.
    """
    if not records:
        raise ValueError("records must hold at least one record, got none")
    for index, record in enumerate(records):
        _check_form(index, record)
    shared("records", "device", [record.device for record in records])

    words = [record.numel() for record in records]
    flat = torch.cat(list(records))
    starts = _on(flat.device, [0, *accumulate(words[:-1])])
    headers = flat[starts.unsqueeze(-1) + torch.arange(HEADER, device=flat.device)]
    known = torch.cat([headers, _checksums(flat, words)], dim=1).tolist()
    for index, (size, header) in enumerate(zip(words, known, strict=True)):
        _check_header(index, header[:HEADER], header[HEADER:], size)
    mass_threshold = shared("records", "mass_threshold", [_double(header[6:8]) for header in known])
    temperatures = [_double(header[11:13]) for header in known]
    temperature = common_temperature("records", [None if math.isnan(x) else x for x in temperatures])
    vocab_size = shared("records", "vocab_size", [header[5] for header in known])
    truncated = bool(shared("records", "truncated", [header[10] for header in known]))
    slots = [header[4] for header in known]
    top_k = max(slots) if truncated else shared("records", "top_k", slots)

    parts = flat.split([size for header in known for size in (HEADER, *[header[2]] * 3, *[header[3]] * 2)])
    counts, tail_log_prob, slot, token_ids, log_probs = (torch.cat(parts[first::6]) for first in range(1, 6))
    log_probs, tail_log_prob = log_probs.view(torch.float32), tail_log_prob.view(torch.float32)
    return PackedPolicy(
        token_ids, log_probs, counts, tail_log_prob, slot, top_k, vocab_size, mass_threshold, truncated, temperature
    )


def _double(words: Sequence[int]) -> float:
    """The double of two int32 words."""
    return struct.unpack("<d", struct.pack("<2i", *words))[0]


def _check_form(index: int, record: Tensor) -> None:
    if record.dtype != torch.int32 or record.ndim != 1:
        raise CorruptPolicy(
            f"record {index} is not a record of old policies: expected 1-D torch.int32, got {record.ndim}-D "
            f"{record.dtype}"
        )
    if record.numel() < HEADER:
        raise CorruptPolicy(f"record {index} is truncated: it has {record.numel()} words, and a header has {HEADER}")


def _check_header(index: int, header: list[int], checksum: list[int], size: int) -> None:
    magic, version = header[0] & ~0xFF, header[0] & 0xFF
    if magic != _MAGIC:
        raise CorruptPolicy(f"record {index} is not a record of old policies: its first word is {header[0]}")
    if version != _VERSION:
        raise CorruptPolicy(f"record {index} has layout {version}, and this version of troll reads {_VERSION}")
    if header[1] != size:
        raise CorruptPolicy(f"record {index} says it has {header[1]} words and has {size}")
    if header[_CHECKSUM_AT : _CHECKSUM_AT + 2] != checksum:
        raise CorruptPolicy(f"record {index} was damaged: its checksum is not that of its {size} words")


def _checksums(flat: Tensor, words: Sequence[int]) -> Tensor:
    """(R, 2) int32 for R records one after another: the sum of 64-bit hashes of each word and its place, modulo 2⁶⁴."""
    sizes = _on(flat.device, words)
    ends = sizes.cumsum(0)
    place = torch.arange(flat.numel(), device=flat.device)
    place -= (ends - sizes).repeat_interleave(sizes, output_size=flat.numel())
    own = (place >= _CHECKSUM_AT) & (place < _CHECKSUM_AT + 2)
    hashes = place.bitwise_left_shift_(32).bitwise_or_(flat.long().bitwise_and_(0xFFFFFFFF))
    # One-to-one in word and place, so that no change of a single word leaves the sum: the steps of splitmix64
    # (Steele, Lea, Flood 2014). torch's shift to the right copies the sign, hence the masks.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        hashes ^= (hashes >> shift).bitwise_and_((1 << 64 - shift) - 1)
        hashes *= factor
    totals = hashes.masked_fill_(own, 0).cumsum(0)[ends - 1]
    return totals.diff(prepend=totals.new_zeros(1)).view(torch.int32).view(-1, 2)


def _on(device: torch.device, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host numbers on a device. It is made on the host first, since torch would wait for the device."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
