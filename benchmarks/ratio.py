"""The ratio of a sampled token down to tiny probabilities: ours, the paper's step, and the truth in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from rich.console import Console

import troll
from benchmarks import measure
from tests.troll.trust_region import reference
from troll.trust_region.paper import paper_step

LOG_PROBS = (0.0, -5.0, -20.0, -27.0, -30.0, -35.0, -60.0, -100.0)

KL_BOUND = 0.05

#: The columns; those of equal policies are log ratios. "true" is computed in float64.
COLUMNS = ("log p(o)", "projected", "true", "ours", "paper's", "equals: ours", "equals: paper's", "bound")

#: Logits of two other tokens before and after, which move far out of the ball; and how much less likely o becomes.
OTHERS, MOVED, LOSS = (0.0, -3.0), (0.0, 2.0), 1.6


def logits_of(log_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Old and new logits; the sampled token is the last, with log-probability `log_p` in the old policy."""
    rest = reference.log_sum_exp(OTHERS)
    # log p = z − log(e^z + e^rest); if log p is 0 in float32, z is far above the rest.
    z = rest + (30.0 if log_p == 0 else log_p - math.log(-math.expm1(log_p)))
    return np.array([*OTHERS, z]), np.array([*MOVED, z - LOSS])


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints one row for each log-probability; nothing is timed, and `repeats` is not used."""
    title = f"q(o)/p(o) at ε = {KL_BOUND}, and log p(o)/p(o) of a policy and itself"
    table = measure.numbers(*COLUMNS, names=0, title=title)
    rows = []
    for log_p in LOG_PROBS:
        old_logits, new_logits = logits_of(log_p)
        row = reference.capture(old_logits, 2, 3, 0.0)
        truth = reference.step(new_logits, row, KL_BOUND)
        before, after = (torch.tensor(x[None], dtype=torch.float32, device=device) for x in (old_logits, new_logits))
        old = troll.capture(before, torch.tensor([2], device=device), mass_threshold=0.0)
        moved, equal = (
            [step(z, old, KL_BOUND).log_ratio.item() for step in (troll.trust_region_step, paper_step)]
            for z in (after, before)
        )
        largest = max(1.0, abs(reference.log_sum_exp(old_logits)), abs(row.log_prob))
        ratios = [math.exp(x) for x in (truth.log_ratio, *moved)]
        of_equals = (*equal, 4 * 2.0**-23 * largest)
        rows.append(dict(zip(COLUMNS, (row.log_prob, truth.projected, *ratios, *of_equals), strict=True)))
        cells = (f"{log_p:g}", "yes" if truth.projected else "no", *(f"{x:.4g}" for x in ratios))
        table.add_row(*cells, *(f"{x:.1e}" for x in of_equals))
    Console(width=120).print(table)
    return rows
