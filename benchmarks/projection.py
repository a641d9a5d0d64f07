"""The solvers: evaluations of KL(τ) and worst error of the bound, over the cases that the tests use."""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import troll
from tests.trust_region.cases import FAMILIES, bounds, pairs, true_kl
from troll.trust_region.dual import SOLVERS

ROWS, SIZES = 2000, (2, 3, 8, 65, 1000)
BOUND_RANGE = {"newton": (1e-3, 1.0), "bracket": (1e-2, 1.0)}  # the paper's multipliers cannot reach smaller ones


def main() -> None:
    """Prints one row per solver, precision and family of pairs."""
    table = Table(title=f"projection: {ROWS} pairs of each size {SIZES}, bounds log-uniform, judged in float64")
    columns = ("solver", "dtype", "family", "projected", "median", "worst", "|KL − ε|", "|KL − ε|/ε", "KL/ε − 1")
    for name in columns:
        table.add_column(name, justify="left" if name in columns[:3] else "right")
    for solver in SOLVERS:
        for dtype in (torch.float32, torch.float64):
            for family in FAMILIES:
                table.add_row(solver, str(dtype).removeprefix("torch."), family, *_measure(solver, dtype, family))
            table.add_section()
    Console(width=120).print(table)


def _measure(solver: str, dtype: torch.dtype, family: str) -> tuple[str, ...]:
    evaluations, errors, kl_bounds = [], [], []
    for size in SIZES:
        # The solver is judged on the distributions that it gets, not on their rounding to its precision.
        old, new = (torch.as_tensor(logits).to(dtype) for logits in pairs(family, ROWS, size))
        kl_bound = torch.as_tensor(bounds(ROWS, *BOUND_RANGE[solver])).to(dtype)
        projection = troll.project(new, old, kl_bound, solver)
        rows = projection.projected
        kl = true_kl(projection.log_probs[rows].double().numpy(), old[rows].double().numpy())
        evaluations.append(projection.iterations[rows].numpy())
        errors.append(kl - kl_bound[rows].double().numpy())
        kl_bounds.append(kl_bound[rows].double().numpy())
    count, error, bound = (np.concatenate(parts) for parts in (evaluations, errors, kl_bounds))
    return (
        str(count.size),
        f"{np.median(count):.0f}",
        str(count.max()),
        f"{np.abs(error).max():.1e}",
        f"{(np.abs(error) / bound).max():.1e}",
        f"{(error / bound).max():+.1e}",
    )
