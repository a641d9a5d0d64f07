import pytest

from troll.study.measures import area_under_curve, collapsed, rollouts_to

RISING = [0.0, 0.2, 0.4, 0.6, 0.8, 0.8]


def test_area_under_the_curve() -> None:
    assert area_under_curve(RISING) == pytest.approx(2.8 / 6)


def test_rollouts_to_a_level_of_the_running_mean() -> None:
    assert rollouts_to(RISING, 0.4) == 5
    assert rollouts_to(RISING, 0.5) == 6
    assert rollouts_to(RISING, 0.6) is None
    assert rollouts_to([0.6, 0.6], 0.5) == 2, "fewer rollouts than the running mean has"


@pytest.mark.parametrize(
    ("final", "curve", "expected"),
    [
        (0.27, RISING, True),  # the best five have a mean of .56
        (0.29, RISING, False),
        (0.1, [*RISING, 0.0, 0.0, 0.0], True),
        (0.0, [0.04] * 10, False),  # there was nothing to lose
        (0.0, [0.06] * 10, True),
        (0.1, [0.5, 0.1, 0.1, 0.1, 0.1], False),  # one lucky rollout is no learning
    ],
)
def test_a_run_collapses_that_loses_half_of_its_best(final: float, curve: list[float], expected: bool) -> None:
    assert collapsed(final, curve) is expected
