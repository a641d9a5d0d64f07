"""Shorter answers by rewards of tokens, or by a penalty on the whole length: docs/study/shorter-answers.md.

    python -m experiments.overthinking --output_dir runs/overthinking

All runs start from one model, the warm-up of seed 0. Each method gets the largest of three weights with which success
on a seed that does not count falls by at most two points, a little more than the standard error of its 512 questions.
Writes docs/results/overthinking.jsonl after every run; runs that the file has are not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import tables
from experiments.rows import Row, read_rows, train_once
from troll_lab import recipes
from troll_lab.runs.build import model_path
from troll_lab.runs.recorded import read_metrics
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_mean
from troll_lab.runs.text import markdown_table

#: Has each run's recipe, weight and seed, held-out success and the mean number of tokens at each evaluation, the first
#: one before training, and where it was made.
RESULT = Path(__file__).parents[1] / "docs" / "results" / "overthinking.jsonl"
#: By recipe, the weights to choose from: of redundant tokens, and of all.
WEIGHTS = {"overthinking": ("0.1", "0.2", "0.5"), "overthinking-length": ("0.01", "0.03", "0.1")}
TUNING_SEED, SEEDS, MARGIN = 100, range(5), 0.02
MEASURES = ("success", "tokens")


def main() -> int:
    """Makes the runs, and prints the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    # One model for all seeds, since its warm-up takes several times as long as a run.
    start, rows = model_path(recipes.load("overthinking", ["--seed", "0"])), read_rows(RESULT)
    for recipe, weights in WEIGHTS.items():
        for weight in weights:
            make(rows, RESULT, options.output_dir, start, recipe, weight, TUNING_SEED)
    weights_chosen = {recipe: chosen(rows, recipe) for recipe in WEIGHTS}
    for seed in SEEDS:
        for recipe, weight in weights_chosen.items():
            make(rows, RESULT, options.output_dir, start, recipe, weight, seed)
    print(outcome(rows, weights_chosen, SEEDS))
    return 0


def make(
    rows: list[Row],
    path: Path,
    output: Path,
    start: str,
    recipe: str,
    weight: str,
    seed: int,
    fields: Sequence[str] = (),
) -> None:
    """Makes a run from the model in `start` unless `rows` has it, and adds it there and to the file; or exits."""
    weights = ["1", "0", "0"]
    weights[1 + list(WEIGHTS).index(recipe)] = weight
    given = [recipe, "--seed", str(seed), "--reward_weights", *weights, *fields]
    given += ["--model_name_or_path", start, "--warm_up", "{}"]
    run = {"recipe": recipe, "weight": weight, "seed": seed}
    train_once(rows, path, run, given, output / f"{recipe}-{weight}-{seed}", evaluations)


def evaluations(folder: Path) -> Row:
    """The held-out success of a run and its mean number of tokens, each at every evaluation."""
    evaluated = [line for line in read_metrics(folder / "metrics.jsonl") if "eval_rewards/success/mean" in line]
    return {
        "success": [round(line["eval_rewards/success/mean"], 4) for line in evaluated],
        "tokens": [round(-line["eval_rewards/length/mean"], 3) for line in evaluated],
    }


def chosen(rows: Sequence[Row], recipe: str) -> str:
    """The largest weight with which success falls by at most `MARGIN`; the smallest if it falls more with all."""
    fell = {
        row["weight"]: row["success"][0] - row["success"][-1]
        for row in rows
        if (row["recipe"], row["seed"]) == (recipe, TUNING_SEED)
    }
    kept = [weight for weight in WEIGHTS[recipe] if fell[weight] <= MARGIN]
    return kept[-1] if kept else WEIGHTS[recipe][0]


def outcome(rows: Sequence[Row], weights: Mapping[str, str], seeds: Sequence[int]) -> str:
    """Success and tokens before and after training, with 95 % intervals over seeds, as a table in Markdown.

    Args:
        rows: All runs.
        weights: The weight of each of the two recipes.
        seeds: The seeds that count.
    """

    def counted(of: tuple[str, str], measure: str, place: int = -1) -> dict[int, float]:
        runs = [row for row in rows if (row["recipe"], row["weight"]) == of and row["seed"] in seeds]
        return {row["seed"]: row[measure][place] for row in runs}

    (first, second), lines = weights.items(), []
    for label, of, place in (
        ("before", first, 0),
        (f"`{first[0]}`, {first[1]} a redundant token", first, -1),
        (f"`{second[0]}`, {second[1]} a token", second, -1),
    ):
        found = [seed_mean(list(counted(of, measure, place).values())) for measure in MEASURES]
        lines.append([label, tables.success(found[0]), length(found[1])])
    less = [paired_difference(counted(first, measure), counted(second, measure)) for measure in MEASURES]
    assert less[1] is not None
    lines.append(["the first minus the second (points; tokens)", tables.difference(less[0]), length(less[1])])
    return markdown_table(["", "held-out success, %", "tokens an answer"], lines)


def length(found: SeedMean) -> str:
    """A number of tokens, or a difference, with its interval."""
    text = f"{found.mean:.2f}" + (f" [{found.interval[0]:.2f}, {found.interval[1]:.2f}]" if found.interval else "")
    return text.replace("-", "−")


if __name__ == "__main__":
    sys.exit(main())
