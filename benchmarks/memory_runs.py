"""The estimates of `benchmarks.memory` against whole runs on a GPU with random weights of real shapes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.memory import GIB, PHASES, SHAPES, Estimate, Machine
from troll_lab import recipes
from troll_lab.recipes import Recipe
from troll_lab.runs.toy_model import character_tokenizer
from troll_lab.runs.train import train
from troll_lab.tasks import load_task
from troll_lab.terminal import silence_libraries

QWEN3, SMOLLM2 = "Qwen--Qwen3-0.6B", "HuggingFaceTB--SmolLM2-135M-Instruct"
#: A shape, the longest completion, the micro-batch, and other settings.
CASES: dict[str, tuple[str, int, int, Sequence[str]]] = {
    "Qwen3-0.6B, all weights": (QWEN3, 256, 16, ()),
    "Qwen3-0.6B, all weights, checkpointing": (QWEN3, 256, 64, ("--gradient_checkpointing", "true")),
    "Qwen3-0.6B, LoRA, reference": (QWEN3, 256, 16, ("--use_peft", "true", "--beta", "0.01")),
    "Qwen3-0.6B, critic": (QWEN3, 256, 16, ("--advantage_estimator", "gae")),
    "SmolLM2-135M, all weights": (SMOLLM2, 512, 32, ()),
    "SmolLM2-135M, many completions": (
        SMOLLM2,
        512,
        8,
        ("--use_peft", "true", "--updates_per_rollout", "16", "--max_steps", "17"),
    ),
}
#: Two rollouts: in the first, the optimiser has no state yet.
SETTINGS = {
    "bf16": "true",
    "dtype": "float32",
    "updates_per_rollout": "2",
    "max_steps": "4",
    "train_size": "64",
    "eval_size": "8",
    "eval_strategy": "no",
    "eval_on_start": "false",
    "save_strategy": "no",
}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints a line for each case as soon as it has been measured, and returns rows; no run is repeated.

    Raises:
        SystemExit: If the device is a CPU, where `tests/test_memory.py` compares the two.
    """
    if device == "cpu":
        raise SystemExit("memory_runs measures a GPU; on a CPU: pytest -m slow tests/test_memory.py")
    rows = []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as processes:  # so that no run sees another's memory
        for name, case in CASES.items():
            row = {"case": name, **processes.submit(_run, *case).result()}
            rows.append(row)
            estimated, allocated, reserved = (row[key] / GIB for key in ("estimated", "allocated", "reserved"))
            Console().print(
                f"{name}: estimated {estimated:.2f} GiB ({row['phase']}), allocated {allocated:.2f} "
                f"({estimated / allocated:.2f}), reserved {reserved:.2f}",
                highlight=False,
            )
    return rows


def _run(shape: str, completion: int, rows: int, changes: Sequence[str]) -> dict[str, Any]:
    """Trains, and returns the estimated and the measured bytes."""
    silence_libraries()
    tokenizer = character_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(SHAPES / f"{shape}.json")
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        settings = SETTINGS | {
            "model_name_or_path": f"{folder}/model",
            "output_dir": f"{folder}/run",
            "max_completion_length": str(completion),
            "per_device_train_batch_size": str(rows),
        }
        options = [text for name, value in settings.items() for text in (f"--{name}", value)]
        recipe = recipes.load("quickstart", [*options, *changes])
        machine = Machine(torch.cuda.get_device_properties(0).total_memory)
        found = Estimate(recipe, machine, longest_prompt(recipe, tokenizer))
        estimated = dict(zip(PHASES, found.totals, strict=True))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(recipe, Console(quiet=True))
    return {
        "phase": max(estimated, key=lambda phase: estimated[phase]),
        "estimated": max(estimated.values()),
        "phases": estimated,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def longest_prompt(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokens of the longest prompt of a recipe whose prompts are plain texts."""
    task = load_task(recipe.task)
    prompts = [*task.train_dataset["prompt"], *task.eval_dataset["prompt"]]
    return max(len(ids) for ids in tokenizer(prompts)["input_ids"])
