"""A vocabulary whose entries are spread over the processes of a group, as tensor parallelism spreads an LM head.

Every process holds an equal, contiguous slice: of n processes the one of rank r the tokens ``[r·V/n, (r + 1)·V/n)``.
What is read from the slices is brought together here, so that every process gets the same numbers, bit for bit, and
what follows need not know of it. Token positions, hidden states and old policies are the same on every process, and
all of them make the same calls in the same order. Where nothing is spread, `Vocabulary` stands in, and nobody is asked.
docs/method.md says what is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from troll.trust_region.policy.top import Top, largest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary entries that this process holds: all of them.

    Attributes:
        width: How many it holds.
    """

    width: int

    @property
    def start(self) -> int:
        """The first one."""
        return 0

    @property
    def size(self) -> int:
        """V, of all processes together."""
        return self.width

    def merge_top(self, top: Top, sampled: Tensor, k: int) -> Top:
        """The k largest logits of all slices, from those of each.

        Args:
            top: Of this process's entries, with their ids in the whole vocabulary; (N, min(k, width)) of them. Its
                `sampled_logit` counts on the process that holds the token.
            sampled: The sampled tokens, (N,).
            k: At most V.

        Raises:
            ValueError: If the slices differ in size.
        """
        return top

    def merge_support(self, on_support: Tensor, token_ids: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        """The logits on a support whose tokens lie in several slices, and what each process says of its slice.

        Args:
            on_support: (N, K), the logits of the tokens of this process's slice; elsewhere anything.
            token_ids: (N, K), −1 in unused slots.
            *sums: S of (N,), one number of this process's slice each.

        Returns:
            (N, K), −inf in unused slots; and each of the sums as (N, n), one of each process.
        """
        return (on_support, *(x.unsqueeze(-1) for x in sums))

    def add_up(self, gradient: Tensor) -> None:
        """Adds up, in place, what the processes found of a gradient of something that all of them hold."""


@dataclass(frozen=True)
class VocabularySlice(Vocabulary):
    """The vocabulary entries that this process of a group holds.

    Attributes:
        rank: Of this process in the group.
        slices: n, how many processes there are.
        group: The group.
    """

    rank: int
    slices: int
    group: ProcessGroup

    @property
    def start(self) -> int:
        """The first one."""
        return self.rank * self.width

    @property
    def size(self) -> int:
        """V, of all processes together."""
        return self.slices * self.width

    def merge_top(self, top: Top, sampled: Tensor, k: int) -> Top:
        """By one all-gather, of 3 k' + 2 numbers a token from each process, where `top` has k' logits."""
        ids, logits, tail_logits, sampled_logit, log_rest = self._gather_top(top)
        # Slices follow in the order of their ids, so these ascend.
        sampled_logit = sampled_logit.amax(-1)  # −inf where it is not held
        return largest(ids, logits, tail_logits, sampled, sampled_logit, log_rest, k)

    def _gather_top(self, top: Top) -> Top:
        """That of all processes next to each other, (N, n · ...), in one exchange: floats travel as their bits."""
        ids, logits, tail_logits, sampled_logit, log_rest = top
        bits = torch.int64 if logits.dtype == torch.float64 else torch.int32
        floats = torch.cat([logits, tail_logits, sampled_logit.unsqueeze(-1), log_rest.unsqueeze(-1)], -1)
        sent = torch.cat([ids.to(bits), floats.view(bits)], -1)
        received = self._gather(torch.cat([sent.flatten(), sent.new_full((1,), self.width)]))
        if bool((received[:, -1] != self.width).any()):
            raise ValueError(
                "the slices of vocab_group must hold equally many tokens each, "
                f"got {', '.join(map(str, received[:, -1].tolist()))}"
            )
        parts, slots = received[:, :-1].view(self.slices, *sent.shape), ids.shape[-1]
        columns = parts[..., slots:].contiguous().view(logits.dtype).split([slots, slots, 1, 1], -1)
        return Top(*(x.movedim(0, -2).flatten(-2) for x in (parts[..., :slots].long(), *columns)))

    def _gather(self, sent: Tensor) -> Tensor:
        received = sent.new_empty(self.slices * len(sent))
        torch.distributed.all_gather_into_tensor(received, sent, group=self.group)
        return received.view(self.slices, -1)

    def merge_support(self, on_support: Tensor, token_ids: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        """By one all-reduce, of K + S·n numbers a token."""
        slots = token_ids.shape[-1]
        elsewhere = (token_ids < self.start) | (token_ids >= self.start + self.width)
        shared = on_support.new_zeros(*token_ids.shape[:-1], slots + len(sums) * self.slices)
        shared[..., :slots] = on_support.masked_fill(elsewhere, 0)
        shared[..., slots + self.rank :: self.slices] = torch.stack(sums, -1)
        # Of each number all processes but one say 0, so that their sum is exact in any order.
        torch.distributed.all_reduce(shared, group=self.group)
        on_support, *gathered = shared.split([slots] + [self.slices] * len(sums), -1)
        return (on_support.masked_fill(token_ids < 0, -torch.inf), *gathered)

    def add_up(self, gradient: Tensor) -> None:
        """By one all-reduce."""
        torch.distributed.all_reduce(gradient, group=self.group)


def held_vocabulary(width: int, group: ProcessGroup | None) -> Vocabulary:
    """The entries of the vocabulary that this process holds, so many; all there are if there is no group.

    Raises:
        ValueError: If this process is not of the group.
    """
    if group is None:
        return Vocabulary(width)
    rank, slices = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("vocab_group must be a group of this process, got one without it")
    return VocabularySlice(width, rank, slices, group) if slices > 1 else Vocabulary(width)
