"""Trains a model that people use on sums, on a CPU, and shows answers before and after: `make demo-smollm2`.

    python examples/smollm2.py
    python examples/smollm2_demo.py --output_dir runs/demo-smollm2

Evaluates the model on the held-out problems of the recipe `smollm2-sums`, trains it, evaluates it again, and prints
both results and some of the answers next to each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from troll.files import read_json
from troll_lab import recipes
from troll_lab.cli import main as troll
from troll_lab.terminal import say

MODEL = Path("models/SmolLM2-135M-Instruct")
SHOWN = 8
#: The whole demo with the recipe's own settings, as docs/tour.md reports it.
DURATION = "22 minutes on two cores of an Intel Xeon"


def main() -> int:
    """Reads the options, evaluates, trains, evaluates again, and shows the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output_dir", type=Path, required=True)
    options, fields = parser.parse_known_args()
    before, run, after = (options.output_dir / name for name in ("before", "run", "after"))
    fields = ["--model_name_or_path", str(options.model), "--output_dir", str(run), *fields]
    fields += ["--eval_strategy", "no", "--eval_on_start", "false"]
    recipe = recipes.load("smollm2-sums", fields)
    task = ["--task", recipe.task.task, "--task_options", json.dumps(recipe.task.options)]
    task += ["--eval_size", str(recipe.task.eval_size), "--seed", str(recipe.training.seed)]
    sampling = ["--temperature", "1", "--max_new_tokens", str(recipe.training.max_completion_length)]
    console = Console()
    say(console, f"with the recipe's settings, the three parts took {DURATION}; each shows the time that it has left")
    parts = {
        "evaluation before training": ["eval", str(options.model), *task, *sampling, "--output_dir", str(before)],
        "training": ["train", recipe.name, *fields],
        "evaluation after training": ["eval", str(run), *task, *sampling, "--output_dir", str(after)],
    }
    for number, (name, command) in enumerate(parts.items(), start=1):
        say(console, f"part {number} of 3: {name}")
        if code := troll(command):
            return code
    show(before, after)
    return 0


def show(before: Path, after: Path) -> None:
    """Prints answers of both models, and their success with 95 % intervals.

    Args:
        before: The folder of the evaluation before training.
        after: The folder of the one after it, of the same problems.
    """
    table = Table("problem", "before", "after", title="Answers to held-out problems, sampled", show_lines=True)
    for then, now in islice(zip(completions(before), completions(after), strict=True), SHOWN):
        asked = then["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        table.add_row(asked, *(f"{line['completion'].strip()} {'✓' if line['score'] else '✗'}" for line in (then, now)))
    console = Console()
    console.print(table)
    for name, folder in (("before", before), ("after", after)):
        (task,) = read_json(folder / "results.json")["tasks"].values()
        success, (low, high) = task["metrics"]["pass@1"], task["intervals"]["pass@1"]
        console.print(f"success {name}: {success:.1%} ({low:.1%} to {high:.1%}) of {task['completions']} answers")


def completions(folder: Path) -> list[dict[str, Any]]:
    """The completions of an evaluation, in the order of their problems."""
    (file,) = (folder / "generations").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: line["problem"])


if __name__ == "__main__":
    sys.exit(main())
