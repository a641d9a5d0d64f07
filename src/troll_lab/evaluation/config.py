"""The settings of an evaluation, checked before anything is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from troll.settings import check_fields, number
from troll_lab.tasks import TaskConfig
from troll_lab.terminal import UsageError, raised_as


class EvaluationError(UsageError):
    """An evaluation that is not possible with its settings."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The settings of an evaluation.

    Attributes:
        model: The name of a model or of a LoRA adapter on the Hugging Face hub, a folder with one, or the folder of a
            `troll train` run.
        tasks: The tasks, at least one, each once. Their held-out rows are the problems.
        samples: n, the completions of each problem, at least 1.
        ks: Each k of pass@k, from 1 to n; None for 1 and n.
        temperature: The sampling temperature, at least 0. 0 is greedy and needs n = 1. None is 0 for n = 1, else 1.
        top_p: The mass of the most likely tokens to sample from, in (0, 1].
        top_k: The number of most likely tokens to sample from; 0 for all.
        max_new_tokens: The largest number of tokens of a completion, at least 1; None for 2048, or fewer if the model's
            context is shorter.
        batch_size: The completions that are generated at once, at least 1; None for the backend's default.
        backend: "vllm", "transformers" or "auto", which is vLLM if it is installed and there is a GPU.
        seed: The seed of all random numbers.
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype in which the weights are stored; with "auto",
            vLLM converts float32 weights to bfloat16.
        chat_template_kwargs: Further variables of the chat template.
        model_revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether the model's own code may run.
        output_dir: The folder of the records and results; None for `runs/eval-` and the model's name.

    Raises:
        EvaluationError: If one of them is out of its range.
    """

    model: str
    tasks: Sequence[TaskConfig]
    samples: int = number(1, "an integer, at least 1")
    ks: Sequence[int] | None = None
    temperature: float | None = number(None, "finite and at least 0")
    top_p: float = number(1.0, "in (0, 1]")
    top_k: int = number(0, "an integer, at least 0")
    max_new_tokens: int | None = number(None, "an integer, at least 1")
    batch_size: int | None = number(None, "an integer, at least 1")
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_revision: str | None = None
    trust_remote_code: bool = False
    output_dir: Path | None = None

    def __post_init__(self) -> None:
        with raised_as(EvaluationError):
            check_fields(self)
        for k in self.resolved_ks:
            if not 1 <= k <= self.samples:
                raise EvaluationError(f"k must be between 1 and samples={self.samples}, got {k}")
        temperature = self.resolved_temperature
        if temperature == 0 and self.samples > 1:
            raise EvaluationError(
                f"temperature 0 gives the same completion {self.samples} times: use samples=1, or a temperature above 0"
            )
        if temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise EvaluationError(
                "temperature 0 is greedy, where top_p and top_k have no effect: set a temperature above 0, or neither "
                "of them"
            )
        if not self.tasks:
            raise EvaluationError("no task: name one with --task")
        count, name = max((count, name) for name, count in Counter(slug(task.task) for task in self.tasks).items())
        if count > 1:
            raise EvaluationError(f"task {name} is named {count} times: evaluate it once in a folder")

    @property
    def resolved_temperature(self) -> float:
        """The temperature, by default greedy for one completion and the model's own distribution for several."""
        default = 0.0 if self.samples == 1 else 1.0
        return default if self.temperature is None else float(self.temperature)  # transformers refuses an integer

    @property
    def resolved_ks(self) -> list[int]:
        """The k of pass@k, ascending, each once."""
        return sorted({1, self.samples} if self.ks is None else set(self.ks))

    @property
    def folder(self) -> Path:
        """The folder of the records and results: the same for the same command, so that it resumes there."""
        return self.output_dir or Path("runs") / f"eval-{slug(self.model.strip('/.'))}"


def slug(name: str) -> str:
    """A name with only characters that a file's name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-")
