"""An agent with a memory: what its conversations teach, and the clip at 16 updates of a rollout.

    python -m experiments.memory_agent --output_dir runs/memory-agent

The comparisons of docs/study/memory-agent.md. All runs start from one model, the warm-up of seed 0, and every
evaluation goes through the conversations. Writes docs/results/memory-agent.jsonl after every run; runs that the file
has are not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import tables
from experiments.rows import Row, read_rows, train_once
from troll.files import read_json
from troll_lab import recipes
from troll_lab.runs.build import model_path
from troll_lab.runs.memory_agent import rollout
from troll_lab.runs.statistics import paired_difference, seed_mean
from troll_lab.runs.text import markdown_table
from troll_lab.trl.conversations import EARLIER

RESULT = Path(__file__).parents[1] / "docs" / "results" / "memory-agent.jsonl"
RECIPE, SEEDS = "memory-agent", range(5)
#: What is trained on, by the function that makes the rollouts.
CONVERSATIONS = {
    "all conversations": "troll_lab.runs.memory_agent:rollout",
    "the last ones only": "experiments.memory_agent:last_only",
    "without a memory": "experiments.memory_agent:forgetful",
}
CONTROL = "without a memory"  # seed 0 only
LONGER = 6  # terms, where training has three
#: The paper's number of updates of a rollout, by halves of the recipe's batches.
MANY_UPDATES = ["--updates_per_rollout", "16", "--per_device_train_batch_size", "8"]
MANY_UPDATES += ["--max_steps", "320", "--eval_steps", "160"]
SURROGATES = {"TROLL": ["--surrogate", "troll"], "clip": ["--surrogate", "clip", "--epsilon", "0.2"]}
RATES = ("1e-4", "3e-4")


def last_only(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The conversations of the recipe, of which only the last ones are trained on."""
    found = rollout(prompts, trainer)
    del found[EARLIER]
    return found


def forgetful(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The conversations of the recipe, each with an empty memory."""
    return rollout(prompts, trainer, remember=lambda _: "")


def main() -> int:
    """Makes the runs, and prints the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    rows, start = read_rows(RESULT), model_path(recipes.load(RECIPE, ["--seed", "0"]))
    for seed in SEEDS:
        for method, function in CONVERSATIONS.items():
            if seed and method == CONTROL:
                continue
            given = ["--rollout_func", function]
            folder = make(rows, options.output_dir, method, seed, ["--model_name_or_path", start, *given])
            # An evaluation before an update that nobody needs.
            terms = ["--task_options.min_terms", str(LONGER), "--task_options.max_terms", str(LONGER)]
            given += [*terms, "--max_steps", "8", "--eval_steps", "8", "--model_name_or_path", str(folder / "model")]
            make(rows, options.output_dir, longer(method), seed, given)
        for surrogate, chosen in SURROGATES.items():
            for rate in RATES:
                given = ["--model_name_or_path", start, "--learning_rate", rate, *chosen, *MANY_UPDATES]
                make(rows, options.output_dir, f"{surrogate}, {rate}", seed, given)
    print(conversations_table(rows), updates_table(rows), sep="\n\n")
    return 0


def make(rows: list[Row], output: Path, method: str, seed: int, fields: Sequence[str]) -> Path:
    """Makes a run unless `rows` has it, and adds it there and to the file; returns its folder."""
    folder = output / f"{method.replace(', ', '-').replace(' ', '-')}-{seed}"
    given = [RECIPE, "--seed", str(seed), "--warm_up", "{}", *fields]
    train_once(rows, RESULT, {"method": method, "seed": seed}, given, folder, success)
    return folder


def success(folder: Path) -> Row:
    """The held-out success of a run before and after training."""
    summary = read_json(folder / "summary.json")
    return {"before": summary["success_before"], "after": summary["success_after"]}


def longer(method: str) -> str:
    """The name of the evaluation on longer sums after a run."""
    return f"{method}, longer"


def by_seed(rows: Sequence[Row], method: str, time: str) -> dict[int, float]:
    """The success of a method's runs `before` or `after` training, by their seeds."""
    return {row["seed"]: row[time] for row in rows if row["method"] == method}


def conversations_table(rows: Sequence[Row]) -> str:
    """Held-out success by what is trained on, with 95 % intervals over seeds, as a table in Markdown."""
    head = ["trained on", "before, %", "after, %", f"after, on {LONGER} terms, %"]
    found = {}
    for method in CONVERSATIONS:
        times = [(method, "before"), (method, "after"), (longer(method), "before")]
        found[method] = [by_seed(rows, *each) for each in times]
    lines = [[method, *(tables.success(seed_mean([*each.values()])) for each in of)] for method, of in found.items()]
    first, second = list(found.values())[:2]
    differences = [tables.difference(paired_difference(*pair)) for pair in zip(first, second, strict=True)]
    lines.insert(2, ["the first minus the second, in points", *differences])
    return markdown_table(head, lines)


def updates_table(rows: Sequence[Row]) -> str:
    """Held-out success after 16 updates of a rollout, by rate, with 95 % intervals, as a table in Markdown."""
    lines = []
    for rate in RATES:
        troll, clip = (by_seed(rows, f"{surrogate}, {rate}", "after") for surrogate in SURROGATES)
        means = (tables.success(seed_mean([*each.values()])) for each in (troll, clip))
        lines.append([rate, *means, tables.difference(paired_difference(troll, clip))])
    return markdown_table(["rate", "TROLL, %", "clip, %", "TROLL minus clip, points"], lines)


if __name__ == "__main__":
    sys.exit(main())
