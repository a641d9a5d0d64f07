"""Makes those runs of a grid, or of the protocol, that no table has yet, so that both go on from a fresh checkout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import protocol, second
from experiments.collect import collect, identity_of
from experiments.second_analysis import candidates, chosen, contest
from experiments.table import read_csv
from troll.runs.compare import Outcome, compare
from troll.runs.grid import PlannedRun, expand, parse_command
from troll.terminal import say


def run(table: Path, recipe_names: Sequence[str], fields: Sequence[str]) -> tuple[Outcome, int]:
    """Makes the runs of a grid that are not in a table, and adds them to it, also if the grid is interrupted.

    A table is named after a regime of the protocol, and has its counted and tuning runs; all other tables explore.

    Args:
        table: The table; made if it does not exist.
        recipe_names: The recipes of the grid.
        fields: The fields of the grid and their values, as `troll compare` takes them.

    Returns:
        What became of the runs, and how many were added to the table or replaced in it.

    Raises:
        troll.recipes.RecipeError: If the grid is not valid, or its folder holds another one.
        ValueError: If the table is malformed, or a run does not fit it.
    """
    command = parse_command(recipe_names, fields)
    folder, console = Path(command.output_dir), Console()
    planned = expand(recipe_names, command.axes)
    waiting = missing(planned, table, folder)
    say(console, f"{len(planned)} runs, of which {table} has {len(planned) - len(waiting)} from elsewhere")
    if not waiting:
        return "finished", 0
    words = ["python", "-m", "experiments", "run", str(table), *recipe_names, *fields]
    outcome = compare(waiting, folder, console, command.jobs, shlex.join(words))
    added, _ = collect([folder], table, exploratory=table.stem not in protocol.REGIMES)
    return outcome, added


def run_second(table: Path, seeds: Sequence[int], output: Path, jobs: int | None) -> tuple[Outcome, int]:
    """Makes the runs of a regime of the protocol's second part that its table lacks, and adds them to it.

    A seed tells what a run is for: the tuning, or the counted comparison of the configurations that the tuning chose.
    All methods of a seed come before the next seed, and their runs go into the table when they are done.

    Args:
        table: The table of the regime, which names it; made if it does not exist.
        seeds: The seeds, in the order of the runs.
        output: The folder of the runs; each seed has a folder in it.
        jobs: The number of runs at once; None for the machine's default.

    Returns:
        What became of the runs, and how many were added to the table or replaced in it.

    Raises:
        troll.recipes.RecipeError: If a folder holds other runs.
        ValueError: If the protocol has no such regime or seed; if a seed counts and the tuning is not complete; if the
            table is malformed, or a run does not fit it.
    """
    if table.stem not in second.REGIMES:
        raise ValueError(f"the second part's tables are {', '.join(second.REGIMES)}, got {table.stem}")
    known = [*second.TUNING_SEEDS, *second.REGIMES[table.stem].seeds]
    if unknown := set(seeds) - set(known):
        raise ValueError(f"the seeds of {table.stem} are {', '.join(map(str, known))}, got {min(unknown)}")
    console, total = Console(), 0
    command = shlex.join(["python", "-m", "experiments", "second", str(table)])
    for seed in seeds:
        folder = output / f"seed-{seed}"
        planned = _planned_runs(table, seed)
        waiting = missing(planned, table, folder)
        say(console, f"seed {seed}: {len(planned)} runs, of which {table} has {len(planned) - len(waiting)}")
        if not waiting:
            continue
        outcome = compare(waiting, folder, console, jobs, command)
        added, _ = collect([folder], table, exploratory=False)
        total += added
        if outcome != "finished":
            return outcome, total
    return "finished", total


def _planned_runs(table: Path, seed: int) -> list[PlannedRun]:
    """The runs of a seed of the second part, as far as the table's rows tell what they are."""
    if seed in second.TUNING_SEEDS:
        return second.tuning_runs(table.stem, seed)
    rows = read_csv(table) if table.exists() else []
    best = chosen(candidates(table.stem, rows))
    if open_methods := [method for method in second.METHODS if method not in best]:
        raise ValueError(f"{table}: seed {seed} counts, but the tuning of {', '.join(open_methods)} is not complete")
    changes = {method: one.changes for method, one in best.items()}
    return second.counted_runs(table.stem, changes, contest(table.stem, rows).rates, seed)


def missing(planned: Sequence[PlannedRun], table: Path, folder: Path) -> list[PlannedRun]:
    """The runs that are not in a table, or that this folder holds already, where finished ones are left as they are."""
    known = {row.identity for row in read_csv(table)} if table.exists() else set()
    return [run for run in planned if identity_of(run) not in known or (folder / run.name).is_dir()]
