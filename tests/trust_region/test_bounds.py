"""Bounds: names and options, state, schedules against closed forms, and controllers on simulated trainings."""

import itertools
import json
import math

import numpy as np
import pytest

from tests.trust_region.cases import NOTHING, OPTIONS
from troll.trust_region.bounds import BOUNDS, Bound, BoundStatistics, make_bound


def test_every_kind_is_found_by_its_name():
    assert OPTIONS.keys() == BOUNDS.keys()
    for name, options in OPTIONS.items():
        bound = make_bound(name, 0.05, total_steps=100, **options)
        assert type(bound) is BOUNDS[name] and bound.kind == name
        assert bound.value == 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "square"}, "bound must be one of fixed, .*'square'"),
        ({"name": "fixed", "kl_bound": 0.0}, "kl_bound must be above 0, got 0.0"),
        ({"name": "fixed", "kl_bound": math.nan}, "kl_bound must be above 0"),
        ({"name": "fixed", "end": 0.1}, "takes no options, got end"),
        ({"name": "linear"}, "needs end"),
        ({"name": "hold_kl", "rate": 0.1}, "the 'hold_kl' bound needs target, got rate"),
        ({"name": "linear", "end": 0.1, "tarket": 1.0, "total_steps": 9}, "takes end, steps, got tarket"),
        ({"name": "cosine", "end": "1e-3", "steps": 5}, "end must be a number, got '1e-3'"),
        ({"name": "cosine", "end": True, "steps": 5}, "end must be a number, got True"),
        ({"name": "by_age", "end": 0.1}, "the 'by_age' bound needs steps, got end"),
        ({"name": "by_age", "end": 0.1, "steps": 0.5}, "steps must be an integer of at least 1, got 0.5"),
        ({"name": "by_age", "end": 0.1, "steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"name": "hold_kl", "target": None}, "target must be a number, got None"),
        # What the classes refuse.
        ({"name": "linear", "end": 0.1}, "total_steps must be at least 1 if steps is None, got None"),
        ({"name": "linear", "end": 0.1, "total_steps": 0}, "total_steps must be at least 1 if steps is None, got 0"),
        ({"name": "linear", "end": 0.1, "steps": 0.5}, "total_steps .* a fraction, got None"),
        ({"name": "linear", "end": 0.0, "total_steps": 9}, "end must be above 0 and finite, got 0.0"),
        ({"name": "linear", "kl_bound": math.inf, "end": 0.1, "total_steps": 9}, "kl_bound must be .* finite"),
        ({"name": "cosine", "end": 0.1, "steps": 0}, "steps must be .* got 0"),
        ({"name": "cosine", "end": 0.1, "steps": 1.5}, "steps must be .* got 1.5"),
        ({"name": "hold_kl", "target": 0.0}, "target must be above 0"),
        ({"name": "hold_projected_fraction", "target": 1.0}, "target must be above 0 and below 1.0, got 1.0"),
        ({"name": "hold_kl", "target": 0.1, "rate": 0.0}, "rate must be above 0"),
        ({"name": "hold_kl", "target": 0.1, "smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.0}, "minimum"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.2, "maximum": 0.1}, "got 0.2 and 0.1"),
        ({"name": "hold_kl", "target": 0.1, "minimum": 0.06}, r"kl_bound must be within .*0.06, 1.0.*got 0.05"),
    ],
)
def test_make_bound_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_bound(**({"kl_bound": 0.05} | arguments))


def test_none_stands_for_the_default_of_an_option_that_has_it():
    made = [make_bound("linear", 0.05, total_steps=10, end=0.1, **options) for options in ({}, {"steps": None})]
    for bound in made:
        bound.update(4, BoundStatistics(projected_fraction=0.0, kl=0.0))
    assert made[0].value == made[1].value == pytest.approx(0.07)


@pytest.mark.parametrize("name", OPTIONS)
def test_resumes_exactly_through_json(name):
    made = [make_bound(name, 0.05, total_steps=100, **OPTIONS[name]) for _ in range(2)]
    statistics = [BoundStatistics(float(f), float(kl)) for f, kl in np.random.default_rng(0).random((40, 2))]
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


@pytest.mark.parametrize(("fraction", "kl"), [(-0.1, 0.0), (1.1, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)])
def test_refuses_statistics_that_are_none(fraction, kl):
    with pytest.raises(ValueError, match=r"projected_fraction must|kl must"):
        BoundStatistics(fraction, kl)


def values(bound: Bound, steps: int) -> list[float]:
    """ε before the first step, and after each."""
    found = [bound.value]
    for step in range(1, steps + 1):
        bound.update(step, NOTHING)
        found.append(bound.value)
    return found


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


def test_by_age_is_a_straight_line_over_ages_whatever_the_step():
    bound, found = make_bound("by_age", 0.1, end=0.2, steps=4), []
    for step, age in enumerate([0, 1, 4, 5, 2, 0], start=1):
        bound.update(step, BoundStatistics(projected_fraction=1.0, kl=9.0))
        bound.set_age(age)
        found.append(bound.value)
    np.testing.assert_allclose(found, [0.1, 0.125, 0.2, 0.2, 0.15, 0.1], rtol=1e-14)


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"by_age"}))
def test_no_other_bound_depends_on_the_age(name):
    bound = make_bound(name, 0.05, total_steps=100, **OPTIONS[name])
    state = bound.state_dict()
    bound.set_age(7)
    assert bound.value == 0.05 and bound.state_dict() == state


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


def test_a_resumed_controller_keeps_its_own_limits():
    wide = make_bound("hold_kl", 0.5, target=0.05)
    narrow = make_bound("hold_kl", 0.05, target=0.05, maximum=0.1)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.value == 0.1
