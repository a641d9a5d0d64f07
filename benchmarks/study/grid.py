"""Makes those runs of a grid, or of the protocol, that no table has yet, so that both go on from a fresh checkout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.study import protocol, second
from benchmarks.study.collect import collect, identity_of
from benchmarks.study.table import read_csv
from troll.study.compare import Outcome, compare
from troll.study.grid import PlannedRun, expand, parse_command
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
    words = ["python", "-m", "benchmarks.study", "run", str(table), *recipe_names, *fields]
    outcome = compare(waiting, folder, console, command.jobs, shlex.join(words))
    added, _ = collect([folder], table, exploratory=table.stem not in protocol.REGIMES)
    return outcome, added


def run_second(table: Path, seeds: Sequence[int], output: Path, jobs: int | None) -> tuple[Outcome, int]:
    """Makes the tuning runs of a regime of the protocol's second part that its table lacks, and adds them to it.

    All methods of a seed come before the next seed, and their runs go into the table when they are done.

    Args:
        table: The table of the regime, which names it; made if it does not exist.
        seeds: The tuning seeds, in the order of the runs.
        output: The folder of the runs; each seed has a folder in it.
        jobs: The number of runs at once; None for the machine's default.

    Returns:
        What became of the runs, and how many were added to the table or replaced in it.

    Raises:
        troll.recipes.RecipeError: If a folder holds other runs.
        ValueError: If the protocol has no such regime or seed, the table is malformed, or a run does not fit it.
    """
    if table.stem not in second.REGIMES:
        raise ValueError(f"the second part's tables are {', '.join(second.REGIMES)}, got {table.stem}")
    if unknown := set(seeds) - set(second.TUNING_SEEDS):
        raise ValueError(f"the tuning seeds are {', '.join(map(str, second.TUNING_SEEDS))}, got {min(unknown)}")
    console, total = Console(), 0
    words = ["python", "-m", "benchmarks.study", "second", str(table)]
    for seed in seeds:
        folder = output / f"seed-{seed}"
        planned = second.tuning_runs(table.stem, seed)
        waiting = missing(planned, table, folder)
        say(console, f"seed {seed}: {len(planned)} runs, of which {table} has {len(planned) - len(waiting)}")
        if not waiting:
            continue
        outcome = compare(waiting, folder, console, jobs, shlex.join(words))
        added, _ = collect([folder], table, exploratory=False)
        total += added
        if outcome != "finished":
            return outcome, total
    return "finished", total


def missing(planned: Sequence[PlannedRun], table: Path, folder: Path) -> list[PlannedRun]:
    """The runs that are not in a table, or that this folder holds already, where finished ones are left as they are."""
    known = {row.identity for row in read_csv(table)} if table.exists() else set()
    return [run for run in planned if identity_of(run) not in known or (folder / run.name).is_dir()]
