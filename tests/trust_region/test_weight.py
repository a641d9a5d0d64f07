"""The rule by which the weight of a divergence adapts: PPO's, within limits."""

import pytest

from troll.trust_region.weight import adapted, limited


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 1.5), (0.0199, 1.5), (0.0201, 3.0), (0.03, 3.0), (0.0449, 3.0), (0.0451, 6.0), (5.0, 6.0)],
)
def test_adapted_is_ppos_rule(kl: float, expected: float) -> None:
    assert adapted(3.0, kl, target=0.03) == expected


@pytest.mark.parametrize(("weight", "expected"), [(3.0, 3.0), (3 * 1024.0, 3072.0), (6000.0, 3072.0), (1e-9, 3 / 1024)])
def test_limited_keeps_weight_near_initial(weight: float, expected: float) -> None:
    assert limited(weight, initial=3.0) == expected
