import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, TrainerCallback

from troll_lab.runs.toy_model import character_tokenizer, model_config

#: A run of seconds on top of the quickstart recipe: two rollouts of two updates.
SHORT = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "num_generations": 4,
    "max_steps": 4,
    "logging_steps": 1,
    "eval_steps": 2,
    "save_steps": 2,
    "eval_size": 8,
    "train_size": 32,
    "per_device_eval_batch_size": 8,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 of a few thousand parameters and the character tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def write_tiny_model(folder: Path, chat_template: str | None = None) -> Path:
    """Writes such a model, and returns its folder."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = chat_template
    config = model_config(tokenizer)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 16, 32, 1, 4
    config.layer_types = ["full_attention"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def short(model: Path, folder: Path, **changed: object) -> list[str]:
    """Overrides for a short run of any recipe."""
    return overrides(SHORT | {"model_name_or_path": model, "output_dir": folder} | changed)


def overrides(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def short_run(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Overrides for a short run of any recipe into `tmp_path / "run"`."""
    return short(tiny_model, tmp_path / "run")


@pytest.fixture
def chat_model(tmp_path: Path) -> Callable[[str | None], Path]:
    """Writes the tiny model with a chat template."""
    return lambda template: write_tiny_model(tmp_path / "model", template)


@pytest.fixture(scope="session")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, str]:
    """A run that was never interrupted: its overrides, its folder and what it printed."""
    from troll_lab import recipes
    from troll_lab.runs.train import train

    folder = tmp_path_factory.mktemp("whole") / "run"
    overrides, output = short(tiny_model, folder), io.StringIO()
    assert train(recipes.load("quickstart", overrides), Console(file=output, width=200))
    return overrides, folder, output.getvalue()


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "runtime", "per_second")
    return [{name: value for name, value in line.items() if not name.endswith(times)} for line in lines]


def trainer_with(*callbacks: TrainerCallback) -> Callable[..., Any]:
    """What makes the trainer of a run, in place of `build._trainer`: it has these callbacks too."""
    from troll_lab.runs import build  # slow to import

    make = build._trainer

    def make_with(*arguments: Any) -> Any:
        trainer = make(*arguments)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return make_with
