"""Projections of Gaussians, forward and backward on one thread: times, errors of the bounds and of the gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import measure
from tests.troll.gaussian.pairs import FAMILIES, PROJECTIONS, covariance, exact_distances, pair
from troll.gaussian import Gaussian

#: Actions, and states; every state is outside both bounds.
DIMENSIONS, STATES = 42, (1, 64)
BOUNDS = (0.05, 0.0005)

ERROR_DIMENSIONS, ERROR_SEEDS, ERROR_BOUNDS = (1, 2, 5, 20, 60), 10, ((0.05, 0.0005), (1.0, 0.1))
GRADIENT_DIMENSIONS, GRADIENT_SEEDS = 12, 5


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints times in milliseconds, then errors over the families of pairs that the tests use."""
    torch.set_num_threads(1)
    times = _times(device, 4 * repeats)
    return times if measure.small else times + _errors() + _gradient_errors()


def contender(name: str, states: int, d: int, device: str) -> Callable[[], None]:
    """A projection of states with covariances of their own, forward and backward, in float64."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> tuple[Tensor, Tensor]:
        root = torch.randn(states, d, 2 * d, generator=generator, dtype=torch.float64) / (2 * d) ** 0.5
        mean = torch.randn(states, d, generator=generator, dtype=torch.float64)
        return mean.to(device), torch.linalg.cholesky(root @ root.mT).to(device)

    old = Gaussian(*drawn())
    mean, factor = (x.requires_grad_() for x in drawn())
    weights = torch.randn(states, d, d, generator=generator, dtype=torch.float64).tril().to(device)

    def run() -> None:
        projection = PROJECTIONS[name](Gaussian(mean, factor), old, *BOUNDS)
        assert projection.covariance_projected.all()
        total = (projection.policy.factor * weights).sum() + projection.policy.mean.sum()
        torch.autograd.grad(total, (mean, factor))

    return run


def _times(device: str, repeats: int) -> list[dict[str, Any]]:
    """Wall-clock times; and on a CPU the process's own time, which other work on the machine hardly changes."""
    d = 4 if measure.small else DIMENSIONS
    title = f"forward and backward, d = {d}, full covariances, float64, one thread, ms: median (least)"
    table = measure.numbers("projection", "states", "wall", "process", title=title)
    rows = []
    for states in STATES:
        for name in PROJECTIONS:
            run = contender(name, states, d, device)
            wall = measure.seconds({name: run}, repeats, device)[name]
            process = [_process_seconds(run) for _ in range(repeats)]
            row = {"projection": name, "states": states, "wall": wall, "process": process}
            shown = (f"{1e3 * statistics.median(times):.2f} ({1e3 * min(times):.2f})" for times in (wall, process))
            table.add_row(name, str(states), *shown)
            rows.append(row)
    Console().print(table)
    return rows


def _process_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _errors() -> list[dict[str, Any]]:
    """Relative errors of active bounds, judged in extended precision."""
    table = measure.numbers("dtype", "projection", "family", "active", "worst", names=3, title="|distance/bound − 1|")
    rows = []
    for dtype in (torch.float64, torch.float32):
        for name in PROJECTIONS:
            for family in FAMILIES:
                errors = [
                    error
                    for d in ERROR_DIMENSIONS
                    for seed in range(ERROR_SEEDS)
                    for bounds in ERROR_BOUNDS
                    for error in bound_errors(name, *pair(family, d, seed, dtype), *bounds)
                ]
                cells = (str(dtype).removeprefix("torch."), name, family, str(len(errors)), f"{max(errors):.1e}")
                table.add_row(*cells)
                rows.append(dict(zip(("dtype", "projection", "family", "active", "worst"), cells, strict=True)))
            table.add_section()
    Console().print(table)
    return rows


def bound_errors(name: str, new: Gaussian, old: Gaussian, mean_bound: float, covariance_bound: float) -> list[float]:
    """The relative errors of the bounds that are active, and of those that are not met; NaN where a distance is NaN."""
    if name in ("frobenius", "wasserstein"):  # their units are those of the covariance
        covariance_bound *= min(1.0, float(covariance(old).double().trace()))
    projection = PROJECTIONS[name](new, old, mean_bound, covariance_bound)
    mean, spread = exact_distances(name, projection.policy, old)
    if name == "joint":
        pairs = [(projection.mean_projected, (mean + spread) / mean_bound)]
    else:
        pairs = [
            (projection.mean_projected, mean / mean_bound),
            (projection.covariance_projected, spread / covariance_bound),
        ]
    return [abs(ratio - 1) for active, ratio in pairs if active or not ratio <= 1]


def _gradient_errors() -> list[dict[str, Any]]:
    """Errors of derivatives along random directions, relative to the sum of their terms' sizes."""
    title = f"derivatives against finite differences, float64, d = {GRADIENT_DIMENSIONS}"
    table = measure.numbers("projection", "family", "worst", names=2, title=title)
    rows = []
    for name in PROJECTIONS:
        for family in FAMILIES:
            error = max(gradient_error(name, family, GRADIENT_DIMENSIONS, seed) for seed in range(GRADIENT_SEEDS))
            table.add_row(name, family, f"{error:.1e}")
            rows.append({"projection": name, "family": family, "gradient_error": error})
        table.add_section()
    Console().print(table)
    return rows


def gradient_error(name: str, family: str, d: int, seed: int) -> float:
    """One derivative against Richardson's extrapolation of central differences."""
    new, old = pair(family, d, seed)
    bounds = (0.05, 0.005 * min(1.0, float(covariance(old).trace())))
    generator = torch.Generator().manual_seed(seed)
    # In units in which each policy has the size 1.
    direction = new.factor @ torch.randn(d, d, generator=generator, dtype=torch.float64).tril() / d
    shift = old.factor @ torch.randn(d, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(old.factor)
    weights, pushes = inverse.mT.tril(), inverse.sum(0)

    def value(mean: Tensor, factor: Tensor) -> Tensor:
        policy = PROJECTIONS[name](Gaussian(mean, factor), old, *bounds).policy
        return ((policy.factor - old.factor) * weights).sum() + (policy.mean - old.mean) @ pushes

    leaves = new.mean.clone().requires_grad_(), new.factor.clone().requires_grad_()
    grads = torch.autograd.grad(value(*leaves), leaves)
    terms = torch.cat([grads[0] * shift, (grads[1] * direction).flatten()])

    def difference(step: float) -> Tensor:
        ahead, behind = (value(new.mean + s * shift, new.factor + s * direction) for s in (step, -step))
        return (ahead - behind) / (2 * step)

    expected = (4 * difference(3e-4) - difference(6e-4)) / 3
    return abs((terms.sum() - expected).item()) / terms.abs().sum().item()
