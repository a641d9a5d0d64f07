"""Makes the runs of the protocol's third part that its tables lack."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments import RECIPES, grid, second, third
from experiments.protocol import Phase
from experiments.third import Arm
from troll_lab.runs.compare import Outcome
from troll_lab.runs.grid import PlannedRun, expand

#: The plugin with the rival rule, which has no hypothesis.
RIVAL = "experiments.rival_rate"


def run(table: Path, seeds: Sequence[int], output: Path, jobs: int | None) -> tuple[Outcome, int]:
    """Makes the runs of a regime that its table lacks, one seed after the other, and adds each seed's when it is done.

    A seed of which the table has only a part begins anew, unless its folder is here.

    Args:
        table: One of the third part's tables, by its name; made if it does not exist.
        seeds: The seeds, in the order of the runs; all of the table if there are none.
        output: The folder of the runs; each seed has a folder in it.
        jobs: The number of runs at once; None for the machine's default.

    Returns:
        What became of the runs, and how many were added to the table or replaced in it.

    Raises:
        troll_lab.recipes.RecipeError: If a folder holds other runs.
        ValueError: If the protocol has no such table or seed; if the table is malformed, or a run does not fit it.
    """
    if table.stem not in third.TABLES:
        raise ValueError(f"the third part's tables are {', '.join(third.TABLES)}, got {table.stem}")
    regime, known = third.TABLES[table.stem]
    if unknown := set(seeds) - set(known):
        raise ValueError(f"the seeds of {table.stem} are {known[0]} to {known[-1]}, got {min(unknown)}")
    rival, total = table.stem == third.RIVALS, 0
    phase: Phase = "counted" if table.stem in third.REGIMES else "exploratory"
    command = shlex.join(["python", "-m", "experiments", "third", str(table)])
    for seed in seeds or known:
        planned = [planned_run(regime, arm, seed, rival) for arm in third.arms(table.stem)]
        outcome, added = grid.make(planned, table, phase, output / f"seed-{seed}", jobs, command, whole=True)
        total += added
        if outcome != "finished":
            return outcome, total
    return "finished", total


def planned_run(regime: str, arm: Arm, seed: int, rival: bool = False) -> PlannedRun:
    """One run of a regime.

    Args:
        regime: The name of the regime's table.
        arm: Which of a seed's runs.
        seed: The seed.
        rival: Whether the rival rule follows the target.
    """
    found = third.REGIMES[regime]
    fields = {"surrogate": second.METHODS[arm.method].surrogate, **found.changes, **found.methods[arm.method][0]}
    fields |= {"seed": str(seed), "learning_rate": f"{arm.rate:g}"}
    if arm.target is not None:
        fields["kl_target"] = f"{arm.target:g}"
    if rival:
        fields["plugins"] = RIVAL
    # The study's own recipes are files; one of the package goes by its name.
    file = RECIPES / f"{found.recipe}.yaml"
    (run,) = expand([str(file) if file.is_file() else found.recipe], {name: [each] for name, each in fields.items()})
    kind = f"{arm.rate:g}" if arm.target is None else f"{'rival' if rival else 'target'}-{arm.target:g}-{arm.rate:g}"
    return replace(run, name=f"{arm.method}-{kind}-seed={seed}")
