"""Pairs of policies that the core has to survive, and small helpers shared by its tests."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.special import logsumexp

from tests.troll.trust_region import reference
from troll import TrustRegionStep
from troll.diagnostics import Tally

Array = np.ndarray
Pair = tuple[Array, Array]

#: The numbers of every step.
TOKEN_FIELDS = ("log_ratio", "regression", "log_prob", "kl_before", "kl_after", "multiplier", "projected")

#: A logit, likely or not, or of a token that is excluded.
LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, 1.0, -30.0, -100.0, -math.inf]))

#: (4, 5), with gaps, and a sequence of which nothing counts.
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]], dtype=torch.bool)


def _peaked(rng: np.random.Generator, rows: int, size: int) -> Pair:
    old = 6.0 * rng.standard_normal((rows, size))
    return old, old + rng.uniform(0.1, 4.0, (rows, 1)) * rng.standard_normal((rows, size))


def _flat(rng: np.random.Generator, rows: int, size: int) -> Pair:
    old = 0.1 * rng.standard_normal((rows, size))
    return old, old + rng.uniform(0.1, 3.0, (rows, 1)) * rng.standard_normal((rows, size))


def _nearly_equal(rng: np.random.Generator, rows: int, size: int) -> Pair:
    old = 2.0 * rng.standard_normal((rows, size))
    return old, old + 10.0 ** rng.uniform(-6, -0.5, (rows, 1)) * rng.standard_normal((rows, size))


def _nearly_disjoint(rng: np.random.Generator, rows: int, size: int) -> Pair:
    side = np.where(np.arange(size) < (size + 1) // 2, 1.0, -1.0) * rng.uniform(2.0, 40.0, (rows, 1))
    return rng.standard_normal((rows, size)) + side, rng.standard_normal((rows, size)) - side


def _near_deterministic(rng: np.random.Generator, rows: int, size: int) -> Pair:
    """All the mass but 10^-u on one token; half the time the new policy prefers another one."""

    def spike(favourite: Array) -> Array:
        logits = rng.uniform(0.0, 3.0) * rng.standard_normal((rows, size))
        others = np.where(np.arange(size) == favourite[:, None], -np.inf, logits)
        mass = 10.0 ** rng.uniform(-14.0, -0.5, rows)
        top = np.maximum(logsumexp(others, axis=1), -100.0)  # nothing but the favourite where size is 1
        logits[np.arange(rows), favourite] = top + np.log1p(-mass) - np.log(mass)
        return logits

    first = rng.integers(size, size=rows)
    second = np.where(rng.random(rows) < 0.5, first, rng.integers(size, size=rows))
    return spike(first), spike(second)


def _masked(rng: np.random.Generator, rows: int, size: int) -> Pair:
    """−inf logits: mostly in both policies, sometimes in one of them only."""
    old, new = _flat(rng, rows, size)
    both = rng.random((rows, size)) < 0.3
    old[both | (rng.random((rows, size)) < 0.03)] = -np.inf
    new[both | (rng.random((rows, size)) < 0.03)] = -np.inf
    at, keep = np.arange(rows), rng.integers(size, size=rows)
    old[at, keep], new[at, keep] = 0.0, 0.5
    return old, new


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], Pair]] = {
    "peaked": _peaked,
    "flat": _flat,
    "nearly_equal": _nearly_equal,
    "nearly_disjoint": _nearly_disjoint,
    "near_deterministic": _near_deterministic,
    "masked": _masked,
}


def pairs(family: str, rows: int, size: int, seed: int = 0) -> Pair:
    """(old, new) logits of shape (rows, size)."""
    rng = np.random.default_rng([seed, size, *family.encode()])
    return FAMILIES[family](rng, rows, size)


def bounds(rows: int, low: float = 1e-3, high: float = 1.0, seed: int = 0) -> Array:
    """Log-uniform bounds, one a row."""
    return np.exp(np.random.default_rng(seed).uniform(np.log(low), np.log(high), rows))


def true_kl(log_q: Array, old_logits: Array) -> Array:
    """KL(q ‖ p) in float64, row by row, of log-probabilities in any precision (renormalised first)."""
    log_q = np.asarray(log_q, dtype=np.float64)
    return np.asarray(
        [
            reference.kl_divergence(reference.log_softmax(q), reference.floored(reference.log_softmax(p)))
            for q, p in zip(log_q, old_logits, strict=True)
        ]
    )


def kl_of_logits(new_logits: Array, old_logits: Array) -> Array:
    """KL(p̃ ‖ p) of the floored policies, row by row."""
    rows = zip(new_logits, old_logits, strict=True)
    outcomes = [reference.dense_outcomes(*row) for row in rows]
    return np.asarray([reference.kl_divergence(each.log_new, each.log_old) for each in outcomes])


def root_tolerance(row: reference.ProjectedRow, kl_error: float = 1e-9) -> Array:
    """How far each log q may be off, to first order, when KL(q ‖ p) is off by `kl_error`.

    Where the variance is small KL(τ) hardly depends on τ, so that log q is known less well than the bound is met.
    """
    solution, outcomes = row.solution, row.outcomes
    if not solution.projected:
        return np.full(len(outcomes.log_new), 1e-9)
    s = outcomes.log_new - outcomes.log_old
    mean, variance = reference.moments(solution.log_q, s)
    return 1e-9 + kl_error * np.abs(s - mean) / (solution.tau * variance)


def assert_log_probs(got: Array, row: reference.ProjectedRow) -> None:
    """They are the reference's, as closely as the root is known."""
    with np.errstate(invalid="ignore"):  # −inf less −inf, which are close
        near = np.abs(got - row.log_probs) <= root_tolerance(row)
    assert (near | np.isclose(got, row.log_probs, rtol=1e-12, atol=0)).all()


def tensor(array: Array, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype)


def array(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.detach().numpy()


def random_logits(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def capture_rows(logits: Array, tokens: Array, top_k: int, mass_threshold: float) -> list[reference.OldRow]:
    return [
        reference.capture(row, int(token), top_k, mass_threshold) for row, token in zip(logits, tokens, strict=True)
    ]


def some(step: TrustRegionStep, index: Any) -> TrustRegionStep:
    """The step of some token positions."""
    return dataclasses.replace(step, **{name: x[index] for name, x in vars(step).items() if x is not None})


def random_step(garbage: float | None = None) -> TrustRegionStep:
    """Made-up numbers (4, 5), differentiable where a step's are; `garbage` fills the positions outside `MASK`."""
    generator = torch.Generator().manual_seed(8)

    def draw() -> torch.Tensor:
        values = torch.rand(4, 5, generator=generator, dtype=torch.float64)
        return values if garbage is None else torch.where(MASK, values, garbage)

    values = {name: draw() for name in TOKEN_FIELDS[:-1]}
    projected = torch.rand(4, 5, generator=generator) < 0.6
    values["log_ratio"] = 2 * values["log_ratio"] - 1
    values["multiplier"] = torch.where(projected, values["multiplier"], 0.0)
    for name in ("log_ratio", "regression", "log_prob"):
        values[name].requires_grad_()
    return TrustRegionStep(**values, projected=projected)


def numbers(tally: Tally) -> dict[str, float]:
    return {name: value.item() for name, value in tally.values().items()}


def assert_same_numbers(a: dict[str, float], b: dict[str, float], rel: float = 1e-6) -> None:
    import pytest  # benchmarks, which have no use for it, import this file

    assert a == pytest.approx(b, rel=rel, abs=1e-12, nan_ok=True)
