"""Completions of tokenized prompts, each with a random seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: At least 0; 0 is greedy, and then the seeds and the two fields below do nothing.
        top_p: Of the most likely tokens, as many as carry this mass are kept, in (0, 1]; 1 keeps all.
        top_k: As many tokens are kept at most; 0 keeps all.
        max_new_tokens: Where a completion is cut off, at least 1.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        text: Without special tokens.
        tokens: How many were generated, the one that ended it included.
        finished: Whether the model ended it; False where it was cut off at `max_new_tokens`.
    """

    text: str
    tokens: int
    finished: bool


class Generator(Protocol):
    """Completes prompts.

    Attributes:
        batch_size: How many completions it is best asked for at once, where the user does not say.
    """

    batch_size: int

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generation]:
        """Completes each of B prompts once.

        Args:
            prompts: B lists of token ids, each at least one; one that comes several times is completed as often.
            seeds: B numbers; a completion depends on its prompt and its seed, and on the rest of its batch only by the
                rounding of floating-point numbers.

        Returns:
            B completions.
        """
        ...


def seed_of(seed: int, task: str, problem: int, sample: int) -> int:
    """The seed of one completion, in [0, 2³¹): a hash, so that no two streams of random numbers are related."""
    digest = hashlib.sha256(f"{seed}/{task}/{problem}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class TransformersGenerator:
    """Generation by transformers, a batch at a time.

    A token is drawn by inverting its cumulative distribution at a uniform number, and each completion has a row of such
    numbers of its own, from its seed. `generate` itself draws for a whole batch from one stream.

    Args:
        model: A causal language model; of its own generation settings only the tokens that end a text count.
        tokenizer: Its tokenizer.
        sampling: How completions are drawn.
    """

    batch_size = 16

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.tokenizer, self.sampling = model.eval(), tokenizer, sampling
        self.end_ids = _end_ids(model, tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.end_ids or [0])[0]
        # Else temperature, penalties and the like of the model's own file would fill in what is not set here.
        model.generation_config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.pad_id,
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generation]:
        """Completes each of B prompts once, see :meth:`Generator.generate`."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self.model.device
        completed = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            logits_processor=self._processors(seeds, width),
        )
        return [self._read(row) for row in completed[:, width:].tolist()]

    def _processors(self, seeds: Sequence[int], width: int) -> LogitsProcessorList:
        sampling = self.sampling
        if sampling.temperature == 0:
            return LogitsProcessorList()
        processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(InverseSampling(uniform_rows(seeds, sampling.max_new_tokens), width))
        return processors

    def _read(self, ids: list[int]) -> Generation:
        ends = (place for place, token in enumerate(ids) if token in self.end_ids)
        end = next(ends, None)
        text = self.tokenizer.decode(ids if end is None else ids[:end], skip_special_tokens=True)
        return Generation(text, len(ids) if end is None else end + 1, end is not None)


def uniform_rows(seeds: Sequence[int], length: int) -> torch.Tensor:
    """Uniform numbers (B, length) in [0, 1), float64, each row of which depends only on its own seed."""
    generator = torch.Generator()
    rows = [torch.rand(length, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


class InverseSampling(LogitsProcessor):
    """Leaves of every row the one token at which its cumulative distribution passes a given number.

    Args:
        uniform: (B, L) in [0, 1): for each row and each generated token.
        prompt_length: Tokens of the (padded) prompts.
    """

    def __init__(self, uniform: torch.Tensor, prompt_length: int) -> None:
        self.uniform, self.prompt_length = uniform, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.FloatTensor:
        """Takes and returns logits (B, V)."""
        self.uniform = self.uniform.to(scores.device)
        cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
        place = self.uniform[:, input_ids.shape[1] - self.prompt_length].unsqueeze(1) * cumulative[:, -1:]
        # The first entry above it: one that has no probability never is.
        chosen = torch.searchsorted(cumulative, place, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)  # type: ignore[return-value]


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = own if isinstance(own, list) else [own]
    return sorted({token for token in (*ids, tokenizer.eos_token_id) if token is not None})
