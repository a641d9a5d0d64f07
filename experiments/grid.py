"""Makes the runs of a grid that are not in a table yet, so that a fresh checkout can continue it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.collect import collect, identity_of
from experiments.table import read_csv
from troll_lab.runs.compare import Outcome, compare
from troll_lab.runs.grid import PlannedRun, expand, parse_command
from troll_lab.terminal import say


def run(table: Path, recipe_names: Sequence[str], fields: Sequence[str]) -> tuple[Outcome, int]:
    """Makes the runs of an exploratory grid that are not in a table, and adds them to it, even if they are interrupted.

    Args:
        table: The table; made if it does not exist.
        recipe_names: The recipes of the grid.
        fields: The fields of the grid and their values, as `troll compare` takes them.

    Returns:
        The outcome of the runs, and how many were added to the table or replaced in it.

    Raises:
        troll_lab.recipes.RecipeError: If the grid is not valid, or its folder holds another one.
        ValueError: If the table is malformed, or a run does not fit it.
    """
    command = parse_command(recipe_names, fields)
    console, folder, planned = Console(), Path(command.output_dir), expand(recipe_names, command.axes)
    waiting = missing(planned, table, folder)
    say(console, f"{len(planned)} runs, of which {table} has {len(planned) - len(waiting)} from elsewhere")
    if not waiting:
        return "finished", 0
    words = ["python", "-m", "experiments", "run", str(table), *recipe_names, *fields]
    outcome = compare(waiting, folder, console, command.jobs, shlex.join(words))
    added, _ = collect([folder], table, "exploratory")
    return outcome, added


def missing(planned: Sequence[PlannedRun], table: Path, folder: Path) -> list[PlannedRun]:
    """The runs that are not in a table, or that this folder holds already, where finished ones are left as they are."""
    known = {row.identity for row in read_csv(table)} if table.exists() else set()
    return [run for run in planned if identity_of(run) not in known or (folder / run.name).is_dir()]
