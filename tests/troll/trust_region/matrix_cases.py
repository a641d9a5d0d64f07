"""The cases of the matrix: pairs of policies that every path has to get right, and what the reference says of them.

All logits are numbers that float16 and bfloat16 hold, so that one reference serves every dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import Array, bounds, pairs
from troll import Truncation
from troll.trust_region.step import Pull

#: Tokens of the vocabulary, if a case does not say otherwise: several tiles and a remainder, and 8 slices.
SIZE = 152
ROWS = 4

DIFFERENTIABLE = ("log_ratio", "regression", "log_prob", "entropy", "kept_log_mass")
OF_STEP = ("log_ratio", "regression", "log_prob", "kl_before", "kl_after", "multiplier", "projected")


@dataclass(frozen=True, eq=False)
class Case:
    """An old and a new policy at some token positions, and how they are captured and projected.

    Attributes:
        old: Logits (N, V).
        new: Logits (N, V).
        tokens: The sampled tokens, (N,).
        kl_bound: ε at every position, (N,).
        groups: For every position the group with which it shares a multiplier, or None.
        weights: Its weight in that group.
    """

    old: Array
    new: Array
    tokens: Array
    kl_bound: Array
    top_k: int = 6
    mass_threshold: float = 1e-2
    pull: Pull = "projection"
    truncation: Truncation | None = None
    groups: Array | None = None
    weights: Array | None = None

    @property
    def excludes_by_column(self) -> bool:
        """Whether all distributions of a policy exclude the same tokens, as the bias of a head does."""
        for logits in (self.old, self.new):
            excluded = [row == -np.inf for row in logits if reference.is_finite_row(row)]
            if any((row != excluded[0]).any() for row in excluded):
                return False
        return True

    @property
    def is_equal(self) -> bool:
        """Whether old and new policy are equal, which makes every ratio 1."""
        return self.new is self.old and len(self.old) > 0

    @property
    def excludes_nothing(self) -> bool:
        return bool(np.isfinite(self.old).all() and np.isfinite(self.new).all())


def held(logits: Array) -> Array:
    """The nearest numbers that all dtypes hold."""
    rounded = torch.from_numpy(np.asarray(logits, dtype=np.float64)).bfloat16().double()
    return torch.where(rounded.abs() < 2.0**-6, 0.0, rounded).numpy()


def of_family(family: str, size: int = SIZE, rows: int = ROWS, seed: int = 0, **fields: object) -> Case:
    """Half of the sampled tokens are the likeliest, the others any; bounds differ."""
    old, new = (held(x) for x in pairs(family, rows, size, seed))
    rng = np.random.default_rng(seed)
    tokens = np.where(np.arange(rows) % 2 == 0, old.argmax(1), rng.integers(size, size=rows))
    tokens = np.where(old[np.arange(rows), tokens] > -np.inf, tokens, old.argmax(1))
    return dataclasses.replace(Case(old, new, tokens, bounds(rows, low=1e-2, seed=seed)), **fields)  # type: ignore[arg-type]


def masked_columns() -> Case:
    """Padding of the vocabulary, and one token that only the new policy excludes."""
    case = of_family("flat", seed=1)
    case.old[:, ::3], case.new[:, ::3] = -np.inf, -np.inf
    case.new[:, 1] = -np.inf
    return dataclasses.replace(case, tokens=case.tokens // 3 * 3 + 2)


def empty_slices() -> Case:
    """Quarters of the vocabulary have no mass: in both policies, in one, or all but one; or one token has it all."""
    case, quarter = of_family("peaked", rows=6, seed=2), SIZE // 4
    case.old[0, :quarter], case.new[0, :quarter] = -np.inf, -np.inf
    case.new[1, quarter : 2 * quarter] = -np.inf
    case.old[2, -quarter:] = -np.inf
    case.old[3, quarter:], case.new[3, quarter:] = -np.inf, -np.inf
    case.old[4, :-quarter], case.new[4, :-quarter] = -np.inf, -np.inf
    case.old[5], case.new[5, 1:] = -np.inf, -np.inf
    case.old[5, 0] = 0.0
    return dataclasses.replace(case, tokens=case.old.argmax(1))


def excluded_token() -> Case:
    """The sampled token is excluded by the new policy, within the ball and outside, or by the old one."""
    case = of_family("peaked", rows=6, seed=2)
    at = np.arange(6)
    case.new[at[:3], case.tokens[:3]] = -np.inf
    case.old[at[3:], case.tokens[3:]] = -np.inf
    return dataclasses.replace(case, kl_bound=np.array([math.inf, 0.01, 0.05] * 2))


def sampled_at(log_p: float, move: float, others: tuple[float, float], size: int = 6) -> tuple[Array, Array]:
    """Old and new logits: log p(o) = `log_p` of token 0, whose logit moves; the second token's are `others`."""
    old = np.zeros(size)
    old[1:] = -1.0 - 0.3 * np.arange(size - 1)
    old[1] = others[0]
    old[0] = reference.log_sum_exp(old[1:]) + log_p - math.log(-math.expm1(log_p))
    new = old.copy()
    new[0] += move
    new[1] = others[1]
    return old, new


def below_floor(kl_bound: float) -> Case:
    """Sampled tokens around and below the floor of 1e-12, which move inside the ball and out of it, or by 70 or 80."""
    moves = [(0.5, (0.0, 0.1)), (-1.6, (-3.0, 2.0)), (2.0, (0.0, -3.0))]
    rows = [sampled_at(log_p, *move) for log_p in (-5.0, -27.5, -28.0, -60.0) for move in moves]
    rows += [sampled_at(-20.0, -80.0, (-3.0, 2.0)), sampled_at(-100.0, 70.0, (0.0, -3.0))]
    old, new = (held(np.array(x)) for x in zip(*rows, strict=True))
    tokens = np.zeros(len(rows), dtype=int)
    return Case(old, new, tokens, np.full(len(rows), kl_bound), top_k=6, mass_threshold=0.0)


def outside_top() -> Case:
    """The sampled tokens are the least likely ones that are not below the floor."""
    case = of_family("flat", seed=5)
    return dataclasses.replace(case, tokens=case.old.argmin(1))


def ties(top_k: int) -> Case:
    """Three different logits, so that almost every token ties with others."""
    rng = np.random.default_rng(4)
    old, new = rng.integers(3, size=(2, ROWS, SIZE)).astype(float)
    return Case(old, new, rng.integers(SIZE, size=ROWS), np.full(ROWS, 0.05), top_k=top_k, mass_threshold=1e-5)


def wide_ties() -> Case:
    """Forty different logits, so many tokens that blocks are chosen in rounds, and a sampled token outside them."""
    rng = np.random.default_rng(18)
    old, new = rng.integers(-20, 20, size=(2, 2, 2104)) / 4.0
    return Case(old, new, np.array([2103, old[1].argmin()]), np.full(2, 0.05), top_k=130, mass_threshold=0.0)


def at_the_kink() -> Case:
    """Bounds a thousandth above and below KL(p̃ ‖ p)."""
    case = of_family("flat", seed=6, kl_bound=np.full(ROWS, math.inf))
    factor = np.where(np.arange(ROWS) % 2 == 0, 1 + 1e-3, 1 - 1e-3)
    return dataclasses.replace(case, kl_bound=expected(case).values["kl_before"] * factor)


def not_distributions() -> Case:
    """NaN, +inf and nothing but −inf, in either policy; the first and the last row are fine."""
    case = of_family("peaked", rows=8, seed=7)
    case.new[1, 0], case.new[2, -1], case.new[3] = np.nan, np.inf, -np.inf
    case.old[4, 0], case.old[5, -1], case.old[6] = np.nan, np.inf, -np.inf
    return case


def shifted() -> Case:
    """Totals far from 0."""
    case = of_family("peaked", seed=8)
    shift = np.array([60.0, -200.0, 0.0, 0.0])[:, None]
    return dataclasses.replace(case, old=held(case.old + shift), new=held(case.new + shift))


def shared(family: str, weights: Array) -> Case:
    """Three tokens share a multiplier, two others one, and one of another group has no weight."""
    case = of_family(family, rows=6, seed=9, groups=np.array([0, 0, 1, 0, 1, 1]), weights=weights)
    return dataclasses.replace(case, kl_bound=np.array([0.02, 0.05, 0.3, 0.1, 0.2, 0.1]))


def equal(case: Case) -> Case:
    return dataclasses.replace(case, new=case.old)


TRUNCATIONS = {
    "top-k": Truncation(top_k=5),
    "top-p": Truncation(top_p=0.8),
    "min-p first": Truncation(top_k=7, top_p=0.9, min_p=0.05, min_p_first=True, ties="exact"),
}


def truncated(name: str, pull: Pull = "projection") -> Case:
    """Old and new policy are near each other; the sampled tokens are kept ones."""
    rng, truncation = np.random.default_rng(10), TRUNCATIONS[name]
    old = held(2 * rng.standard_normal((ROWS, SIZE)))
    new = held(old + 0.3 * rng.standard_normal((ROWS, SIZE)))
    tokens = np.array([rng.choice(reference.kept_set(row, **dataclasses.asdict(truncation))) for row in old])
    return Case(old, new, tokens, np.full(ROWS, 0.02), pull=pull, truncation=truncation)


# Expected numbers


@dataclass(frozen=True, eq=False)
class Numbers:
    """Of every position, (N,); and the gradients (N, V), with respect to the logits, of Σ upstream · output."""

    values: dict[str, Array]
    gradients: dict[str, Array]


@functools.cache
def old_rows(case: Case) -> tuple[reference.OldRow, ...]:
    """What a capture has to find. Of a truncated policy, the kept set; its tail is the mass of all other tokens."""
    if case.truncation is None:
        rows = zip(case.old, case.tokens.tolist(), strict=True)
        return tuple(reference.capture(row, token, case.top_k, case.mass_threshold) for row, token in rows)
    truncation = dataclasses.asdict(case.truncation)
    sets = [reference.kept_set(row, **truncation) for row in case.old]
    size, found = max(map(len, sets)), []
    for row, token, ids in zip(case.old, case.tokens.tolist(), sets, strict=True):
        _, tail = reference.on_support(row, ids)
        log_probs = reference.log_softmax(row[ids])
        found.append(reference.OldRow(ids, log_probs, tail, ids.index(token), size, 0.0, len(row)))
    return tuple(found)


@functools.cache
def upstream(case: Case) -> dict[str, Array]:
    """What arrives at each output, (N,): nothing where that is infinite or NaN."""
    ones = dict.fromkeys(DIFFERENTIABLE, np.ones(len(case.tokens)))
    values = _numbers(case, old_rows(case), case.new, case.kl_bound, ones).values
    generator = np.random.default_rng(0)
    return {
        name: np.where(np.isfinite(value), generator.uniform(-1.0, 2.0, len(value)), 0.0)
        for name, value in values.items()
        if name in DIFFERENTIABLE
    }


@functools.cache
def expected(case: Case, paper: bool = False) -> Numbers:
    """The reference's numbers, of our step or of the paper's."""
    return _numbers(case, old_rows(case), case.new, case.kl_bound, upstream(case), paper)


@functools.cache
def spread(case: Case, unit: float, paper: bool = False) -> Numbers:
    """How far these numbers move with what rounding takes the inputs for: 4 units of the largest, and the bound.

    Args:
        case: The case.
        unit: Half the distance of 1 to the next number. A search in float64 meets the bound to 1e-9; one in float32
            stops at 2.3e-5 of it.
        paper: Whether they are those of the paper's step.
    """
    wanted = expected(case, paper)
    largest = Numbers(*({name: np.zeros(x.shape) for name, x in each.items()} for each in vars(wanted).values()))
    for seed in range(4):
        generator = np.random.default_rng(seed)

        def move(x: Array, generator: np.random.Generator = generator) -> Array:
            finite = np.abs(np.where(np.isfinite(x), x, 0.0))
            size = 1 + finite.max(-1, keepdims=True, initial=0.0)
            return x + generator.standard_normal(x.shape) * 4 * unit * size

        rows = []
        for row in old_rows(case):
            moved = move(np.append(row.log_probs, row.tail_log_prob))
            rows.append(dataclasses.replace(row, log_probs=moved[:-1], tail_log_prob=min(moved[-1], -1e-15)))
        sign = (-1) ** seed
        kl_bound = case.kl_bound + sign * 1e-9 if unit < 1e-10 else case.kl_bound * (1 + sign * 2.3e-5)
        other = _numbers(case, rows, move(case.new), kl_bound, upstream(case), paper)
        same = np.array_equal(other.values["projected"], wanted.values["projected"])
        assert same, "too close a case to compare"
        for most, ours, theirs in zip(*(vars(x).values() for x in (largest, other, wanted)), strict=True):
            for name in most:
                with np.errstate(invalid="ignore"):  # −inf less −inf, NaN
                    most[name] = np.fmax(most[name], np.abs(ours[name] - theirs[name].astype(float)))
    return largest


def _numbers(
    case: Case,
    rows: Sequence[reference.OldRow],
    new: Array,
    kl_bound: Array,
    arriving: dict[str, Array],
    paper: bool = False,
) -> Numbers:
    positions = list(zip(new, rows, kl_bound.tolist(), strict=True))
    truncated: list[reference.TruncatedRow] = []
    if case.truncation is not None:
        truncated = [reference.truncated_step(row, old, bound, case.pull) for row, old, bound in positions]
        steps = [each.step for each in truncated]
    elif case.groups is None:
        steps = [reference.step(row, old, bound, case.pull, paper=paper) for row, old, bound in positions]
    else:
        assert case.weights is not None
        members = [np.flatnonzero(case.groups == group) for group in np.unique(case.groups)]
        by_token: dict[int, reference.StepRow] = {}
        for group in members:
            weights = case.weights[group]
            bound = float(np.sum(weights * kl_bound[group]) / np.sum(weights))
            tokens = [(new[t], rows[t]) for t in group.tolist()]
            shared = reference.shared_step(tokens, weights, bound, arriving["log_ratio"][group], case.pull)
            by_token |= dict(zip(group.tolist(), shared, strict=True))
        steps = [by_token[t] for t in range(len(positions))]

    values = {name: np.array([getattr(step, name) for step in steps]) for name in OF_STEP}
    gradients = {
        name: np.array([getattr(step, f"{name}_gradient") for step in steps])
        for name in OF_STEP
        if name in DIFFERENTIABLE
    }
    if truncated:
        for name in ("entropy", "kept_log_mass"):
            values[name] = np.array([getattr(each, name) for each in truncated])
            gradients[name] = np.array([getattr(each, f"{name}_gradient") for each in truncated])
    else:
        entropies = [reference.entropy(row) for row in new]
        broken = np.isnan(values["kl_before"])
        values["entropy"] = np.where(broken, np.nan, np.array([value for value, _ in entropies]))
        gradients["entropy"] = np.array([gradient for _, gradient in entropies])
    weighted = {
        name: np.where(arriving[name][:, None] == 0, 0.0, gradient.reshape(new.shape))
        * (1.0 if name == "log_ratio" and case.groups is not None else arriving[name][:, None])
        for name, gradient in gradients.items()
    }
    return Numbers(values, weighted)


CASES: dict[str, Case] = {
    "peaked": of_family("peaked"),
    "flat": of_family("flat", mass_threshold=0.0),
    "nearly equal": of_family("nearly_equal"),
    "nearly disjoint": of_family("nearly_disjoint", size=8, top_k=4),
    "near-deterministic": of_family("near_deterministic", size=8, seed=3),
    "masked": of_family("masked"),
    "masked columns": masked_columns(),
    "empty slices": empty_slices(),
    "sampled token excluded": excluded_token(),
    "below the floor": below_floor(0.05),
    "below the floor, inside": below_floor(math.inf),
    "outside the top K": outside_top(),
    "ties": ties(12),
    "ties, more than a slice": ties(100),
    "everything": of_family("peaked", size=8, top_k=8, mass_threshold=0.0),
    "everything, masked": of_family("masked", size=8, top_k=8, mass_threshold=0.0),
    "wide": of_family("flat", size=4104, rows=2, top_k=70, mass_threshold=0.0, seed=17),
    "wide, ties": wide_ties(),
    "one outcome": of_family("flat", size=1),
    "one slot": of_family("peaked", top_k=1, mass_threshold=0.0, seed=11),
    "two outcomes": of_family("peaked", size=2, seed=12),
    "at the kink": at_the_kink(),
    "not a distribution": not_distributions(),
    "shifted": shifted(),
    "proximal": of_family("peaked", pull="proximal", seed=13),
    "proximal, below the floor": dataclasses.replace(below_floor(math.inf), pull="proximal"),
    "shared bound, mean": shared("flat", np.array([0.5, 0.3, 0.6, 0.2, 0.4, 0.0])),
    "shared bound, sum": shared("peaked", np.ones(6)),
    "shared bound, proximal": dataclasses.replace(shared("flat", np.ones(6)), pull="proximal"),
    **{f"truncated by {name}": truncated(name) for name in TRUNCATIONS},
    "truncated, proximal": truncated("top-k", "proximal"),
    "equal": equal(shifted()),
    "equal, masked": equal(of_family("masked", seed=14)),
    "equal, near-deterministic": equal(of_family("near_deterministic", size=24, seed=15)),
    "equal, below the floor": equal(below_floor(0.05)),
    "equal, proximal": equal(of_family("peaked", seed=16, pull="proximal")),
    "equal, truncated": equal(truncated("top-p")),
    "no positions": of_family("flat", rows=0),
}
