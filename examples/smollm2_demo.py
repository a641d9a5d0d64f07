"""A model that people use learns sums on a CPU, and its answers before and after: `make demo-smollm2`.

    python examples/smollm2.py
    python examples/smollm2_demo.py --output_dir runs/demo-smollm2

Trains by the recipe `smollm2-sums`, which measures the success on held-out problems before and after. Then it asks both
models the first held-out problems, and prints the answers next to each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from troll.cli import main as troll
from troll.evaluation.estimators import wilson_interval
from troll.files import read_json

MODEL = Path("models/SmolLM2-135M-Instruct")
PROBLEMS = 8


def main() -> int:
    """Reads the options, trains, and shows what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output_dir", type=Path, required=True)
    options, fields = parser.parse_known_args()
    run = options.output_dir
    code = troll(
        ["train", "smollm2-sums", "--model_name_or_path", str(options.model), "--output_dir", str(run), *fields]
    )
    if code:
        return code
    settings = json.dumps(read_json(run / "model" / "task.json")["task_options"])
    task = ["--task", "reasoning_gym:chain_sum", "--task_options", settings, "--eval_size", str(PROBLEMS)]
    sampling = ["--temperature", "1", "--max_new_tokens", "14"]
    answers = []
    for name, model in (("before", options.model), ("after", run)):
        folder = run / f"answers-{name}"
        if code := troll(["eval", str(model), *task, *sampling, "--output_dir", str(folder)]):
            return code
        answers.append(completions(folder))
    problems = len(set(read_json(run / "verdicts.json")["question"]))
    show(read_json(run / "summary.json"), problems, *answers)
    return 0


def completions(folder: Path) -> list[dict[str, Any]]:
    """The completions of an evaluation, in the order of their problems."""
    (file,) = (folder / "generations").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: line["problem"])


def show(summary: dict[str, Any], problems: int, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Prints the answers of both models, and their success with 95 % intervals.

    Answers to the same problem are not independent, so the intervals are those of as many trials as there are different
    problems: wide enough even where such answers are all alike.

    Args:
        summary: The run's.
        problems: The different problems that are held out.
        before: Completions of the model before training.
        after: Those of the trained model, to the same problems.
    """
    table = Table("problem", "before", "after", title="Answers to held-out problems, sampled", show_lines=True)
    for then, now in zip(before, after, strict=True):
        asked = then["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        table.add_row(asked, *(f"{line['completion'].strip()} {'✓' if line['score'] else '✗'}" for line in (then, now)))
    console = Console()
    console.print(table)
    for name in ("before", "after"):
        success = summary[f"success_{name}"]
        low, high = wilson_interval(success, problems)
        console.print(
            f"success {name}: {success:.1%} ({low:.1%} to {high:.1%}) of {summary['eval_size']} answers "
            f"to {problems} held-out problems"
        )


if __name__ == "__main__":
    sys.exit(main())
