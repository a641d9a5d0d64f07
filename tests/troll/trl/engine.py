"""A stand-in for vLLM on a tiny model: its output format, with weights that are rounded or old, and unknown tokens."""

import copy
import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer

from tests.troll.trl.tiny import COMMON

#: [token][entry] of one completion.
Entries = list[list[Any]]


@dataclass
class Engine:
    """Samples from its own copy of a model.

    Attributes:
        rounded: Whether its weights are rounded to bf16.
        steps_old: It uses the weights of so many syncs before the last one.
        unknown: Every so many tokens, the log-probs are None; 0 never.
        temperature: Of the sampling.
        max_tokens: Of a completion.
        top_k: How many tokens it can sample, the likeliest ones; 0 for all.
        impossible: The log-prob of the others: −inf, as of a vLLM in this process, or −9999, as a server writes it.
    """

    rounded: bool = False
    steps_old: int = 0
    unknown: int = 0
    temperature: float = 1.0
    max_tokens: int = 8
    top_k: int = 0
    impossible: float = -math.inf
    model: Any = None
    tokens: int = 0
    weights: deque[dict[str, torch.Tensor]] = field(default_factory=deque)

    def sync(self, model: Any) -> None:
        """Takes the trainer's weights, and uses those of `steps_old` syncs before."""
        if hasattr(model, "merge_and_unload"):  # PEFT, whose adapter vLLM gets merged
            model = copy.deepcopy(model).merge_and_unload()
        if self.model is None:
            self.model = type(model)(copy.deepcopy(model.config)).eval()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if self.rounded:
            state = {name: value.bfloat16().to(value.dtype) for name, value in state.items()}
        self.weights.append(state)
        while len(self.weights) > self.steps_old + 1:
            self.weights.popleft()
        self.model.load_state_dict(self.weights[0])

    @torch.no_grad()
    def complete(self, prompt: list[int], number: int) -> tuple[list[int], Entries, Entries]:
        """Token ids, and for each the log-probs and ids of the `number` likeliest and of itself, sorted by rank."""
        completion: list[int] = []
        log_probs: Entries = []
        token_ids: Entries = []
        # Not the configuration's, where older versions of Trainer write only the tokenizer's.
        ends = COMMON["eos_token_id"]
        while len(completion) < self.max_tokens and not (completion and completion[-1] in ends):
            logits = self.model(torch.tensor([prompt + completion])).logits[0, -1].float()
            if self.top_k:
                logits[logits < logits.topk(self.top_k).values[-1]] = -torch.inf
            distribution = torch.log_softmax(logits / self.temperature, -1)
            sampled = int(torch.multinomial(distribution.exp(), 1))
            ids = distribution.sort(descending=True, stable=True).indices.tolist()
            ids = [token for token in ids if token in ids[:number] or token == sampled]
            self.tokens += 1
            is_unknown = self.unknown and self.tokens % self.unknown == 0
            completion.append(sampled)
            token_ids.append(ids)
            log_probs.append(
                [None if is_unknown else max(distribution[token].item(), self.impossible) for token in ids]
            )
        return completion, log_probs, token_ids


class EngineGeneration:
    """The interface of `trl.generation.vllm_generation.VLLMGeneration`."""

    def __init__(self, engine: Engine, model: Any, accelerator: Any, mode: str = "colocate", **settings: Any) -> None:
        self.engine, self.model, self.accelerator, self.mode = engine, model, accelerator, mode
        self.logprobs = settings.get("logprobs", 0)
        engine_config = SimpleNamespace(logprobs_mode="processed_logprobs", max_logprobs=-1, max_model_len=64)
        engine_config.hf_text_config = SimpleNamespace(vocab_size=COMMON["vocab_size"])
        device = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=engine_config, vllm_config=device))
        self.vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": vars(engine_config)})

    def sync_weights(self) -> None:
        self.engine.sync(self.model)

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple[Any, ...]:
        completions = [self.engine.complete(prompt, self.logprobs) for prompt in prompts]
        ids, log_probs, token_ids = (list(part) for part in zip(*completions, strict=True))
        return prompts, ids, log_probs, token_ids


def take_the_place_of_vllm(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Has trainers with `use_vllm` sample from an engine."""
    make = functools.partial(EngineGeneration, engine)
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", make)


@dataclass
class RolloutFunc:
    """A rollout function of TRL with a single completion for each prompt it gets."""

    engine: Engine
    number: int = 8

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.engine.sync(trainer.model)
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [self.engine.complete(ids, self.number) for ids in prompt_ids]
        completion_ids, log_probs, token_ids = (list(part) for part in zip(*completions, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[math.nan] * len(ids) for ids in completion_ids],
            "top_logprobs": log_probs,
            "top_logprob_token_ids": token_ids,
        }


def train_around_both(make: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Trains around the engine's policy and around the trainer's own: with one engine's rollouts, the same updates.

    Takes what makes a trainer by its anchor. Returns the log of each update around the engine's policy.
    """
    histories = []
    for anchor in ("rollout", "old"):
        trainer = make(anchor)
        torch.manual_seed(0)
        trainer.train()
        histories.append(trainer.state.log_history[:-1])
    for one, other in zip(*histories, strict=True):
        assert one.get("reward") == other.get("reward"), "the rollouts differ"
        for name in ("loss", "grad_norm", "trust_region/kl_before_mean", "trust_region/kl_after_max"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    return histories[0]
