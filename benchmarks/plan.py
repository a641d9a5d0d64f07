"""The estimates of `troll plan` against what whole runs allocate on a GPU, with random weights of real shapes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from troll import recipes
from troll.runs.plan import GIB, PHASES, Plan, this_machine
from troll.runs.toy_model import character_tokenizer
from troll.runs.train import train
from troll.tasks import load_task
from troll.tasks.chat_template import longest_prompt
from troll.terminal import silence_libraries

QWEN3, SMOLLM2 = "Qwen--Qwen3-0.6B", "HuggingFaceTB--SmolLM2-135M-Instruct"
#: A shape that ships with the recipes, the longest completion, the micro-batch, and other settings.
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
        SystemExit: If the device is a CPU, where `tests/runs/test_plan.py` compares the two.
    """
    if device == "cpu":
        raise SystemExit("plan measures a GPU; on a CPU: pytest -m slow tests/runs/test_plan.py")
    rows = []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as processes:  # so that no run sees another's memory
        for name, case in CASES.items():
            row = {"case": name, **processes.submit(_run, *case).result()}
            rows.append(row)
            planned, allocated, reserved = (row[key] / GIB for key in ("planned", "allocated", "reserved"))
            Console().print(
                f"{name}: planned {planned:.2f} GiB ({row['phase']}), allocated {allocated:.2f} "
                f"({planned / allocated:.2f}), reserved {reserved:.2f}",
                highlight=False,
            )
    return rows


def _run(shape: str, completion: int, rows: int, changes: Sequence[str]) -> dict[str, Any]:
    """Trains, and returns the planned and the measured bytes."""
    silence_libraries()
    tokenizer = character_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(recipes.FOLDER / "shapes" / f"{shape}.json")
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
        prompt = longest_prompt([load_task(recipe.task)], tokenizer, {})
        plan = Plan(recipe, this_machine(recipe.training), f"{folder}/model", prompt)
        planned = dict(zip(PHASES, plan.totals, strict=True))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(recipe, Console(quiet=True))
    return {
        "phase": max(planned, key=lambda phase: planned[phase]),
        "planned": max(planned.values()),
        "phases": planned,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
