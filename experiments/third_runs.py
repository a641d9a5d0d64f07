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

    Args:
        table: The table of the regime, which names it; made if it does not exist.
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
    known = third.REGIMES[third.TABLES[table.stem]].seeds
    if unknown := set(seeds) - set(known):
        raise ValueError(f"the seeds of {table.stem} are {known[0]} to {known[-1]}, got {min(unknown)}")
    rival, total = table.stem == third.RIVALS, 0
    phase: Phase = "exploratory" if rival else "counted"
    command = shlex.join(["python", "-m", "experiments", "third", str(table)])
    for seed in seeds or known:
        planned = [planned_run(third.TABLES[table.stem], arm, seed, rival) for arm in third.arms(table.stem)]
        outcome, added = grid.make(planned, table, phase, output / f"seed-{seed}", jobs, command)
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
    old, (changes, _) = second.REGIMES[third.REGIMES[regime].table], third.REGIMES[regime].methods[arm.method]
    fields = {"surrogate": second.METHODS[arm.method].surrogate, **old.changes, **changes, "seed": str(seed)}
    fields["learning_rate"] = f"{arm.rate:g}"
    if arm.target is not None:
        fields["kl_target"] = f"{arm.target:g}"
    if rival:
        fields["plugins"] = RIVAL
    (found,) = expand([str(RECIPES / f"{old.recipe}.yaml")], {name: [value] for name, value in fields.items()})
    kind = "constant" if arm.target is None else "rival" if rival else "target"
    return replace(found, name=f"{arm.method}-{kind}-{arm.rate:g}-seed={seed}")
