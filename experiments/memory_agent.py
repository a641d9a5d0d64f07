"""An agent with a memory trained on all of its conversations, on the last ones only, and without its memory.

    python -m experiments.memory_agent --output_dir runs/memory-agent [--seeds 5]

The comparison of docs/trl.md. All runs start from one model, the warm-up of seed 0, and every evaluation goes through
the conversations. Writes docs/results/memory-agent.json; finished runs are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments import tables
from troll import recipes
from troll.cli import main as command
from troll.files import read_json, write_atomically
from troll.runs.build import model_path
from troll.runs.comparison_tables import markdown_table
from troll.runs.memory_agent import rollout
from troll.runs.statistics import paired_difference, seed_mean
from troll.trl.conversations import EARLIER

RESULT = Path(__file__).parents[1] / "docs" / "results" / "memory-agent.json"
RECIPE = "memory-agent"
METHODS = {
    "all conversations": "troll.runs.memory_agent:rollout",
    "the last ones only": "experiments.memory_agent:last_only",
    "without a memory": "experiments.memory_agent:forgetful",
}
CONTROL = "without a memory"  # seed 0 only
LONGER = 6  # terms, where training has three


def last_only(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The conversations of the recipe, of which only the last ones are trained on."""
    found = rollout(prompts, trainer)
    del found[EARLIER]
    return found


def forgetful(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The conversations of the recipe, each with an empty memory."""
    return rollout(prompts, trainer, remember=lambda _: "")


def main() -> int:
    """Trains, and prints the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    start = model_path(recipes.load(RECIPE, ["--seed", "0"]))
    found: dict[str, dict[str, list[float]]] = {method: {"before": [], "after": [], "longer": []} for method in METHODS}
    for seed in range(options.seeds):
        for method, function in METHODS.items():
            if seed and method == CONTROL:
                continue
            given = ["--rollout_func", function, "--seed", str(seed), "--warm_up", "{}"]
            folder = options.output_dir / f"{method.replace(' ', '-')}-{seed}"
            trained = run([*given, "--model_name_or_path", start], folder)
            # An evaluation before an update that nobody needs.
            terms = ["--task_options.min_terms", str(LONGER), "--task_options.max_terms", str(LONGER)]
            fields = [*terms, "--max_steps", "8", "--eval_steps", "8", "--model_name_or_path", str(folder / "model")]
            longer = run([*given, *fields], folder.with_name(f"{folder.name}-longer"))
            for name, value in zip(found[method], (*trained, longer[0]), strict=True):
                found[method][name].append(value)
    write_atomically(RESULT, json.dumps(found, indent=1) + "\n")
    print(outcome(found))
    return 0


def run(fields: list[str], folder: Path) -> tuple[float, float]:
    """The held-out success of a run before and after training; makes the run unless its folder has it."""
    if not (folder / "summary.json").exists() and (
        code := command(["train", RECIPE, *fields, "--output_dir", str(folder)])
    ):
        sys.exit(code)
    summary = read_json(folder / "summary.json")
    return summary["success_before"], summary["success_after"]


def outcome(found: dict[str, dict[str, list[float]]]) -> str:
    """Held-out success of each method, with 95 % intervals over seeds, as a table in Markdown."""
    head = ["trained on", "before, %", "after, %", f"after, on {LONGER} terms, %"]
    rows = [[method, *(tables.success(seed_mean(each)) for each in of.values())] for method, of in found.items()]
    first, second = (found[method] for method in list(METHODS)[:2])
    differences = (paired_difference(*(dict(enumerate(of[name])) for of in (first, second))) for name in first)
    shown = [f"{tables.points(each.mean)} {tables.interval(each.interval)}" for each in differences if each is not None]
    rows.insert(2, ["the first minus the second, in points", *shown])
    return markdown_table(head, rows)


if __name__ == "__main__":
    sys.exit(main())
