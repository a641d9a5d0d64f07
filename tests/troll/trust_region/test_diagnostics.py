"""Diagnostics: against exact enumeration, float64 references, and by the rules they promise to follow."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

import troll
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import (
    FAMILIES,
    array,
    assert_same_numbers,
    capture_rows,
    numbers,
    pairs,
    tensor,
)
from troll import Constraint, PolicyOnSupport, SparsePolicy, project
from troll.trust_region.diagnostics import (
    TailGap,
    coverage,
    dual_report,
    old_to_new_kl,
    outside_support,
    ratio_report,
    sequence_report,
    support_too_small,
    tail_gap,
    tail_report,
)
from troll.trust_region.policy.on_support import sparse_entropy

NAN = math.nan


def policies(
    family: str, rows: int, size: int, dtype=torch.float64, **keywords
) -> tuple[PolicyOnSupport, SparsePolicy]:
    """(new, old) on one support."""
    old_logits, new_logits = pairs(family, rows, size)
    tokens = torch.from_numpy(np.nanargmax(old_logits, axis=1))
    old = troll.capture(tensor(old_logits, dtype), tokens, **keywords)
    return troll.log_probs_at(tensor(new_logits, dtype), old.token_ids), old


def test_sequence_report_estimates_are_unbiased():
    """On all sequences of 3 of 4 tokens from two Markov chains: log p, log p̃ of the sampled (S, 3), and token KLs."""
    rng = np.random.default_rng(0)
    old = log_softmax(rng.standard_normal((5, 4)), axis=-1)  # row 4 starts the sequence
    new = log_softmax(old + 0.7 * rng.standard_normal((5, 4)), axis=-1)
    sequences = np.array(list(itertools.product(range(4), repeat=3)))
    states = np.concatenate([np.full((len(sequences), 1), 4), sequences[:, :-1]], axis=1)
    log_p, log_new = old[states, sequences], new[states, sequences]
    ids = torch.from_numpy(sequences)
    captured = troll.capture(tensor(old[states]), ids, top_k=4, mass_threshold=0.0)
    token_kl = old_to_new_kl(troll.log_probs_at(tensor(new[states]), captured.token_ids), captured)

    probability = np.exp(log_p.sum(1))
    assert probability.sum() == pytest.approx(1.0, rel=1e-12)
    exact = float(np.sum(probability * (log_p - log_new).sum(1)))

    log_ratio = tensor(log_new - log_p)
    reports = [numbers(sequence_report(token_kl[[i]], log_ratio[[i]], torch.ones(1, 3))) for i in range(64)]
    variances = {}
    for name in reports[0]:
        values = np.array([report[name] for report in reports])
        assert np.sum(probability * values) == pytest.approx(exact, rel=1e-9), name
        variances[name] = np.sum(probability * (values - exact) ** 2)
    assert variances["sequence_kl"] < 0.5 * min(variances["sequence_kl_k1"], variances["sequence_kl_k3"])


def test_sequence_report_means_over_sequences_with_tokens():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    token_kl = torch.tensor([[0.1, 0.2, NAN], [NAN, NAN, NAN], [0.5, NAN, NAN]], requires_grad=True)
    log_ratio = torch.tensor([[0.3, -0.1, NAN], [NAN, NAN, torch.inf], [0.0, NAN, NAN]])
    found = sequence_report(token_kl, log_ratio, mask)
    k3 = (math.expm1(0.3) - 0.3 + math.expm1(-0.1) + 0.1) / 2
    assert_same_numbers(numbers(found), {"sequence_kl": 0.4, "sequence_kl_k1": -0.1, "sequence_kl_k3": k3})
    assert not found.totals["sequence_kl"].requires_grad
    broken = sequence_report(token_kl.detach(), log_ratio, torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]]))
    assert numbers(broken)["sequence_kl"] == pytest.approx(0.5)  # the sequence that is no distribution is left out


def by_hand(new_logits, old_logits, ids) -> float:
    """p̃(T) KL(p̃(·|T) ‖ p(·|T)) of floored distributions."""
    tail = reference.complement(len(new_logits), ids)
    new, old = (reference.floored(reference.log_softmax(logits))[tail] for logits in (new_logits, old_logits))
    within = [log_probs - reference.log_sum_exp(log_probs) for log_probs in (new, old)]
    return math.exp(reference.log_sum_exp(new)) * reference.kl_divergence(*within)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(*[st.sampled_from([-math.inf, -60.0, -28.0, -20.0, -5.0, 0.0, 2.0, 30.0])] * 2),
        min_size=2,
        max_size=9,
    ),
    top_k=st.integers(1, 9),
)
def test_tail_gap_bound_holds_for_any_policies(rows, top_k):
    new_logits, old_logits = np.array([*rows, (0.0, 0.0)]).T
    token = torch.tensor([int(old_logits.argmax())])
    old = troll.capture(tensor(old_logits[None]), token, top_k=top_k)
    found = tail_gap(tensor(new_logits[None]), tensor(old_logits[None]), old)
    ids = [v for v in old.token_ids[0].tolist() if v >= 0]
    assert found.gap.item() == pytest.approx(by_hand(new_logits, old_logits, ids), rel=1e-8, abs=1e-15)
    assert 0 <= found.gap.item() <= found.bound.item() * (1 + 1e-9)
    if len(ids) == len(new_logits):
        assert found.gap == found.bound == 0


def test_tail_gap_bound_is_nearly_attained():
    """The old tail sits on one token, the new one on another, which the old policy all but excludes."""
    old_logits = np.log([0.9, 0.1 - 1e-13, 1e-13])
    new_logits = np.log([0.7, 1e-13, 0.3 - 1e-13])
    old = troll.capture(tensor(old_logits[None]), torch.tensor([0]), top_k=1)
    found = tail_gap(tensor(new_logits[None]), tensor(old_logits[None]), old)
    assert found.gap.item() == pytest.approx(found.bound.item(), rel=1e-9)


def test_tail_gap_in_float32_and_of_broken_rows():
    old_logits, new_logits = pairs("flat", 20, 150)
    captured = [
        troll.capture(tensor(old_logits, dtype), torch.arange(20), top_k=16) for dtype in (torch.float64, torch.float32)
    ]
    exact = tail_gap(tensor(new_logits), tensor(old_logits), captured[0])
    single = tail_gap(tensor(new_logits, torch.float32), tensor(old_logits, torch.float32), captured[1])
    np.testing.assert_allclose(single.gap, exact.gap, rtol=1e-4)
    new_logits[3, 5] = NAN
    broken = tail_gap(tensor(new_logits), tensor(old_logits), captured[0])
    assert broken.gap.isnan().nonzero().tolist() == [[3]]
    whole = numbers(tail_report(broken, torch.ones(20)))
    keep = np.delete(array(exact.gap), 3)
    assert whole["tail_gap"] == pytest.approx(keep.mean()) and whole["tail_gap_max"] == pytest.approx(keep.max())


def test_outside_support_is_everything_where_no_slot_is_used():
    old = troll.capture(torch.randn(2, 5), torch.tensor([1, 2]), top_k=2)
    old = dataclasses.replace(old, token_ids=torch.where(torch.tensor([[True], [False]]), old.token_ids, -1))
    assert outside_support(old).sum(-1).tolist() == [3, 5]


def test_tail_report_reads_only_the_mask():
    gap = TailGap(torch.tensor([1.0, 3.0, NAN]), torch.tensor([2.0, 5.0, NAN]))
    found = numbers(tail_report(gap, torch.tensor([1, 1, 0])))
    assert_same_numbers(found, {"tail_gap": 2.0, "tail_gap_bound": 3.5, "tail_gap_max": 3.0, "tail_gap_bound_max": 5.0})


def variance_of(log_old, log_new, tau: float) -> float:
    """σ² at τ."""
    return reference.moments(reference.interpolate(log_old, log_new, tau), log_new - log_old)[1]


@pytest.mark.parametrize("family", ["peaked", "flat", "nearly_disjoint", "near_deterministic", "masked"])
def test_dual_report_against_the_reference(family):
    new, old = policies(family, 60, 33, top_k=8)
    found = numbers(dual_report(new, old, torch.ones(60), kl_bound=0.05))

    conditioning = []
    for log_old, log_new in zip(array(old.outcomes), array(new.outcomes), strict=True):
        present = (log_old > -np.inf) | (log_new > -np.inf)
        log_old, log_new = reference.floored(log_old[present]), reference.floored(log_new[present])
        solution = reference.solve(log_old, log_new, 0.05)
        if solution.projected:
            conditioning.append(solution.tau**2 * variance_of(log_old, log_new, solution.tau) / 0.05)
    assert found["conditioning_min"] == pytest.approx(min(conditioning), rel=1e-5)
    assert found["conditioning_p50"] == pytest.approx(np.median(conditioning), rel=1e-5)
    assert found["constraint_error_max"] <= 1e-8

    iterations = array(project(new, old, 0.05).iterations)
    iterations = iterations[iterations > 0]
    assert found["solver_evaluations"] == pytest.approx(iterations.mean())
    assert found["solver_evaluations_max"] == iterations.max()
    assert 0 <= found["bisected_fraction"] <= 1


def test_dual_report_counts_bisections():
    new, old = policies("near_deterministic", 300, 33, dtype=torch.float32, top_k=8)
    found = numbers(dual_report(new, old, torch.ones(300), kl_bound=1e-3))
    assert 0.1 < found["bisected_fraction"] < 1
    assert found["constraint_error_max"] <= 1e-3
    assert found["solver_evaluations_max"] <= 20


def test_dual_report_shows_a_bound_that_is_missed():
    """Float32 cannot meet bounds far below 1e-3."""
    new, old = policies("nearly_disjoint", 20, 33, top_k=8)
    assert numbers(dual_report(new, old, torch.ones(20), 1e-6))["constraint_error_max"] < 1e-8
    new, old = policies("nearly_disjoint", 20, 33, dtype=torch.float32, top_k=8)
    assert numbers(dual_report(new, old, torch.ones(20), 1e-15))["constraint_error_max"] > 1e-3


@pytest.mark.parametrize("per_token", [False, True])
def test_dual_report_reads_only_the_mask(per_token):
    old_logits, new_logits = pairs("peaked", 12, 33)
    mask = torch.arange(12).view(3, 4) % 3 != 0
    kl_bound = torch.linspace(0.01, 0.1, 12, dtype=torch.float64).view(3, 4) if per_token else 0.05
    reports = []
    for nothing in (0.0, NAN):
        logits = [tensor(array_).view(3, 4, 33).clone() for array_ in (old_logits, new_logits)]
        for each in logits:
            each[~mask] = nothing
        tokens = torch.zeros(3, 4, dtype=torch.int64)
        old = troll.capture(logits[0], tokens, top_k=8)
        new = troll.log_probs_at(logits[1], old.token_ids)
        reports.append(numbers(dual_report(new, old, mask, kl_bound)))
    assert_same_numbers(reports[0], reports[1])
    assert reports[0]["constraint_error_max"] < 1e-8
    assert reports[0]["solver_evaluations"] > 0


def test_dual_report_of_policies_within_the_bound_has_no_roots():
    new, old = policies("peaked", 5, 33, top_k=8)
    same = PolicyOnSupport(old.token_ids, old.log_probs, old.tail_log_prob, old.vocab_size)
    for constraint in (None, Constraint.sequence(torch.ones(1, 5))[0]):
        found = numbers(dual_report(same, old, torch.ones(5), 0.05, constraint=constraint))
        assert found and all(math.isnan(value) for value in found.values())
    some = dual_report(new, old, torch.ones(5), 0.05)
    assert_same_numbers(numbers(dual_report(same, old, torch.ones(5), 0.05) + some), numbers(some))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_dual_report_of_tokens_that_share_a_constraint(reduction):
    old_logits, new_logits = (tensor(x).view(3, 4, 33) for x in pairs("peaked", 12, 33))
    old = troll.capture(old_logits, old_logits.argmax(-1), top_k=8)
    new = troll.log_probs_at(new_logits, old.token_ids)
    mask = torch.arange(12).view(3, 4) != 5
    constraint = Constraint.sequence(mask, reduction)
    found = numbers(dual_report(new, old, mask, 0.05, constraint=constraint))
    projection = project(new, old, 0.05, constraint=constraint)
    expected, evaluations = [], []
    for row in projection.projected.any(-1).nonzero().flatten().tolist():
        tau = 1 / (1 + projection.multiplier[row][mask[row]][0].item())
        variances = []
        for column in mask[row].nonzero().flatten().tolist():
            log_old, log_new = (array(policy.outcomes[row, column]) for policy in (old, new))
            present = (log_old > -np.inf) | (log_new > -np.inf)
            variances.append(variance_of(reference.floored(log_old[present]), reference.floored(log_new[present]), tau))
        variance = sum(variances) / (len(variances) if reduction == "mean" else 1)
        expected.append(tau**2 * variance / 0.05)
        evaluations.append(projection.iterations[row][mask[row]][0].item())
    assert len(expected) >= 2
    assert found["conditioning_min"] == pytest.approx(min(expected), rel=1e-5)
    assert found["conditioning_p50"] == pytest.approx(np.median(expected), rel=1e-5)
    assert found["constraint_error_max"] < 1e-8
    assert found["solver_evaluations"] == pytest.approx(np.mean(evaluations))


def test_ratio_report_against_numpy():
    """With as many tokens as sequences, so that an advantage must find its axis."""
    rng = np.random.default_rng(0)
    log_ratio, advantages = 0.3 * rng.standard_normal((20, 20)), rng.standard_normal(20)
    mask = rng.random((20, 20)) < 0.6
    ratio, sign = np.exp(log_ratio[mask]), np.sign(np.broadcast_to(advantages[:, None], mask.shape)[mask])
    log_ratio[~mask] = np.nan
    cut = np.where(sign > 0, ratio > 1.2, ratio < 0.8)
    expected = {
        **{f"ratio_p{percent}": float(np.percentile(ratio, percent)) for percent in (1, 50, 99)},
        "clip_fraction": float(cut.mean()),
        "ratio_max": float(ratio.max()),
    }
    report = ratio_report(tensor(log_ratio), tensor(advantages), torch.from_numpy(mask))
    assert_same_numbers(numbers(report), expected, 1e-9)
    deeper = ratio_report(tensor(log_ratio)[:, None], tensor(advantages), torch.from_numpy(mask)[:, None])
    assert_same_numbers(numbers(deeper), expected, 1e-9)


def test_ratio_report_counts_what_the_clip_cuts():
    """Where the gradient of PPO's own loss is zero."""
    log_ratio = torch.log(torch.tensor([0.5, 0.5, 0.9, 0.9, 1.1, 1.1, 1.5, 1.5, 1.5])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0] * 4 + [0.0])
    ratio = log_ratio.exp()
    torch.minimum(ratio * advantages, ratio.clamp(0.7, 1.3) * advantages).sum().backward()
    assert log_ratio.grad is not None
    cut = (log_ratio.grad == 0) & (advantages != 0)
    found = numbers(ratio_report(log_ratio, advantages, torch.ones(9), clip=0.3))
    assert found["clip_fraction"] == pytest.approx(cut.double().mean().item()) == pytest.approx(2 / 9)


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
    broken = torch.full((100,), math.nan)
    logits = torch.stack([flat, peaked, peaked, broken, flat])
    old = troll.capture(logits, torch.tensor([3, 3, 3, 3, 3]), top_k=10)
    found = numbers(coverage(old, torch.tensor([1, 1, 1, 1, 0])))
    assert found["kept_tokens"] == 4.0 and found["kept_tokens_p50"] == 1.0
    assert found["covered_mass"] == pytest.approx(0.7)
    assert found["old_entropy"] == pytest.approx((-0.9 * math.log(0.9) + 0.1 * math.log(100)) / 3, rel=1e-5)


def test_support_too_small_warns_of_the_mass_outside():
    assert support_too_small(0.1, top_k=64) is None
    assert support_too_small(math.nan, top_k=64) is None
    message = support_too_small(0.234, top_k=64, setting="support_top_k")
    assert message is not None
    for part in ("23% of the old policy's mass", "64 tokens", "Raise support_top_k to 256", "tail_gap"):
        assert part in message
    assert support_too_small(0.1, top_k=64, threshold=0.05) is not None
    with pytest.raises(ValueError, match="threshold must be in"):
        support_too_small(0.1, top_k=64, threshold=1.0)


def reported(function: Callable[..., Any], **change: Any) -> Any:
    new, old = policies("peaked", 5, 33, top_k=8)
    arguments: dict[Callable[..., Any], dict[str, Any]] = {
        tail_gap: {"new_logits": torch.zeros(5, 33), "old_logits": torch.zeros(5, 33), "old": old},
        dual_report: {"new": new, "old": old, "mask": torch.ones(5), "kl_bound": 0.05},
        old_to_new_kl: {"new": new, "old": old},
        ratio_report: {"log_ratio": torch.zeros(2, 3), "advantages": torch.zeros(2), "mask": torch.ones(2, 3)},
        coverage: {"old": old, "mask": torch.ones(5)},
    }
    return function(**arguments[function] | change)


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (tail_gap, {"new_logits": torch.zeros(5, 8)}, "new_logits must be"),
        (tail_gap, {"old_logits": torch.zeros(6, 33)}, "old_logits must be"),
        (dual_report, {"kl_bound": 0.0}, "kl_bound must be above 0"),
        (dual_report, {"mask": torch.ones(6)}, r"new must be \(6\)"),
        (ratio_report, {"clip": 0.0}, "clip must be above 0"),
        (ratio_report, {"advantages": torch.zeros(3)}, "advantages must be"),
        (ratio_report, {"log_ratio": torch.zeros(2, 4)}, "log_ratio must be"),
        (coverage, {"mask": torch.ones(4)}, r"old must be \(4\), got \(5\)"),
    ],
)
def test_reports_refuse_what_does_not_fit(function, change, message):
    with pytest.raises(ValueError, match=message):
        reported(function, **change)
