"""How much of the old policy its support holds: against numpy, and of policies that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import troll
from tests.trust_region.cases import FAMILIES, array, assert_same_numbers, capture_rows, numbers, pairs, tensor
from troll.trust_region.coverage import coverage, support_statistics, support_too_small
from troll.trust_region.policy.outcomes import sparse_entropy

NAN = math.nan


@pytest.mark.parametrize("family", FAMILIES)
def test_coverage_against_the_reference(family):
    logits, _ = pairs(family, 50, 33)
    mask = np.random.default_rng(0).random(50) < 0.7
    tokens = np.random.default_rng(1).integers(33, size=50)
    old = troll.capture(tensor(logits), tensor(tokens, torch.int64), top_k=8, mass_threshold=1e-2)
    rows = capture_rows(logits[mask], tokens[mask], 8, 1e-2)
    kept = np.array([len(row.ids) for row in rows])
    tail = np.exp([row.tail_log_prob for row in rows])
    expected = {
        "kept_tokens": kept.mean(),
        "covered_mass": np.mean(1 - tail),
        "old_entropy": array(sparse_entropy(old))[mask].mean(),
    }
    for percent in (5, 50, 95):
        expected |= {f"kept_tokens_p{percent}": np.percentile(kept, percent)}
        expected |= {f"covered_mass_p{percent}": np.percentile(1 - tail, percent)}
    assert_same_numbers(numbers(coverage(old, torch.from_numpy(mask))), expected)


def test_coverage_of_known_policies():
    flat = torch.zeros(100)
    peaked = torch.full((100,), -torch.inf)
    peaked[3] = 0.0
    broken = torch.full((100,), NAN)
    logits = torch.stack([flat, peaked, peaked, broken, flat])
    old = troll.capture(logits, torch.tensor([3, 3, 3, 3, 3]), top_k=10)
    found = numbers(coverage(old, torch.tensor([1, 1, 1, 1, 0])))
    assert found["kept_tokens"] == 4.0 and found["kept_tokens_p50"] == 1.0
    assert found["covered_mass"] == pytest.approx(0.7)
    assert found["old_entropy"] == pytest.approx((-0.9 * math.log(0.9) + 0.1 * math.log(100)) / 3, rel=1e-5)


def test_support_too_small_warns_of_the_mass_outside():
    assert support_too_small(0.1, top_k=64) is None
    assert support_too_small(NAN, top_k=64) is None
    message = support_too_small(0.234, top_k=64, setting="support_top_k")
    assert message is not None
    for part in ("23% of the old policy's mass", "64 tokens", "Raise support_top_k to 256", "tail_gap"):
        assert part in message
    assert support_too_small(0.1, top_k=64, threshold=0.05) is not None
    with pytest.raises(ValueError, match="threshold must be in"):
        support_too_small(0.1, top_k=64, threshold=1.0)


def test_support_statistics_add_up_to_the_means_of_the_coverage():
    logits = tensor(pairs("peaked", 24, 33)[0], torch.float32).view(4, 6, 33)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    old = troll.capture(logits, torch.zeros(4, 6, dtype=torch.int64), top_k=5, mass_threshold=1e-3)
    sums = support_statistics(old, mask)
    assert all(value.shape == () and value.dtype == torch.float32 for value in sums.values())
    means = {name: value.item() / int(mask.sum()) for name, value in sums.items()}
    found = numbers(coverage(old, mask))
    assert means["support_size"] == pytest.approx(found["kept_tokens"], rel=1e-6)
    # 1 less a mean of 1 − tail, each with an error of 2^-24: of sums of 24 at most.
    assert means["tail_mass"] == pytest.approx(1 - found["covered_mass"], abs=24 * 2**-23)
    in_parts = [support_statistics(old[:1], mask[:1]), support_statistics(old[1:], mask[1:])]
    for name, value in sums.items():
        assert in_parts[0][name] + in_parts[1][name] == pytest.approx(value.item(), rel=1e-6)


def test_support_statistics_look_at_the_mask_alone():
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))
    mask, tokens = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.zeros(2, 3, dtype=torch.int64)
    expected = support_statistics(troll.capture(logits, tokens, top_k=4), mask)
    logits[mask == 0] = NAN
    assert support_statistics(troll.capture(logits, tokens, top_k=4), mask) == expected


def test_coverage_refuses_other_positions():
    old = troll.capture(torch.zeros(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64), top_k=4)
    with pytest.raises(ValueError, match=r"old must be \(2, 4\) like the mask, got \(2, 3\)"):
        coverage(old, torch.ones(2, 4))
