"""Three updates of movements over five seeds: docs/study/movements.md has their protocol.

    python -m experiments.movements tce-reach --output_dir runs/movements

Each method gets the learning rate that is best on a seed that does not count. Writes docs/results/RECIPE.jsonl after
every run, and docs/assets/RECIPE.svg; runs that the file has are not made again, and interrupted ones go on. Of runs
with a KL target it shows those that are there: commit 6784bcf5 makes them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from experiments import figures, tables
from experiments.rows import Row, read_rows, write_rows
from troll.files import read_json
from troll_lab.episodic import config, train
from troll_lab.episodic.config import METRICS, SUMMARY
from troll_lab.runs.recorded import read_metrics
from troll_lab.runs.result import own_commit
from troll_lab.runs.statistics import paired_difference, seed_mean
from troll_lab.runs.text import markdown_table

DOCS = Path(__file__).parents[1] / "docs"
RECIPES = ("tce-reach", "tce-metaworld-reach")
METHODS = {
    "TCE": ["--events", "segments", "--constraint", "trust_region"],
    "black-box": ["--events", "episodes", "--constraint", "trust_region"],
    "clip": ["--events", "segments", "--constraint", "clip"],
}
RATES = ("3e-4", "1e-3", "3e-3")
#: The method whose rate follows a KL, and the values of `learning_rate` from which it is searched.
TARGET, STARTS = "TCE, KL target", ("1e-5", "1e-1")
TUNING_SEED, SEEDS = 0, range(1, 6)


def main() -> int:
    """Makes the runs, draws the figure, and prints the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    rows = read_rows(result(options.recipe))
    for method, rate, seed in tuning():
        if not make(rows, options.recipe, options.output_dir, method, rate, seed):
            return 1
    rates = best_rates(rows)
    for seed in SEEDS:
        for method, rate in rates.items():
            if not make(rows, options.recipe, options.output_dir, method, rate, seed):
                return 1
    figures.save_svg(lambda: draw(rows), figure(options.recipe))
    print(outcome(rows))
    return 0


def result(name: str) -> Path:
    """The file of a recipe: a row for each run.

    It has the run's method, rate and seed, its evaluations by environment steps, and where it was made.
    """
    return DOCS / "results" / f"{name}.jsonl"


def figure(name: str) -> Path:
    """The file of the figure."""
    return DOCS / "assets" / f"{name}.svg"


def tuning() -> Iterator[tuple[str, str, int]]:
    """The method, rate and seed of each run that chooses a rate."""
    return ((method, rate, TUNING_SEED) for method in METHODS for rate in RATES)


def make(
    rows: list[Row], recipe: str, output: Path, method: str, rate: str, seed: int, fields: Sequence[str] = ()
) -> bool:
    """Makes a run unless `rows` has it, and adds it there and to the file; returns whether it reached its end."""
    if any((row["method"], row["learning_rate"], row["seed"]) == (method, rate, seed) for row in rows):
        return True
    folder = output / f"{method}-{rate}-{seed}"
    given = [*METHODS[method], "--learning_rate", rate, "--seed", str(seed), "--output_dir", str(folder), *fields]
    commit = own_commit()
    resumed = ["--resume_from_checkpoint"] if (folder / train.CHECKPOINT).is_file() else []
    if not train.train(config.load(recipe, [*given, *resumed]), Console()):
        return False
    evaluated = [row for row in read_metrics(folder / METRICS) if "eval_success" in row]
    summary = read_json(folder / SUMMARY)
    rows.append(
        {
            "method": method,
            "learning_rate": rate,
            "seed": seed,
            "environment_steps": [row["environment_steps"] for row in evaluated],
            "success": [row["eval_success"] for row in evaluated],
            "return": [round(row["eval_return"], 3) for row in evaluated],
            "seconds": summary["seconds"],
            "commit": commit,
            "versions": summary["versions"],
        }
    )
    write_rows(result(recipe), rows)
    return True


def best_rates(rows: Sequence[Row]) -> dict[str, str]:
    """The rate of each method with the highest final success on the tuning seed; of equal ones the first in `RATES`."""
    tuned = {(row["method"], row["learning_rate"]): row["success"][-1] for row in rows if row["seed"] == TUNING_SEED}
    return {method: max(RATES, key=lambda rate: tuned[method, rate]) for method in METHODS}


def compared(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What is compared: the methods with their `learning_rate`."""
    return [*best_rates(rows).items(), *((TARGET, start) for start in STARTS)]


def counted(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """The runs that count, by the names of what is compared and by their seeds, in order; none of what has no run."""
    made = {(row["method"], row["learning_rate"], row["seed"]): row for row in rows}
    named = {f"{method} from {rate}" if method == TARGET else method: (method, rate) for method, rate in compared(rows)}
    found = {name: {seed: made[*one, seed] for seed in SEEDS if (*one, seed) in made} for name, one in named.items()}
    return {name: runs for name, runs in found.items() if runs}


def outcome(rows: Sequence[Row]) -> str:
    """The final success of each method, and its difference to TCE, with 95 % intervals, as a table in Markdown."""
    lines, best, made = [], best_rates(rows), counted(rows)
    final = {name: {seed: row["success"][-1] for seed, row in runs.items()} for name, runs in made.items()}
    for name, runs in made.items():
        mean, less = seed_mean(list(final[name].values())), paired_difference(final[name], final["TCE"])
        difference = "" if name == "TCE" else tables.difference(less)
        minutes = [row["seconds"] / 60 for row in runs.values()]
        shown = f"{min(minutes):.1f} to {max(minutes):.1f}"
        lines.append([name, best.get(name, ""), tables.success(mean), difference, shown])
    return markdown_table(["method", "rate", "final success, %", "minus TCE, points", "minutes a run"], lines)


def draw(rows: Sequence[Row]) -> Figure:
    """Success over environment steps: a line for each method's mean, its 95 % interval, and a thin line a seed."""
    drawn = Figure(figsize=(6.4, 3.2), layout="constrained", facecolor="white")
    axes = drawn.add_subplot(xlabel="million environment steps", ylabel="held-out success, %", ylim=(0, 100))
    for number, (name, by_seed) in enumerate(counted(rows).items()):
        runs = list(by_seed.values())
        steps = [count / 1e6 for count in runs[0]["environment_steps"]]
        curves = [[100 * value for value in run["success"]] for run in runs]
        points = [seed_mean(values) for values in zip(*curves, strict=True)]
        for curve in curves:
            axes.plot(steps, curve, color=f"C{number}", linewidth=0.5, alpha=0.5)
        low, high = zip(*(point.interval or (point.mean, point.mean) for point in points), strict=True)
        axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        axes.plot(steps, [point.mean for point in points], color=f"C{number}", label=name)
    axes.legend(frameon=False)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
