"""Generates completions of tokenized prompts, each with its own random seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from troll.huggingface.token_ids import embedding_rows


@dataclass(frozen=True)
class Sampling:
    """The sampling settings.

    Attributes:
        temperature: The sampling temperature, at least 0; 0 is greedy: seeds and the next two fields then have no
            effect.
        top_p: The mass of the most likely tokens to sample from, in (0, 1]; 1 is all.
        top_k: The number of most likely tokens to sample from; 0 is all.
        max_new_tokens: The number of tokens at which a completion is cut off, at least 1.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        text: The text of the completion, without special tokens.
        tokens: The number of generated tokens, including the one that ended the completion.
        finished: Whether the model ended it; False if it was cut off at `max_new_tokens`.
    """

    text: str
    tokens: int
    finished: bool


def seed_of(seed: int, task: str, problem: int, sample: int) -> int:
    """The seed of one completion, in [0, 2³¹): a hash, so that streams of random numbers are not related."""
    digest = hashlib.sha256(f"{seed}/{task}/{problem}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class TransformersGenerator:
    """Generation by transformers, a batch at a time.

    A token is drawn by inverting its cumulative distribution at a uniform number, and each completion has its own row
    of such numbers, from its seed. The model's `generate` would draw for a whole batch from one stream.

    Args:
        model: A causal language model; of its generation settings, only the end-of-sequence tokens are used.
        tokenizer: The model's tokenizer.
        sampling: The sampling settings.
    """

    batch_size = 16

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.tokenizer, self.sampling = model.eval(), tokenizer, sampling
        self.end_ids = _end_ids(model, tokenizer)
        # Padding is masked, so any id with a row in the embedding will do; the pad token of some tokenizers has none.
        ids = (tokenizer.pad_token_id, *self.end_ids, 0)
        self.pad_id = next(each for each in ids if each is not None and each < embedding_rows(model))
        # Otherwise the model's own file would set temperature, penalties and others that are not set here.
        model.generation_config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.pad_id,
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generation]:
        """Completes each of B prompts once.

        Args:
            prompts: B lists of token ids, none empty; a prompt may occur several times.
            seeds: B numbers. A completion depends on its prompt and its seed, and on the rest of its batch only by
                rounding.

        Returns:
            B completions.
        """
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        width, device = ids.shape[1], self.model.device
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
    """Uniform numbers (B, length) in [0, 1), float64; each row depends only on its own seed."""
    generator = torch.Generator()
    rows = [torch.rand(length, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


class InverseSampling(LogitsProcessor):
    """Keeps in every row only the token at which its cumulative distribution passes a given number.

    Args:
        uniform: The numbers, (B, L) in [0, 1), one for each row and each generated token.
        prompt_length: The number of tokens of the (padded) prompts.
    """

    def __init__(self, uniform: torch.Tensor, prompt_length: int) -> None:
        self.uniform, self.prompt_length = uniform, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.FloatTensor:
        """Takes and returns logits (B, V)."""
        self.uniform = self.uniform.to(scores.device)
        cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
        place = self.uniform[:, input_ids.shape[1] - self.prompt_length].unsqueeze(1) * cumulative[:, -1:]
        # The first entry above the number: its token always has a probability above 0.
        chosen = torch.searchsorted(cumulative, place, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)  # type: ignore[return-value]


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = own if isinstance(own, list) else [own]
    return sorted({token for token in (*ids, tokenizer.eos_token_id) if token is not None})
