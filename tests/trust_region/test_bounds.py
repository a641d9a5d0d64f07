"""Bounds: schedules, controllers on simulated trainings, their state, and the bounds of single tokens."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

from tests.trust_region import reference
from tests.trust_region.cases import FAMILIES, array, pairs, tensor
from troll.trust_region.bounds import (
    BOUNDS,
    BoundStatistics,
    by_advantage,
    entropy,
    entropy_scaled,
    make_bound,
)
from troll.trust_region.policy import SparsePolicy
from troll.trust_region.projection import project

NOTHING = BoundStatistics(projected_fraction=0.0, kl=0.0)

#: One valid set of options for each kind, so that a new kind is tested once it is named here.
OPTIONS: dict[str, dict] = {
    "fixed": {},
    "linear": {"end": 0.01},
    "cosine": {"end": 0.01, "steps": 30},
    "hold_projected_fraction": {"target": 0.05},
    "hold_kl": {"target": 0.02, "rate": 0.1},
}


def values(bound, steps):
    """ε before the first step, and after each."""
    found = [bound.value]
    for step in range(1, steps + 1):
        bound.update(step, NOTHING)
        found.append(bound.value)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Fixed and schedules


def test_fixed_never_moves():
    bound = make_bound("fixed", 0.05)
    for step in range(1, 20):
        bound.update(step, BoundStatistics(projected_fraction=1.0, kl=9.0))
    assert bound.value == 0.05
    assert make_bound("fixed", math.inf).value == math.inf


def test_linear_is_a_straight_line_and_then_flat():
    np.testing.assert_allclose(
        values(make_bound("linear", 0.2, end=0.1, steps=4), 6), [0.2, 0.175, 0.15, 0.125, 0.1, 0.1, 0.1], rtol=1e-14
    )


def test_cosine_is_half_a_wave_and_then_flat():
    found = values(make_bound("cosine", 0.1, end=0.3, steps=8), 10)
    expected = [0.2 - 0.1 * math.cos(math.pi * min(step, 8) / 8) for step in range(11)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_schedules_last_the_whole_training_a_fraction_or_a_number_of_steps(name):
    whole = values(make_bound(name, 0.2, total_steps=40, end=0.1), 40)
    assert values(make_bound(name, 0.2, total_steps=80, end=0.1, steps=0.5), 40) == whole
    assert values(make_bound(name, 0.2, end=0.1, steps=40), 40) == whole
    assert whole[-1] == 0.1
    assert all(a > b for a, b in itertools.pairwise(whole))


# ---------------------------------------------------------------------------------------------------------------------
# Controllers


def fraction_of(bound: float, kl: float) -> float:
    """Projected tokens, where the divergences of tokens are exponentially distributed."""
    return math.exp(-bound / kl)


def relative_errors(bound, plant, steps, target):
    """The measurements over a training, relative to their target."""
    errors = []
    for step in range(1, steps + 1):
        statistics, measured = plant(step, bound.value)
        bound.update(step, statistics)
        errors.append(measured / target - 1)
    return errors


@pytest.mark.parametrize("start", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("target", [0.01, 0.05, 0.5])
def test_hold_projected_fraction_converges(start, target):
    def plant(step, value):
        fraction = fraction_of(value, kl=0.02)
        return BoundStatistics(projected_fraction=fraction, kl=0.02), fraction

    errors = relative_errors(
        make_bound("hold_projected_fraction", start, target=target), plant, steps=400, target=target
    )
    assert max(map(abs, errors[-50:])) < 1e-3


@pytest.mark.parametrize("start", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
def test_hold_kl_converges(start, power):
    """A network whose mean KL grows with the bound: sluggishly, in proportion, or more."""

    def plant(step, value):
        kl = 0.02 * (value / 0.07) ** power
        return BoundStatistics(projected_fraction=0.1, kl=kl), kl

    errors = relative_errors(make_bound("hold_kl", start, target=0.02), plant, steps=600, target=0.02)
    assert max(map(abs, errors[-50:])) < 1e-3


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_hold_kl_converges_on_a_late_network_and_a_cycle_of_updates(power):
    """KL is 0 in the first of eight updates and answers a rollout late: its mean is held, and the swings stay small."""
    network = [0.05]

    def plant(step, value):
        position = (step - 1) % 8
        if position == 0:
            network.append(value)
        kl = 0.02 * (network[-2] / 0.07) ** power * position / 3.5
        return BoundStatistics(projected_fraction=0.1, kl=kl), kl

    bound = make_bound("hold_kl", 0.5, target=0.02)
    errors = relative_errors(bound, plant, steps=1200, target=0.02)
    assert abs(np.mean(errors[-80:])) < 0.02
    assert abs(math.log(bound.value / 0.07)) < 0.15


def test_controllers_hold_their_mean_under_noise():
    rng = np.random.default_rng(0)

    def plant(step, value):
        kl = 0.02 * (value / 0.07) * math.exp(0.5 * rng.standard_normal() - 0.125)
        return BoundStatistics(projected_fraction=0.1, kl=kl), kl

    errors = relative_errors(make_bound("hold_kl", 0.01, target=0.02), plant, steps=4000, target=0.02)
    assert abs(np.mean(errors[1000:])) < 0.03


def test_the_sign_of_each_controller():
    wider = make_bound("hold_projected_fraction", 0.05, target=0.05)
    wider.update(1, BoundStatistics(projected_fraction=0.3, kl=0.0))
    assert wider.value == pytest.approx(0.05 * math.exp(0.05))  # too many are projected: as fast up as it may
    tighter = make_bound("hold_kl", 0.05, target=0.05)
    tighter.update(1, BoundStatistics(projected_fraction=0.0, kl=0.06))
    assert tighter.value == pytest.approx(0.05 * math.exp(-0.05 * 0.2))  # 20 % too much: down by a fifth of the rate


@pytest.mark.parametrize(("kl", "limit"), [(0.0, 0.2), (9.0, 0.02)])
def test_limits_hold_and_nothing_winds_up_behind_them(kl, limit):
    bound = make_bound("hold_kl", 0.05, target=0.05, minimum=0.02, maximum=0.2)
    for step in range(500):
        bound.update(step, BoundStatistics(projected_fraction=0.0, kl=kl))
    assert bound.value == limit
    for step in range(150):  # long enough for the running mean to come round
        bound.update(step, BoundStatistics(projected_fraction=0.0, kl=0.0 if kl else 9.0))
    assert bound.value == (0.2 if limit == 0.02 else 0.02)


def test_stability_limit_of_the_docstring():
    """Without smoothing a plant of slope g converges for rate · g < 2 alone."""

    def plant(step, value):
        kl = 0.02 * (1 + 10 * math.log(value / 0.07))
        return BoundStatistics(projected_fraction=0.0, kl=max(kl, 0.0)), kl

    slow = make_bound("hold_kl", 0.0701, target=0.02, rate=0.18, smoothing=0.0)
    fast = make_bound("hold_kl", 0.0701, target=0.02, rate=0.22, smoothing=0.0)
    smooth = make_bound("hold_kl", 0.0701, target=0.02, rate=0.22)
    ends = [abs(relative_errors(bound, plant, 300, 0.02)[-1]) for bound in (slow, fast, smooth)]
    assert ends[0] < 1e-6 and ends[1] > 1e-2 and ends[2] < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# State


def random_statistics(seed, count):
    rng = np.random.default_rng(seed)
    return [BoundStatistics(float(f), float(kl)) for f, kl in zip(rng.random(count), rng.random(count), strict=True)]


def test_every_kind_is_covered_here():
    assert OPTIONS.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_resumes_exactly_through_json(name):
    made = [make_bound(name, 0.05, total_steps=100, **OPTIONS[name]) for _ in range(2)]
    statistics = random_statistics(0, 40)
    for step, measured in enumerate(statistics[:17], start=1):
        made[0].update(step, measured)
    made[1].load_state_dict(json.loads(json.dumps(made[0].state_dict())))
    for step, measured in enumerate(statistics[17:], start=18):
        assert made[1].value == made[0].value
        for bound in made:
            bound.update(step, measured)
    assert made[1].state_dict() == made[0].state_dict()


@pytest.mark.parametrize("name", OPTIONS)
def test_refuses_the_state_of_another_kind(name):
    bound = make_bound(name, 0.05, total_steps=100, **OPTIONS[name])
    for other in OPTIONS.keys() - {name}:
        state = make_bound(other, 0.05, total_steps=100, **OPTIONS[other]).state_dict()
        with pytest.raises(ValueError, match=f"'{name}' bound, got '{other}'"):
            bound.load_state_dict(state)
    with pytest.raises(ValueError, match="got None"):
        bound.load_state_dict({})
    with pytest.raises(ValueError, match="state must hold kind"):
        bound.load_state_dict(bound.state_dict() | {"more": 1})


def test_a_resumed_controller_keeps_its_own_limits():
    wide = make_bound("hold_kl", 0.5, target=0.05)
    narrow = make_bound("hold_kl", 0.05, target=0.05, maximum=0.1)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.value == 0.1


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "square"}, "bound must be one of fixed, .*'square'"),
        ({"name": "fixed", "kl_bound": 0.0}, "kl_bound must be above 0, got 0.0"),
        ({"name": "fixed", "kl_bound": math.nan}, "kl_bound must be above 0"),
        ({"name": "fixed", "end": 0.1}, "none; got end"),
        ({"name": "linear"}, "needs end"),
        ({"name": "linear", "end": 0.1, "tarket": 1.0, "total_steps": 9}, "end, steps; got tarket"),
        ({"name": "linear", "end": 0.1}, "total_steps must be at least 1 where steps is None, got None"),
        ({"name": "linear", "end": 0.1, "steps": 0.5}, "total_steps .* a fraction, got None"),
        ({"name": "linear", "end": 0.0, "total_steps": 9}, "end must be above 0 and finite, got 0.0"),
        ({"name": "linear", "end": 0.1, "kl_bound": math.inf, "total_steps": 9}, "kl_bound must be .* finite"),
        ({"name": "cosine", "end": 0.1, "steps": 0}, "steps must be .* got 0"),
        ({"name": "cosine", "end": 0.1, "steps": 1.5}, "steps must be .* got 1.5"),
        ({"name": "cosine", "end": "1e-3", "steps": 5}, "end must be a number, got '1e-3'"),
        ({"name": "hold_kl", "target": None}, "target must be a number, got None"),
        ({"name": "hold_kl", "target": 0.0}, "target must be above 0"),
        ({"name": "hold_projected_fraction", "target": 1.0}, "target must be above 0 and below 1.0, got 1.0"),
        ({"name": "hold_kl", "target": 0.1, "rate": 0.0}, "rate must be above 0"),
        ({"name": "hold_kl", "target": 0.1, "smoothing": 1.0}, "smoothing must be in .0, 1., got 1.0"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.0}, "minimum"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.2, "maximum": 0.1}, "got 0.2 and 0.1"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.06}, "kl_bound must be within .*0.06, 1.0.*got 0.05"),
    ],
)
def test_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_bound(**({"kl_bound": 0.05} | arguments))


@pytest.mark.parametrize(("fraction", "kl"), [(-0.1, 0.0), (1.1, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)])
def test_refuses_statistics_that_are_none(fraction, kl):
    with pytest.raises(ValueError, match=r"projected_fraction must|kl must"):
        BoundStatistics(fraction, kl)


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of single tokens


def reference_entropy(logits) -> float:
    log_probs = reference.log_softmax(logits)
    present = log_probs > -np.inf
    return float(-np.sum(np.exp(log_probs[present]) * log_probs[present]))


@pytest.mark.parametrize("family", FAMILIES)
def test_entropy_bounds_that_of_the_vocabulary_from_below(family):
    logits, _ = pairs(family, 30, 33)
    tokens = torch.arange(30)
    full = np.array([reference_entropy(row) for row in logits])
    dense = SparsePolicy.from_logits(tensor(logits), tokens, top_k=33, mass_threshold=0.0)
    np.testing.assert_allclose(array(entropy(dense)), full, rtol=1e-9, atol=1e-12)

    sparse = SparsePolicy.from_logits(tensor(logits), tokens, top_k=4)
    found, tail = array(entropy(sparse)), array(sparse.tail_log_prob.exp())
    assert (found <= full + 1e-12).all()
    assert (full <= found + tail * math.log(33) + 1e-12).all()


def test_entropy_of_a_certain_token_keeps_its_digits_in_float32():
    logits = torch.tensor([[0.0, -20.0, -torch.inf]])
    policy = SparsePolicy.from_logits(logits, torch.tensor([0]))
    assert entropy(policy).item() == pytest.approx(reference_entropy(logits[0].double().numpy()), rel=0.1)


def test_entropy_scaled_against_its_formula():
    h = torch.tensor([0.0, 0.5, 1.0, 2.0, 100.0], dtype=torch.float64)
    found = entropy_scaled(0.05, h, 1.0, exponent=2.0, limits=(0.1, 8.0))
    np.testing.assert_allclose(array(found), [0.005, 0.0125, 0.05, 0.2, 0.4], rtol=1e-14)
    narrower = entropy_scaled(0.05, h, 1.0, exponent=-1.0)
    np.testing.assert_allclose(array(narrower), [0.5, 0.1, 0.05, 0.025, 0.005], rtol=1e-14)
    assert (entropy_scaled(0.05, h, 1.0, exponent=0.0) == 0.05).all()


def test_entropy_scaled_is_a_bound_whatever_the_entropies_are():
    h = torch.tensor([torch.nan, -1e-9, 0.0, 3.0, torch.inf])
    for exponent in (0.5, 1.0, -1.0):
        for at in (0.0, 1.0, torch.tensor(1.0)):
            found = entropy_scaled(0.05, h, at, exponent=exponent)
            assert (found >= 0.0049999).all() and (found <= 0.5000001).all()
            assert found[0].item() == pytest.approx(0.05)
    assert entropy_scaled(0.05, torch.zeros(1), 0.0).item() == pytest.approx(0.05)


def test_by_advantage():
    advantages = torch.tensor([[1.0, 0.0, -0.5, torch.nan]])
    found = by_advantage(0.05, advantages, negative_kl_bound_ratio=0.2)
    np.testing.assert_allclose(found, [[0.05, 0.05, 0.01, 0.05]], rtol=1e-6)
    half = by_advantage(0.05, torch.tensor([-1.0], dtype=torch.bfloat16), negative_kl_bound_ratio=0.3)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(0.015)


def test_bounds_compose_with_each_other_with_a_schedule_and_with_project():
    old_logits, new_logits = pairs("peaked", 12, 7)
    old, new = tensor(old_logits).view(3, 4, 7), tensor(new_logits).view(3, 4, 7)
    policy = SparsePolicy.from_logits(old, torch.zeros(3, 4, dtype=torch.int64), top_k=7, mass_threshold=0.0)
    h, advantages = entropy(policy), torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    schedule = make_bound("linear", 0.05, end=0.01, steps=2)
    schedule.update(1, NOTHING)
    one_way = entropy_scaled(by_advantage(schedule.value, advantages, negative_kl_bound_ratio=0.5), h, h.mean())
    other_way = by_advantage(entropy_scaled(schedule.value, h, h.mean()), advantages, negative_kl_bound_ratio=0.5)
    torch.testing.assert_close(one_way, other_way, rtol=1e-14, atol=0)
    assert one_way.shape == (3, 4)

    projection = project(new, old, one_way)
    assert projection.projected.any()
    met = projection.kl_after[projection.projected] / one_way[projection.projected]
    np.testing.assert_allclose(array(met), 1.0, rtol=1e-8)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"exponent": math.inf}, "exponent must be finite"),
        ({"limits": (0.0, 1.0)}, "limits must be"),
        ({"limits": (2.0, 1.0)}, "limits must be"),
        ({"limits": (1.0, math.inf)}, "limits must be"),
        ({"reference_entropy": -1.0}, "reference_entropy must be at least 0, got -1.0"),
        ({"reference_entropy": torch.tensor(math.nan)}, "reference_entropy must be at least 0"),
    ],
)
def test_entropy_scaled_refuses(keywords, message):
    with pytest.raises(ValueError, match=message):
        entropy_scaled(0.05, torch.ones(2), **({"reference_entropy": 1.0} | keywords))


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_by_advantage_refuses(ratio):
    with pytest.raises(ValueError, match="negative_kl_bound_ratio must be above 0"):
        by_advantage(0.05, torch.ones(2), negative_kl_bound_ratio=ratio)
