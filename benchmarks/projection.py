"""Finding the root: times, evaluations of KL(τ), errors of the bound; and of the gradient if tokens share a bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import troll
from benchmarks import measure
from tests.troll.trust_region.cases import FAMILIES, Array, array, bounds, pairs, random_logits, tensor, true_kl
from tests.troll.trust_region.test_constraint import make, reference_groups
from tests.troll.trust_region.test_reference import central_differences
from troll.trust_region.constraint import REDUCTIONS
from troll.trust_region.dual import TokenCurve, newton
from troll.trust_region.paper import bracket
from troll.trust_region.probabilities import floored

#: Tokens and outcomes of the timed problems; every token is projected.
SHAPES = {
    "cpu": ((4096, 9), (4096, 65), (16384, 65), (4096, 257)),
    "cuda": ((16384, 65), (131072, 65), (16384, 257)),
    "small": ((64, 9),),
}
KL_BOUND, BISECTIONS = 0.05, 60

ROWS, SIZES = 1000, (2, 3, 8, 65, 1000)
BOUND_RANGE = (1e-3, 1.0)


def gradient_and_differences(scope: str, reduction: str) -> tuple[Array, Array]:
    """∂L/∂logits of the new policy by the code, and by finite differences of scipy's solution, for a random linear L.

    Three sequences of up to four tokens; the last sequence lies inside its bound, and bounds differ between tokens.
    """
    old = random_logits(12, 5, seed=3)
    new = old + random_logits(12, 5, seed=4)
    new[8:] = old[8:] + 0.02 * random_logits(4, 5, seed=4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    constraint = make(scope, mask, reduction)
    kl_bound = bounds(12, 0.03, 0.1, seed=3) * (2 if reduction == "sum" else 1)
    upstream = array(random_logits(12, 5, seed=5)) * array(mask).reshape(12, 1)
    logits = new.clone().requires_grad_()
    shape = (3, 4)
    found = troll.project(
        logits.view(*shape, 5), old.view(*shape, 5), tensor(kl_bound).view(shape), constraint=constraint
    )
    (gradient,) = torch.autograd.grad((found.log_probs.view(12, 5) * tensor(upstream)).sum(), logits)

    def loss(moved: Array) -> float:
        groups = reference_groups(moved, array(old), kl_bound, constraint)
        return math.fsum(upstream[t] @ log_q for tokens, s in groups for t, log_q in zip(tokens, s.log_q, strict=True))

    return array(gradient), central_differences(loss, array(new))


def bisection(old: Tensor, s: Tensor, kl_bound: Tensor) -> Tensor:
    """τ by plain bisection in float64, with KL from its definition, until the interval cannot shrink."""
    old, s, kl_bound = (x.double() for x in (old, s, kl_bound))
    low, high = torch.zeros_like(kl_bound), torch.ones_like(kl_bound)
    for _ in range(BISECTIONS):
        tau = (low + high) / 2
        log_q = torch.log_softmax(old + tau.unsqueeze(-1) * s, -1)
        too_far = (log_q.exp() * (log_q - old)).sum(-1) > kl_bound
        low, high = torch.where(too_far, low, tau), torch.where(too_far, tau, high)
    return low


def contenders(tokens: int, outcomes: int, *, device: str) -> measure.Contenders:
    """The roots of the same tokens, all outside the bound; and the whole projection."""
    torch.manual_seed(0)
    drawn = 2 * tokens
    present = torch.ones(drawn, outcomes, dtype=torch.bool, device=device)
    old = floored(torch.log_softmax(4 * torch.randn(drawn, outcomes, device=device), -1), present)
    new = floored(torch.log_softmax(old + 2 * torch.randn_like(old), -1), present)
    # The searches end only if there is a root.
    outside = troll.project(new, old, KL_BOUND).projected.nonzero().squeeze(-1)[:tokens]
    old, new = old[outside], new[outside]
    assert len(old) == tokens
    s, kl_bound = new - old, torch.full_like(old[:, 0], KL_BOUND)
    return {
        "bracket": lambda: bracket(TokenCurve(old, s), kl_bound),
        "newton": lambda: newton(TokenCurve(old, s), kl_bound),
        "bisection, float64": lambda: bisection(old, s, kl_bound),
        "project": lambda: troll.project(new, old, KL_BOUND),
    }


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints times, then errors over the families of pairs that the tests use."""
    results = []
    for tokens, outcomes in SHAPES[measure.shapes(device)]:
        made = contenders(tokens, outcomes, device=device)
        title = f"projection: {tokens} tokens x {outcomes} outcomes, float32, ε = {KL_BOUND}"
        rows = measure.show(title, measure.seconds(made, repeats, device))
        results += [{"tokens": tokens, "outcomes": outcomes, **row} for row in rows]
    return results if measure.small else results + _errors() + _gradient_errors()


def _errors() -> list[dict[str, Any]]:
    title = f"errors: {ROWS} pairs of each size {SIZES}, bounds log-uniform, judged in float64"
    columns = ("dtype", "family", "projected", "median", "worst", "|KL − ε|", "|KL − ε|/ε", "KL/ε − 1")
    table = measure.numbers(*columns, names=2, title=title)
    rows = []
    for dtype in (torch.float32, torch.float64):
        for family in FAMILIES:
            cells = (str(dtype).removeprefix("torch."), family, *_measure(dtype, family))
            table.add_row(*cells)
            rows.append(dict(zip(columns, cells, strict=True)))
        table.add_section()
    Console(width=120).print(table)
    return rows


def _measure(dtype: torch.dtype, family: str) -> tuple[str, ...]:
    evaluations, errors, kl_bounds = [], [], []
    for size in SIZES:
        # The search is judged on the rounded distributions that it gets.
        old, new = (torch.as_tensor(logits).to(dtype) for logits in pairs(family, ROWS, size))
        kl_bound = torch.as_tensor(bounds(ROWS, *BOUND_RANGE)).to(dtype)
        projection = troll.project(new, old, kl_bound)
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


def _gradient_errors() -> list[dict[str, Any]]:
    """Errors against finite differences of an independent float64 solution, for tokens that share a multiplier."""
    table = Table("constraint", "largest error", "relative error (2-norm)", "largest entry", title="gradients, float64")
    rows = []
    for scope in ("sequence", "batch"):
        for reduction in REDUCTIONS:
            gradient, expected = gradient_and_differences(scope, reduction)
            error = gradient - expected
            largest, relative = float(np.abs(error).max()), float(np.linalg.norm(error) / np.linalg.norm(expected))
            entry = float(np.abs(expected).max())
            table.add_row(f"{scope}, {reduction}", f"{largest:.1e}", f"{relative:.1e}", f"{entry:.2f}")
            rows.append(
                {"constraint": scope, "reduction": reduction, "largest": largest, "relative": relative, "entry": entry}
            )
    Console().print(table)
    return rows
