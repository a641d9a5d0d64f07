"""Numbers that add up, and the metrics of every step that are made of them."""

import math

import pytest
import torch

import troll
from tests.troll.trust_region.cases import (
    MASK,
    TOKEN_FIELDS,
    assert_same_numbers,
    numbers,
    pairs,
    random_step,
    tensor,
)
from troll import TrustRegionStep
from troll.diagnostics import coverage
from troll.trust_region.metrics import Tally, step_tally, support_tally


def random_tally(seed: int) -> Tally:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(4, generator=generator)
    return Tally({"a": x[:2], "b": x[2:]}, {"c": x[0], "d": x[1]}, {"e": x[2]}, {"f": x[3]})


def test_tally_adds_up():
    first, second = random_tally(0), random_tally(1) + Tally({"other": torch.tensor([6.0, 3.0])})
    found = (first + second).values()
    assert found["a"] == (first.totals["a"][0] + second.totals["a"][0]) / (first.totals["a"][1] + second.totals["a"][1])
    assert found["c"] == max(first.maxima["c"], second.maxima["c"])
    assert found["f"] == first.counts["f"] + second.counts["f"]
    assert found["e"] == min(first.minima["e"], second.minima["e"])
    assert found["other"] == 2.0
    assert_same_numbers(numbers(Tally() + first), numbers(first))


def test_tally_reduced_over_processes_is_their_sum():
    tallies = [random_tally(seed) for seed in range(3)]
    sent: dict[str, list[torch.Tensor]] = {"total": [], "largest": []}

    def recorder(name):
        def send(vector):
            sent[name].append(vector)
            return vector

        return send

    for tally in tallies:
        assert_same_numbers(numbers(tally.reduced(recorder("total"), recorder("largest"))), numbers(tally))
    assert [len(vectors) for vectors in sent.values()] == [3, 3]  # one collective operation of each kind
    reduced = tallies[0].reduced(
        lambda _: torch.stack(sent["total"]).sum(0), lambda _: torch.stack(sent["largest"]).amax(0)
    )
    assert_same_numbers(numbers(reduced), numbers(tallies[0] + tallies[1] + tallies[2]))
    assert Tally().reduced(recorder("total"), recorder("largest")).values() == {}


def test_tally_values_of_nothing_are_callers():
    nothing = Tally(
        {"mean": torch.zeros(2)}, {"largest": torch.tensor(-torch.inf)}, {"smallest": torch.tensor(torch.inf)}
    )
    assert all(math.isnan(value) for value in numbers(nothing).values())
    assert [value.item() for value in nothing.values(empty=0.0).values()] == [0.0, 0.0, 0.0]
    overflown = Tally(maxima={"largest": torch.tensor(torch.inf)}, minima={"smallest": torch.tensor(-torch.inf)})
    assert list(numbers(overflown).values()) == [math.inf, -math.inf]


def metrics_of(step: TrustRegionStep, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return step_tally(step, mask).values(empty=0.0)


@pytest.mark.parametrize("garbage", [None, math.nan, math.inf, -math.inf, 1e6])
def test_step_tally_reads_only_the_mask(garbage):
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


def test_step_tally_counts_and_leaves_out_broken_tokens():
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


def test_step_tally_leaves_out_groups_of_broken_tokens():
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(11))
    old = troll.capture(logits, torch.zeros(2, 3, dtype=torch.int64))
    new = logits + torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(12))
    mask, whole = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    expected = metrics_of(troll.trust_region_step(new, old, constraint=troll.Constraint.sequence(mask)), whole)
    new[0, 1, 3] = math.nan
    metrics = metrics_of(troll.trust_region_step(new, old, constraint=troll.Constraint.sequence(mask)), mask)
    assert metrics.pop("nonfinite") == 1
    assert metrics == {name: expected[name] for name in metrics}


def test_support_tally_agrees_with_coverage():
    logits = tensor(pairs("peaked", 24, 33)[0], torch.float32).view(4, 6, 33)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    logits[~mask] = math.nan
    old = troll.capture(logits, torch.zeros(4, 6, dtype=torch.int64), top_k=5, mass_threshold=1e-3)
    totals = support_tally(old, mask).totals
    assert all(total.shape == (2,) and total.dtype == torch.float32 for total in totals.values())
    means, found = numbers(support_tally(old, mask)), numbers(coverage(old, mask))
    assert means["support_size"] == pytest.approx(found["kept_tokens"], rel=1e-6)
    # 1 less a mean of 1 − tail, each with an error of 2^-24: of sums of 24 at most.
    assert means["tail_mass"] == pytest.approx(1 - found["covered_mass"], abs=24 * 2**-23)
    assert_same_numbers(numbers(support_tally(old[:1], mask[:1]) + support_tally(old[1:], mask[1:])), means)
    everywhere = numbers(support_tally(old, torch.ones_like(mask)))  # elsewhere the policy is NaN
    assert everywhere["tail_mass"] == pytest.approx(means["tail_mass"], rel=1e-6)
