"""Controllers on simulated trainings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from troll.trust_region.bounds import BoundStatistics, make_bound
from troll.trust_region.bounds.controllers import HoldKL, HoldProjectedFraction


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HoldKL(0.05, target=0.0), "target must be above 0"),
        (lambda: HoldProjectedFraction(0.05, target=1.0), "target must be above 0 and below 1.0, got 1.0"),
        (lambda: HoldKL(0.05, target=0.1, rate=0.0), "rate must be above 0"),
        (lambda: HoldKL(0.05, target=0.1, smoothing=1.0), r"smoothing must be in \[0, 1\), got 1.0"),
        (lambda: HoldKL(0.05, target=0.1, minimum=0.0), "minimum"),
        (lambda: HoldKL(0.05, target=0.1, minimum=0.2, maximum=0.1), "got 0.2 and 0.1"),
        (lambda: HoldKL(0.05, target=0.1, minimum=0.06), r"kl_bound must be within .*0.06, 1.0.*got 0.05"),
    ],
)
def test_refuses_what_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
