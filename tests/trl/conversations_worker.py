"""Rollouts of several conversations, and what either of two processes does with them: see `tests.trl.worker`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.trl import tiny

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 6,
    "steps_per_generation": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
}

END = tiny.COMMON["eos_token_id"][0]


def conversation(seed: int) -> dict[str, list[int]]:
    """Tokens, the same for the same number; every third completion ends."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(7, 47, (length,), generator=generator).tolist()

    end = [END] if seed % 3 == 0 else []
    return {"prompt_ids": tokens(3 + seed % 4), "completion_ids": tokens(2 + seed % 3) + end}


@dataclass
class Rollout:
    """A rollout function with a number of earlier conversations for each of all processes' samples.

    Attributes:
        earlier: The numbers; None for a function that returns nothing of the kind.
        given: What it has returned last.
    """

    earlier: Sequence[int] | None
    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        samples = range(first, first + len(prompts))
        last = [conversation(1000 + i) for i in samples]
        self.given = {name: [each[name] for each in last] for name in ("prompt_ids", "completion_ids")}
        self.given["logprobs"] = None
        if self.earlier is not None:
            self.given["earlier"] = [[conversation(10 * i + j) for j in range(self.earlier[i])] for i in samples]
        return dict(self.given)


def by_hand(
    model: torch.nn.Module,
    samples: Sequence[Sequence[dict[str, list[int]]]],
    advantages: Sequence[float],
    rows: int | None = None,
) -> dict[str, torch.Tensor]:
    """The policy gradient of conversations, each read by itself, where old and new policy are equal.

    Args:
        model: The policy.
        samples: The conversations of each sample.
        advantages: Of each sample.
        rows: For the loss "grpo", by how many rows the sum of the conversations' means is divided; None for "dapo", the
            mean over all tokens.
    """
    model.zero_grad()
    tokens = sum(len(each["completion_ids"]) for several in samples for each in several)
    for several, advantage in zip(samples, advantages, strict=True):
        for each in several:
            prompt, completion = each["prompt_ids"], each["completion_ids"]
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion).unsqueeze(-1))
            (-float(advantage) * log_probs.sum() / (rows * len(completion) if rows else tokens)).backward()
    return tiny.gradients(model)


def samples_of(given: dict[str, Any]) -> list[list[dict[str, list[int]]]]:
    """The conversations of each sample, the last one first."""
    last = zip(given["prompt_ids"], given["completion_ids"], strict=True)
    earlier = given.get("earlier") or [[]] * len(given["prompt_ids"])
    return [
        [{"prompt_ids": prompt, "completion_ids": completion}, *several]
        for (prompt, completion), several in zip(last, earlier, strict=True)
    ]


def mean_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """The mean of the gradients of a rollout's micro-batches, by parameter."""
    each = [tiny.loss_and_gradients(trainer, inputs)[1] for inputs in tiny.rollout(trainer)]
    return {name: torch.stack([gradients[name] for gradients in each]).mean(0) for name in each[0]}


#: In the first process, no earlier conversations; in the second, 11.
UNEQUAL = [0, 0, 0, 0, 0, 0, 3, 0, 1, 4, 2, 1]


def work(mode: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """A rollout with its metrics, the gradients of its rows in this process, and a run."""
    make = tiny.Maker(models, folder / "out")
    found: dict[str, Any] = {}
    for loss in ("grpo", "dapo"):
        rollout = Rollout(UNEQUAL)
        trainer = make(rollout_func=rollout, loss_type=loss, **tiny.halved(SETTINGS))
        assert trainer.accelerator.num_processes == 2
        gradients = mean_gradients(trainer)
        kept = [tiny.tensors(inputs) for inputs in trainer._buffered_inputs]
        found[loss] = {"gradients": gradients, "inputs": kept, "samples": samples_of(rollout.given)}
    trainer = make(rollout_func=Rollout(UNEQUAL), **tiny.halved(SETTINGS), advantage_estimator="reinforce_plus_plus")
    trainer.train()
    return found | {"log": trainer.state.log_history, "parameters": tiny.parameters(trainer.model)}
