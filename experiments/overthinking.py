"""Shorter answers by rewards of tokens, or by a penalty on the whole length: the comparison of docs/estimators.md.

    python -m experiments.overthinking --output_dir runs/overthinking

All runs start from one model, the warm-up of seed 0. The penalty gets the largest weight with which success on a seed
that does not count is at most a point below that of rewards of tokens. Writes docs/results/overthinking.jsonl after
every run; runs that the file has are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import troll
from experiments import tables
from troll import recipes
from troll.cli import main as command
from troll.files import read_json, write_atomically
from troll.runs.build import model_path
from troll.runs.comparison_tables import markdown_table
from troll.runs.recorded import read_metrics
from troll.runs.result import commit_of
from troll.runs.statistics import SeedMean, paired_difference, seed_mean

RESULT = Path(__file__).parents[1] / "docs" / "results" / "overthinking.jsonl"
TOKENS, LENGTH = "overthinking", "overthinking-length"
WEIGHTS = ("0.01", "0.03", "0.1")
TUNING_SEED, SEEDS, MARGIN = 100, range(5), 0.01
MEASURES = ("success", "tokens")

#: A run: its recipe, its seed and the penalty's weight ("" for rewards of tokens); held-out success and the mean number
#: of tokens at each evaluation, the first one before training; and where it was made.
Row = Mapping[str, Any]


def main() -> int:
    """Makes the runs, and prints the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    options, fields = parser.parse_known_args()
    # One model for all seeds, since its warm-up takes several times as long as a run.
    start, rows = model_path(recipes.load(TOKENS, ["--seed", "0"])), read_rows()
    for weight in ("", *WEIGHTS):
        make(rows, options.output_dir, start, weight, TUNING_SEED, fields)
    for seed in SEEDS:
        for weight in ("", chosen(rows)):
            make(rows, options.output_dir, start, weight, seed, fields)
    print(outcome(rows))
    return 0


def read_rows() -> list[Row]:
    """The runs that have been made."""
    return [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.exists() else []


def make(rows: list[Row], output: Path, start: str, weight: str, seed: int, fields: Sequence[str]) -> None:
    """Makes a run from the model in `start` unless `rows` has it, and adds it there and to the file; or exits."""
    if any((row["weight"], row["seed"]) == (weight, seed) for row in rows):
        return
    recipe, folder = LENGTH if weight else TOKENS, output / f"{weight or 'tokens'}-{seed}"
    given = ["train", recipe, "--seed", str(seed), "--output_dir", str(folder), *fields]
    given += ["--model_name_or_path", start, "--warm_up", "{}"]
    if weight:
        given += ["--reward_weights", "1", "0", weight]
    if code := command(given):
        sys.exit(code)
    evaluated = [line for line in read_metrics(folder / "metrics.jsonl") if "eval_rewards/success/mean" in line]
    summary = read_json(folder / "summary.json")
    rows.append(
        {
            "recipe": recipe,
            "weight": weight,
            "seed": seed,
            "success": [round(line["eval_rewards/success/mean"], 4) for line in evaluated],
            "tokens": [round(-line["eval_rewards/length/mean"], 3) for line in evaluated],
            "seconds": round(summary["seconds"], 1),
            "commit": commit_of(Path(troll.__file__).parent),
            "versions": summary["versions"],
        }
    )
    write_atomically(RESULT, "".join(json.dumps(row) + "\n" for row in rows))


def chosen(rows: Sequence[Row]) -> str:
    """The largest weight that loses at most a point of success to rewards of tokens; the smallest if all lose more."""
    tuned = {row["weight"]: row["success"][-1] for row in rows if row["seed"] == TUNING_SEED}
    return max((weight for weight in WEIGHTS if tuned[weight] >= tuned[""] - MARGIN), key=float, default=WEIGHTS[0])


def counted(rows: Sequence[Row], weight: str, measure: str, place: int = -1) -> dict[int, float]:
    """A measure of the counted runs with a weight at one of their evaluations, by seed."""
    runs = [row for row in rows if row["weight"] == weight and row["seed"] in SEEDS]
    return {row["seed"]: row[measure][place] for row in runs}


def outcome(rows: Sequence[Row]) -> str:
    """Success and tokens before and after training, with 95 % intervals over seeds, as a table in Markdown."""
    weight, lines = chosen(rows), []
    for label, of, place in (("before", "", 0), (f"`{TOKENS}`", "", -1), (f"`{LENGTH}`, {weight} a token", weight, -1)):
        found = [seed_mean(list(counted(rows, of, measure, place).values())) for measure in MEASURES]
        lines.append([label, tables.success(found[0]), length(found[1])])
    less = [paired_difference(counted(rows, "", measure), counted(rows, weight, measure)) for measure in MEASURES]
    assert less[0] is not None and less[1] is not None
    points = f"{tables.points(less[0].mean)} {tables.interval(less[0].interval)}"
    lines.append(["the first minus the second, in points", points, length(less[1])])
    return markdown_table(["", "held-out success, %", "tokens an answer"], lines)


def length(found: SeedMean) -> str:
    """A number of tokens, or a difference, with its interval."""
    ends = found.interval
    return f"{found.mean:.2f}" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")


if __name__ == "__main__":
    sys.exit(main())
