"""Old policies as records of integers, one for each sequence: the form in which verl's transfer queue carries them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from troll import PackedPolicy
from troll.trust_region.checks import shared

#: The words of a record that come before its counts.
HEADER = 10

#: The first word: "TRL" and the number of the layout, which a change of the layout or of a word's meaning changes.
_FORMAT = 0x54524C05


def to_record(policy: PackedPolicy) -> Tensor:
    """Writes the old policies of one sequence as one tensor.

    A record is 40 bytes, 12 for each position and 8 for each slot. In int32 words: format, positions, slots, `top_k`,
    `vocab_size`, two of `mass_threshold`, whether it is truncated, two of `temperature` (NaN if it is not known); then
    the count, the bits of the tail's log-probability and the sampled token's slot of each position, and the id and the
    bits of the log-probability of each slot.

    Args:
        policy: (T,), the positions of a sequence.

    Returns:
        A 1-D int32 tensor on the policy's device.

    Raises:
        ValueError: If the policy is not (T,), or its log-probabilities are not float32.
    """
    if len(policy.shape) != 1:
        raise ValueError(f"policy must have the shape (T,) of one sequence, got {tuple(policy.shape)}")
    for name in ("log_probs", "tail_log_prob"):
        dtype = getattr(policy, name).dtype
        if dtype != torch.float32:
            raise ValueError(f"policy must have float32 {name}, got {dtype}")
    temperature = math.nan if policy.temperature is None else policy.temperature
    threshold, temperature_words = (
        struct.unpack("<2i", struct.pack("<d", x)) for x in (policy.mass_threshold, temperature)
    )
    header = [_FORMAT, policy.shape[0], policy.token_ids.numel(), policy.top_k, policy.vocab_size]
    header += [*threshold, int(policy.truncated), *temperature_words]
    bits = (
        torch.tensor(header, dtype=torch.int32).to(policy.counts.device),
        policy.counts,
        policy.tail_log_prob.view(torch.int32),
        policy.slot,
        policy.token_ids,
        policy.log_probs.view(torch.int32),
    )
    return torch.cat(bits)


def without_policies(positions: int) -> Tensor:
    """The record of tokens without a policy, which goes with the records of any capture: its vocabulary is empty."""
    none, zeros = torch.zeros(positions, dtype=torch.int32), torch.zeros(positions)
    return to_record(PackedPolicy(none[:0], zeros[:0], none, zeros, none, top_k=1, vocab_size=0, mass_threshold=0.0))


def from_records(records: Sequence[Tensor]) -> PackedPolicy:
    """Undoes `to_record`, for some or all sequences of one capture, in any order.

    It waits for the device once, for all records together. It does not know the tokens that a record came with: compare
    them with the sampled tokens of the policy.

    Args:
        records: 1-D int32 tensors on one device.

    Returns:
        The policy, (N,): the positions of all records one after another.

    Raises:
        ValueError: If `records` is empty, one of them is cut short, of another layout or not a record, or they are on
            several devices or were captured differently.
    """
    if not records:
        raise ValueError("records must hold at least one record, got none")
    for index, record in enumerate(records):
        if record.dtype != torch.int32 or record.ndim != 1 or record.numel() < HEADER:
            raise ValueError(
                f"record {index} must be 1-D torch.int32 of at least {HEADER} words, got {record.ndim}-D "
                f"{record.dtype} of {record.numel()}"
            )
    shared("records", "device", [record.device for record in records])

    headers = torch.stack([record[:HEADER] for record in records]).tolist()
    # Only tokens without a policy have no vocabulary.
    like = next((header for header in headers if header[4]), headers[0])
    parts = enumerate(zip(records, headers, strict=True))
    return PackedPolicy.cat([_policy(index, record, header, like) for index, (record, header) in parts])


def _policy(index: int, record: Tensor, header: Sequence[int], like: Sequence[int]) -> PackedPolicy:
    """The policy of record `index`, (T,); tokens without a policy count as captured like those of the header `like`.

    Raises:
        ValueError: If the record is of another layout or has another length than its header says.
    """
    layout, positions, slots = header[:3]
    if layout != _FORMAT:
        raise ValueError(
            f"record {index} must begin with {_FORMAT}, as this version of troll writes it, got {layout}: it is "
            "not a record of old policies, or is of another version"
        )
    words = HEADER + 3 * positions + 2 * slots
    if record.numel() != words:
        raise ValueError(
            f"record {index} must have {words} words for its {positions} positions and {slots} slots, got "
            f"{record.numel()}: it was damaged on its way"
        )
    _, counts, tail_log_prob, slot, token_ids, log_probs = record.split([HEADER, *[positions] * 3, *[slots] * 2])
    top_k, vocab_size, *threshold, truncated, low, high = (header if header[4] else like)[3:]
    temperature = _double([low, high])
    return PackedPolicy(
        token_ids,
        log_probs.view(torch.float32),
        counts,
        tail_log_prob.view(torch.float32),
        slot,
        top_k=top_k,
        vocab_size=vocab_size,
        mass_threshold=_double(threshold),
        truncated=bool(truncated),
        temperature=None if math.isnan(temperature) else temperature,
    )


def _double(words: Sequence[int]) -> float:
    """The double of two int32 words."""
    return struct.unpack("<d", struct.pack("<2i", *words))[0]
