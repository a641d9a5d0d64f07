"""Bounds of single tokens."""

import math

import numpy as np
import pytest
import torch

import troll
from tests.trust_region.cases import NOTHING, array, pairs, tensor
from troll import project
from troll.trust_region.bounds import make_bound
from troll.trust_region.policy.on_support import sparse_entropy
from troll.trust_region.token_bounds import by_advantage, entropy_scaled


def test_entropy_scaled_against_its_formula():
    h = torch.tensor([0.0, 0.5, 1.0, 2.0, 100.0], dtype=torch.float64)
    found = entropy_scaled(0.05, h, 1.0, exponent=2.0, limits=(0.1, 8.0))
    np.testing.assert_allclose(array(found), [0.005, 0.0125, 0.05, 0.2, 0.4], rtol=1e-14)
    narrower = entropy_scaled(0.05, h, 1.0, exponent=-1.0)
    np.testing.assert_allclose(array(narrower), [0.5, 0.1, 0.05, 0.025, 0.005], rtol=1e-14)
    assert (entropy_scaled(0.05, h, 1.0, exponent=0.0) == 0.05).all()


def test_entropy_scaled_is_a_bound_for_any_entropies():
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
    policy = troll.capture(old, torch.zeros(3, 4, dtype=torch.int64), top_k=7, mass_threshold=0.0)
    h, advantages = sparse_entropy(policy), torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
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
