"""How far the network is from the policy that sampled its batch, as that policy grows old, and what is then projected.

The quickstart's model and task, with rollouts that are used for 32 updates, each on samples it has not seen: at update
i the old policy is i updates old, as the rollouts of an asynchronous trainer are. Counts, no times. Minutes.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from troll import recipes
from troll.study.run import train

UPDATES, ROLLOUTS = 32, 6
#: Rollouts that are left out: the learning rate is warmed up in the first half of one, and the second starts from it.
LEFT_OUT = 2
BOUNDS = (0.02, 0.05, 0.2)
#: First and last age, in updates.
AGES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 31))
#: Ages up to here give the exponent of growth.
FITTED = 4

SETTINGS = {
    "max_steps": UPDATES * ROLLOUTS,
    "steps_per_generation": UPDATES,
    "logging_steps": 1,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "use_cpu": True,
}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints a table, on the CPU whatever the device, and returns a row for every bound and age."""
    rows = []
    for kl_bound in BOUNDS:
        grown = _run(kl_bound)
        exponent = _exponent(grown)
        Console().print(f"kl_bound {kl_bound:g}: at ages 1 to {FITTED}, KL grows with age to the power {exponent:.2f}")
        rows += [{"kl_bound": kl_bound, "exponent": exponent, **row} for row in _by_age(grown)]
    table = Table("updates old", *(f"{what}, ε = {bound:g}" for bound in BOUNDS for what in ("KL", "projected")))
    for first, last in AGES:
        cells = [row for row in rows if row["first"] == first]
        name = str(first) if first == last else f"{first}–{last}"
        table.add_row(name, *(text for row in cells for text in (f"{row['kl']:.1e}", f"{row['projected']:.1%}")))
    Console(width=120).print(table)
    return rows


def _run(kl_bound: float) -> list[dict[str, float]]:
    """What was logged at each update, with its age."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {"kl_bound": kl_bound, "output_dir": folder}
        train(
            recipes.load("quickstart", [f"--{name}={value}" for name, value in settings.items()]), Console(quiet=True)
        )
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "age": (line["step"] - 1) % UPDATES,
            "kl": line["trust_region/kl_before_mean"],
            "projected": line["trust_region/projected_fraction"],
        }
        for line in lines
        if "trust_region/kl_before_mean" in line and line["step"] > LEFT_OUT * UPDATES
    ]


def _by_age(grown: list[dict[str, float]]) -> list[dict[str, float]]:
    rows = []
    for first, last in AGES:
        of_age = [each for each in grown if first <= each["age"] <= last]
        means = {name: mean(each[name] for each in of_age) for name in ("kl", "projected")}
        rows.append({"first": first, "last": last, **means})
    return rows


def _exponent(grown: list[dict[str, float]]) -> float:
    """The slope of log KL over log age, by least squares on the means."""
    points = [
        (math.log(age), math.log(mean(each["kl"] for each in grown if each["age"] == age)))
        for age in range(1, FITTED + 1)
    ]
    x, y = (mean(column) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
