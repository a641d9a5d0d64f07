"""The metrics of every step: sums that add up, and what is made of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import troll
from tests.trust_region.cases import MASK, TOKEN_FIELDS, random_step, some
from troll import TrustRegionStep
from troll.trust_region.metrics import Totals


def metrics_of(step: TrustRegionStep, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return Totals.of(step, mask).metrics()


@pytest.mark.parametrize("garbage", [None, math.nan, math.inf, -math.inf, 1e6])
def test_metrics_are_of_the_mask_alone(garbage):
    step = random_step(garbage)
    metrics = metrics_of(step, MASK)
    for name, value in metrics.items():
        assert value.shape == () and not value.requires_grad, name
    kept = {name: getattr(step, name)[MASK].detach() for name in TOKEN_FIELDS}
    expected = {
        "kl_before_mean": kept["kl_before"].mean(),
        "kl_before_max": kept["kl_before"].max(),
        "kl_after_mean": kept["kl_after"].mean(),
        "kl_after_max": kept["kl_after"].max(),
        "projected_fraction": kept["projected"].double().mean(),
        "multiplier": kept["multiplier"][kept["projected"]].mean(),
        "regression": kept["regression"].mean(),
        "nonfinite": torch.tensor(0.0),
    }
    assert metrics.keys() == expected.keys()
    for name, number in expected.items():
        assert metrics[name].item() == pytest.approx(number.item(), rel=1e-12), name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_masks_of_any_type(dtype):
    expected = metrics_of(random_step(), MASK)
    assert metrics_of(random_step(), MASK.to(dtype)) == expected


def test_statistics_add_up_over_micro_batches():
    step = random_step()
    first, second = (Totals.of(some(step, rows), MASK[rows]) for rows in (slice(0, 1), slice(1, 4)))
    found, expected = Totals() + first + second, Totals.of(step, MASK)
    assert found.maxima == expected.maxima
    for name, value in expected.metrics().items():
        assert found.metrics()[name].item() == pytest.approx(value.item(), rel=1e-12), name


def test_other_sums_become_means():
    totals = Totals.of(random_step(), MASK) + Totals({"bytes": torch.tensor(3.0)})
    assert totals.metrics()["bytes"].item() == pytest.approx(3.0 / MASK.sum().item(), rel=1e-6)


def test_without_a_projected_token():
    step = random_step()
    nothing = torch.zeros_like(step.multiplier)
    metrics = metrics_of(dataclasses.replace(step, projected=nothing.bool(), multiplier=nothing), MASK)
    assert metrics["multiplier"].item() == 0.0
    assert metrics["projected_fraction"].item() == 0.0


@pytest.mark.parametrize("rows", [0, 4])
def test_without_a_token(rows):
    metrics = metrics_of(some(random_step(), slice(rows)), torch.zeros(rows, 5))
    assert len(metrics) == 8 and all(value.item() == 0 for value in metrics.values())


def test_tokens_that_are_no_distribution_are_counted_and_left_out():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(11))
    old = troll.capture(logits, torch.zeros(2, 4, dtype=torch.int64))
    new_logits = logits + torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(12))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    fine = mask.clone()
    fine[0, 1] = fine[0, 2] = False
    expected = metrics_of(troll.trust_region_step(new_logits, old), fine)
    new_logits[0, 1, 3] = math.nan
    new_logits[0, 2] = -math.inf
    new_logits[1, 3, 0] = math.inf  # masked: not counted
    metrics = metrics_of(troll.trust_region_step(new_logits, old), mask)
    assert metrics["nonfinite"].item() == 2
    assert expected["projected_fraction"] > 0
    for name, value in expected.items():
        if name != "nonfinite":
            assert metrics[name].item() == pytest.approx(value.item(), rel=1e-6), name
