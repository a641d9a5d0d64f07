"""The packed policy: a sparse policy without its unused slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import shape_text, shared
from .sparse import SparsePolicy, leave_inference_mode

#: The fields that have one entry for each slot, and those that have one for each position.
OF_SLOTS, OF_POSITIONS = ("token_ids", "log_probs"), ("counts", "tail_log_prob", "slot")


@dataclass(frozen=True, eq=False)
class PackedPolicy:
    """A `SparsePolicy` without its unused slots, for storage in rollout buffers and transfer over networks.

    Make one with `PackedPolicy.of`. All operations work on the packed form; `unpack` is for the minibatch of an update.
    For buffers that shuffle and cut lists of samples, `unbind` makes a list with one policy for each sequence, and
    `stack` joins any of its entries in any order, without waiting for the device.

    Counts are stored instead of offsets, because the counts of a part are a slice of all counts: a part can be a view
    in all five tensors, and joining parts needs no arithmetic.

    Attributes:
        token_ids: (S,) int32, the used slots of all positions in order.
        log_probs: (S,), the log-probabilities of these tokens, in nats.
        counts: (...) int32, the number of used slots of each position.
        tail_log_prob: (...), log of the mass outside the slots.
        slot: (...) int32, which of a position's own slots holds the sampled token.
        top_k: K, the slots of each position in the padded form.
        vocab_size: V of the captured source.
        mass_threshold: δ of the capture.
        truncated: Whether the slots are a sampler's kept set.
        temperature: The sampling temperature of the capture; None if it is not known.
    """

    token_ids: Tensor
    log_probs: Tensor
    counts: Tensor
    tail_log_prob: Tensor
    slot: Tensor
    top_k: int
    vocab_size: int
    mass_threshold: float
    truncated: bool = False
    temperature: float | None = None

    def __post_init__(self) -> None:
        leave_inference_mode(self)

    @classmethod
    def of(cls, policy: SparsePolicy) -> PackedPolicy:
        """The used slots of a policy, which come first in it; waits for the device once."""
        used = policy.used
        slots = used.flatten().nonzero().squeeze(-1)
        return cls(
            token_ids=policy.token_ids.flatten()[slots].int(),
            log_probs=policy.log_probs.flatten()[slots],
            counts=used.sum(-1, dtype=torch.int32),
            # A copy: a capture's tail can be a view that would keep K slots per position in memory.
            tail_log_prob=policy.tail_log_prob.clone(memory_format=torch.contiguous_format),
            slot=policy.slot.int(),
            top_k=policy.top_k,
            vocab_size=policy.vocab_size,
            mass_threshold=policy.mass_threshold,
            truncated=policy.truncated,
            temperature=policy.temperature,
        )

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.counts.shape

    @property
    def offsets(self) -> Tensor:
        """(positions + 1,) int64, always from 0: the flattened position i owns slots `[offsets[i], offsets[i + 1])`.

        Computed from the counts, without a wait for the device.
        """
        return torch.nn.functional.pad(self.counts.flatten().cumsum(0), (1, 0))

    @property
    def log_prob(self) -> Tensor:
        """Log-probability of the sampled token, (...), in nats; −inf at a position without slots."""
        starts = self.offsets[:-1].view(self.shape)
        slot = torch.where(self.counts > 0, starts + self.slot, self.token_ids.numel())
        return torch.nn.functional.pad(self.log_probs, (0, 1), value=-torch.inf)[slot]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; a view counts only its own part."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def unpack(self) -> SparsePolicy:
        """The padded policy, bit for bit what was packed, without a wait for the device."""
        slot = torch.arange(self.top_k, device=self.counts.device)
        starts = self.offsets[:-1].view(self.shape).unsqueeze(-1)
        # All unused slots read one more slot at the end.
        slots = torch.where(slot < self.counts.unsqueeze(-1), starts + slot, self.token_ids.numel())
        return SparsePolicy(
            torch.nn.functional.pad(self.token_ids, (0, 1), value=-1)[slots].long(),
            torch.nn.functional.pad(self.log_probs, (0, 1), value=-torch.inf)[slots],
            self.tail_log_prob,
            self.slot.long(),
            self.vocab_size,
            self.mass_threshold,
            self.truncated,
            self.temperature,
        )

    def to(self, *args: Any, **kwargs: Any) -> PackedPolicy:
        """Moves devices and casts the log-probabilities, with the arguments of `torch.Tensor.to`."""
        log_probs = self.log_probs.to(*args, **kwargs)
        integers = {
            name: getattr(self, name).to(log_probs.device, non_blocking=kwargs.get("non_blocking", False))
            for name in ("token_ids", "counts", "slot")
        }
        tail_log_prob = self.tail_log_prob.to(*args, **kwargs)
        return dataclasses.replace(self, log_probs=log_probs, tail_log_prob=tail_log_prob, **integers)

    def __getitem__(self, index: Any) -> PackedPolicy:
        """Indexes the token positions, as a tensor of shape (...) would be: an integer or a plain slice makes views.

        Waits for the device once, and once more for a mask: the number of slots is the shape of the result.
        """
        if self.shape and (type(index) is int or (isinstance(index, slice) and index.step in (None, 1))):
            return self._entries(index)
        positions = torch.arange(self.counts.numel(), device=self.counts.device).view(self.shape)[index]
        counts = self.counts.flatten()[positions]
        starts, ends, length = self.offsets[positions].flatten(), counts.flatten().cumsum(0), int(counts.sum())
        # The distance by which each slot moves; the length is given to avoid another host sync.
        shift = (starts - ends + counts.flatten()).repeat_interleave(counts.flatten(), output_size=length)
        slots = torch.arange(length, device=shift.device) + shift
        return self._part(slots, lambda x: x.flatten()[positions])

    def _entries(self, index: int | slice) -> PackedPolicy:
        """Views of one or successive entries of the first dimension."""
        self.counts[index]  # an index that is out of range raises here
        entries = range(self.shape[0])[index]
        entries = range(entries, entries + 1) if isinstance(entries, int) else entries
        positions, offsets = self.shape[1:].numel(), self.offsets
        edges = torch.stack([offsets[entries.start * positions], offsets[entries.stop * positions]])
        return self._part(slice(*edges.tolist()), lambda x: x[index])

    def _part(self, slots: Tensor | slice, positions_of: Callable[[Tensor], Tensor]) -> PackedPolicy:
        """Some slots, and the positions that they belong to."""
        parts: dict[str, Any] = {name: getattr(self, name)[slots] for name in OF_SLOTS}
        parts |= {name: positions_of(getattr(self, name)) for name in OF_POSITIONS}
        return dataclasses.replace(self, **parts)

    def unbind(self) -> list[PackedPolicy]:
        """The entries of the first dimension, usually a sequence each, as views, with one wait for the device in all.

        Raises:
            ValueError: If the policy has no dimensions.
        """
        if not self.shape:
            raise ValueError("a policy of a single position has no dimension to unbind")
        sizes = self.counts.reshape(self.shape[0], self.shape[1:].numel()).sum(-1).tolist()
        parts = {name: getattr(self, name).split(sizes) for name in OF_SLOTS}
        parts |= {name: getattr(self, name).unbind() for name in OF_POSITIONS}
        entries = zip(*parts.values(), strict=True)
        return [dataclasses.replace(self, **dict(zip(parts, tensors, strict=True))) for tensors in entries]

    @staticmethod
    def stack(policies: Sequence[PackedPolicy]) -> PackedPolicy:
        """Policies of one shape along a new first dimension: undoes `unbind`, in any order and for any subset.

        Does not wait for the device: how many slots each policy has is its tensors' shape.

        Raises:
            ValueError: If there is nothing to stack, or the policies were captured differently or differ in shape.
        """
        _check_same(policies, [tuple(policy.shape) for policy in policies])
        return _joined(policies, torch.stack)

    @staticmethod
    def cat(policies: Sequence[PackedPolicy]) -> PackedPolicy:
        """Concatenates along the first dimension of the token positions, without a wait for the device.

        Raises:
            ValueError: If there is nothing to concatenate, the policies were captured differently or differ in another
                dimension, or they have none.
        """
        _check_same(policies, [("*", *policy.shape[1:]) if policy.shape else () for policy in policies])
        if not policies[0].shape:
            raise ValueError("policies of a single position have no dimension to concatenate along: stack them")
        return _joined(policies, torch.cat)

    def __getstate__(self) -> dict[str, Any]:
        # Pickles and deep copies of a tensor take its whole storage along, which a sequence shares with its rollout.
        return {
            name: x.clone() if isinstance(x, Tensor) and x.untyped_storage().nbytes() != x.nbytes else x
            for name, x in vars(self).items()
        }


def _joined(policies: Sequence[PackedPolicy], join: Callable[[list[Tensor]], Tensor]) -> PackedPolicy:
    """Joins policies: slots one policy after the other, and tensors with one entry a position by `join`."""
    positions = {name: join([getattr(policy, name) for policy in policies]) for name in OF_POSITIONS}
    slots = {name: torch.cat([getattr(policy, name) for policy in policies]) for name in OF_SLOTS}
    top_k = max(policy.top_k for policy in policies)
    return dataclasses.replace(
        policies[0],
        **slots,  # type: ignore[arg-type]
        **positions,  # type: ignore[arg-type]
        top_k=top_k,
        temperature=_common_temperature(policies),
    )


def _check_same(policies: Sequence[PackedPolicy], shapes: Sequence[Sequence[object]]) -> None:
    """Raises ValueError, naming what differs, unless there are policies, of one shape, and all were captured alike.

    The slots of truncated policies may differ in number: each capture takes as many as its largest kept set needs.
    """
    if not policies:
        raise ValueError("policies must hold at least one policy, got none")
    for name in ("truncated", "mass_threshold", "vocab_size", *(() if policies[0].truncated else ("top_k",))):
        shared("policies", name, [getattr(policy, name) for policy in policies])
    shared("policies", "dtype", [policy.log_probs.dtype for policy in policies])
    shared("policies", "shape", list(map(shape_text, shapes)))


def _common_temperature(policies: Sequence[PackedPolicy]) -> float | None:
    """The temperature of the captures: None if it is not known of all; raises ValueError if two differ."""
    known = [policy.temperature for policy in policies if policy.temperature is not None]
    if known:
        shared("policies", "temperature", known)
    return known[0] if known and len(known) == len(policies) else None
