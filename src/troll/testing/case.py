"""The cases of the conformance test, and the result of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["padded", "packed"]
"""The layout of a trainer's batch: rows padded to one length, or the tokens of all samples one after another."""

VOCAB_SIZE = 48
"""Tokens of a case. The first eight occur in no sample: they are the trainer's (padding, end of sequence)."""

IGNORED = range(8, 24)
"""Tokens whose rows are read only at positions that do not count."""

COUNTED = range(24, 48)
"""Tokens whose rows are read only at positions that count."""

UNREACHABLE = 1e6
"""A divergence that no policy of a case reaches."""

METRICS = ("kl_before", "kl_after", "projected_fraction", "regression")
"""Means over the tokens that count, which every adapter reports."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and a response to it.

    Attributes:
        prompt: The prompt's tokens, (P,) int64.
        response: The response's tokens, (R,) int64.
        counts: (R,) bool, true for tokens of the response that count. The policy did not sample the others.
        advantage: The advantage of every token of the response.
    """

    prompt: Tensor
    response: Tensor
    counts: Tensor
    advantage: float

    @property
    def token_ids(self) -> Tensor:
        """The whole sequence, (P + R,)."""
        return torch.cat([self.prompt, self.response])


@dataclass(frozen=True, eq=False)
class Case:
    """A mini-batch for one update: score it with the old network, then update the new one with it.

    Attributes:
        samples: The samples in the order in which the rollout made them.
        old_table: (V, V); the logits at a position that holds token a are row a, not yet divided by the temperature.
        new_table: (V, V), the same of the network that is updated. Both are the adapter's own, and may be overwritten.
        layout: How the trainer lays out a micro-batch: "padded", a row a sample; "packed", one sample after the other.
        micro_batches: The samples of each micro-batch of the update, by number. The rollout may be scored in any other
            order.
        temperature: The sampling temperature, which has to divide the logits.
        kl_bound: ε in nats.
        regression_weight: α, the weight of the regression term.
        top_k: K for the capture: the whole vocabulary, or part of it.
        mass_threshold: δ for the capture.
    """

    samples: tuple[Sample, ...]
    old_table: Tensor
    new_table: Tensor
    layout: Layout
    micro_batches: tuple[tuple[int, ...], ...]
    temperature: float = 0.7
    kl_bound: float = 0.05
    regression_weight: float = 1.5
    top_k: int = VOCAB_SIZE
    mass_threshold: float = 0.0


@dataclass(frozen=True, eq=False)
class Update:
    """An adapter's update for a case, over all micro-batches, before the gradient is clipped.

    Attributes:
        loss: The loss of the mini-batch.
        gradient: Its gradient with respect to the new table, (V, V).
        metrics: `METRICS`, under these names: means over the tokens that count, or aggregated as the loss is.
    """

    loss: float | Tensor
    gradient: Tensor
    metrics: Mapping[str, float | Tensor]


Adapter = Callable[[Case], Update]
"""Runs the trainer's own capture and update in one call; the network is a table of logits."""


def make_case(layout: Layout, dtype: torch.dtype) -> Case:
    """Four samples of different lengths, two of them with tokens that do not count.

    Tokens are on both sides of the bound, and some ratios are beyond any clip that trainers have.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: range) -> int:
        return tokens[int(torch.randint(len(tokens), (), generator=generator))]

    samples = []
    for prompt_length, response_length, others, advantage in (
        (2, 7, (2, 3), 1.3),
        (5, 3, (), -0.8),
        (3, 9, (0, 5), 0.6),
        (4, 5, (), -1.7),
    ):
        counts = torch.ones(response_length, dtype=torch.bool)
        counts[list(others)] = False
        # The tokens of a sequence whose rows predict a token that counts.
        reads = [False] * (prompt_length - 1) + counts.tolist() + [False]
        token_ids = torch.tensor([draw(COUNTED if read else IGNORED) for read in reads])
        samples.append(Sample(token_ids[:prompt_length], token_ids[prompt_length:], counts, advantage))
    old = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    # Every third row moves little: its tokens stay within the bound.
    moved = torch.where(torch.arange(VOCAB_SIZE) % 3 == 0, 0.1, 0.5).unsqueeze(-1)
    new = old + moved * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    for sample in samples[2:]:  # the last token, which counts, with advantages of both signs
        new[sample.token_ids[-2], sample.token_ids[-1]] += 3.0
    return Case(tuple(samples), old.to(dtype), new.to(dtype), layout, (tuple(range(len(samples))),))
