"""A vocabulary whose entries are spread over the processes of a group, as tensor parallelism spreads an LM head.

Every process holds an equal, contiguous slice: of n processes, the one of rank r holds the tokens
`[r·V/n, (r + 1)·V/n)`. This module combines the readings of all slices, so that every process gets the same numbers,
bit for bit, and other code need not know of slices. Token positions, hidden states and old policies are the same on
every process, and all processes make the same calls in the same order. Without a group nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..policy.top import Top, largest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary entries that this process holds: all of them, unless it is one of a group.

    Attributes:
        width: The number of entries that it holds.
        rank: The rank of this process in the group.
        slices: n, the number of processes in the group.
        group: The processes that hold the vocabulary together; None if this process holds all of it.
    """

    width: int
    rank: int = 0
    slices: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def held(cls, width: int, group: ProcessGroup | None) -> Vocabulary:
        """The vocabulary of which this process holds `width` entries, together with the others of a group.

        Raises:
            ValueError: If this process is not in the group.
        """
        if group is None:
            return cls(width)
        rank, slices = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        if rank < 0:
            raise ValueError("vocab_group must be a group of this process, got one without it")
        return cls(width, rank, slices, group) if slices > 1 else cls(width)

    @property
    def start(self) -> int:
        """The first entry that this process holds."""
        return self.rank * self.width

    @property
    def size(self) -> int:
        """V, the entries of all processes together."""
        return self.slices * self.width

    def merge_top(self, top: Top, sampled: Tensor, k: int) -> Top:
        """The k largest logits of all slices, by one all-gather of 3 k' + 2 numbers a token from each process.

        Args:
            top: The k' = min(k, width) largest of this process's entries, with their ids in the whole vocabulary. Its
                `sampled_logit` counts on the process that holds the token.
            sampled: The sampled tokens, (N,).
            k: The number of largest logits, at most V.

        Raises:
            ValueError: If the slices differ in size.
        """
        if self.group is None:
            return top
        ids, logits, tail_logits, sampled_logit, log_rest = self._gather_top(top)
        # Slices follow in the order of their ids, so these ascend.
        sampled_logit = sampled_logit.amax(-1)  # −inf where it is not held
        return largest(ids, logits, tail_logits, sampled, sampled_logit, log_rest, k)

    def _gather_top(self, top: Top) -> Top:
        """All processes' `top` next to each other, (N, n · ...), in one exchange: floats travel as their bits."""
        ids, logits, tail_logits, sampled_logit, log_rest = top
        bits = torch.int64 if logits.dtype == torch.float64 else torch.int32
        floats = torch.cat([logits, tail_logits, sampled_logit.unsqueeze(-1), log_rest.unsqueeze(-1)], -1)
        sent = torch.cat([ids.to(bits), floats.view(bits)], -1)
        row = torch.cat([sent.flatten(), sent.new_full((1,), self.width)])
        received = row.new_empty(self.slices * len(row))
        torch.distributed.all_gather_into_tensor(received, row, group=self.group)
        received = received.view(self.slices, -1)
        if bool((received[:, -1] != self.width).any()):
            raise ValueError(
                "the slices of vocab_group must hold equally many tokens each, "
                f"got {', '.join(map(str, received[:, -1].tolist()))}"
            )
        parts, slots = received[:, :-1].view(self.slices, *sent.shape), ids.shape[-1]
        columns = parts[..., slots:].contiguous().view(logits.dtype).split([slots, slots, 1, 1], -1)
        return Top(*(x.movedim(0, -2).flatten(-2) for x in (parts[..., :slots].long(), *columns)))

    def merge_support(self, on_support: Tensor, token_ids: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        """Collects a support's logits, and S numbers about each slice, by one all-reduce of K + S·n numbers a token.

        Args:
            on_support: (N, K), the logits of the tokens in this process's slice; elsewhere anything.
            token_ids: The support, (N, K), −1 in unused slots.
            *sums: S tensors (N,), each with one number about this process's slice.

        Returns:
            The logits, (N, K), −inf in unused slots; and each of the sums as (N, n), one for each process.
        """
        if self.group is None:
            return (on_support, *(x.unsqueeze(-1) for x in sums))
        slots = token_ids.shape[-1]
        elsewhere = (token_ids < self.start) | (token_ids >= self.start + self.width)
        shared = on_support.new_zeros(*token_ids.shape[:-1], slots + len(sums) * self.slices)
        shared[..., :slots] = on_support.masked_fill(elsewhere, 0)
        shared[..., slots + self.rank :: self.slices] = torch.stack(sums, -1)
        # For each number, all processes but one add 0, so that their sum is exact in any order.
        torch.distributed.all_reduce(shared, group=self.group)
        on_support, *gathered = shared.split([slots] + [self.slices] * len(sums), -1)
        return (on_support.masked_fill(token_ids < 0, -torch.inf), *gathered)

    def add_up(self, gradient: Tensor) -> None:
        """Adds up, in place, the processes' parts of the gradient of a tensor that all of them hold."""
        if self.group is not None:
            torch.distributed.all_reduce(gradient, group=self.group)
