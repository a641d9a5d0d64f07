"""trust_region_step, with either pull, against the reference and from every source.

The ratio has tests of its own, in test_ratio.py.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import (
    FAMILIES,
    LOGIT,
    TOKEN_FIELDS,
    array,
    bounds,
    capture_rows,
    pairs,
    random_logits,
    root_tolerance,
    tensor,
)
from tests.troll.trust_region.reading.sources import KINDS, Problem
from troll import PackedPolicy, SparsePolicy, TrustRegionStep, trust_region_step
from troll.trust_region.step import PULLS

SUPPORTS = [(1, 0.0), (4, 1e-2), (9, 1e-5), (20, 0.0)]

pytestmark = pytest.mark.usefixtures("small_tiles")


def setting(
    family: str, top_k: int, threshold: float, rows: int = 24, size: int = 20, seed: int = 0
) -> tuple[np.ndarray, SparsePolicy, list[reference.OldRow]]:
    """New logits, and the captured old policy in both worlds."""
    old_logits, new_logits = pairs(family, rows, size, seed)
    rng = np.random.default_rng(seed)
    likely = old_logits.argmax(1)
    tokens = np.where(rng.random(rows) < 0.5, likely, rng.integers(size, size=rows))
    old = troll.capture(tensor(old_logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold)
    return new_logits, old, capture_rows(old_logits, tokens, top_k, threshold)


def assert_step(
    step: TrustRegionStep, b: int, new_row: np.ndarray, row: reference.OldRow, kl_bound: float, pull: str
) -> None:
    """Position b of a float64 step is what the reference says."""
    expected = reference.step(new_row, row, kl_bound, pull)
    assert bool(step.projected[b]) == expected.projected
    assert step.log_prob[b].item() == pytest.approx(expected.log_prob, rel=1e-10, abs=1e-12)
    assert step.kl_before[b].item() == pytest.approx(expected.kl_before, rel=1e-9, abs=1e-11)
    assert step.kl_after[b].item() == pytest.approx(expected.kl_after, abs=1e-9)
    if pull == "proximal":
        assert step.regression[b].item() == pytest.approx(expected.regression, rel=1e-9, abs=1e-10)
    if not expected.projected:
        assert step.log_ratio[b].item() == pytest.approx(expected.log_ratio, rel=1e-11, abs=1e-11)
        assert pull == "proximal" or step.regression[b].item() == 0.0
        assert step.multiplier[b].item() == 0.0
        return
    outcomes = reference.bucket_outcomes(new_row, row)
    solution = reference.solve(outcomes.log_old, outcomes.log_new, kl_bound)
    # How far log q may be off, to first order, where KL(q ‖ p) is off by 1e-9; o's entry with its own s.
    tolerance = root_tolerance(reference.ProjectedRow(solution.log_q, solution, outcomes, new_row))
    mean, variance = reference.moments(solution.log_q, outcomes.log_new - outcomes.log_old)
    own_s = 0.0 if row.log_prob == -math.inf else expected.log_prob - row.log_prob  # of raw log-probabilities
    slope = abs(own_s - mean) / (solution.tau * variance)
    if expected.log_ratio == -math.inf:
        assert step.log_ratio[b].item() == -math.inf
    else:
        allowed = 1e-9 * (1 + slope) + 1e-12 * abs(expected.log_ratio)
        assert abs(step.log_ratio[b].item() - expected.log_ratio) <= within(allowed)
    # d KL(p̃ ‖ q) / d log q = −p̃
    slack = float(np.sum(np.exp(outcomes.log_new) * tolerance))
    assert pull == "proximal" or abs(step.regression[b].item() - expected.regression) <= within(slack + 1e-9)
    assert step.multiplier[b].item() == pytest.approx(expected.multiplier, rel=1e-4, abs=1e-6) or slack > 1e-6


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize(("top_k", "threshold"), SUPPORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_step_agrees_with_the_reference(family, top_k, threshold, pull):
    new_logits, old, rows = setting(family, top_k, threshold)
    kl_bound = bounds(24, low=1e-2)
    step = trust_region_step(tensor(new_logits), old, tensor(kl_bound), pull=pull)
    assert isinstance(step, TrustRegionStep)
    assert step.entropy is None
    for b, row in enumerate(rows):
        assert_step(step, b, new_logits[b], row, float(kl_bound[b]), pull)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize(("top_k", "threshold"), SUPPORTS)
@pytest.mark.parametrize("family", ["peaked", "flat", "nearly_equal", "masked"])
def test_gradients_agree_with_the_reference(family, top_k, threshold, pull):
    new_logits, old, rows = setting(family, top_k, threshold, seed=1)
    assert_gradients(tensor(new_logits), old, rows, 0.02, pull, rtol=1e-6, atol=1e-6)


def assert_gradients(
    new_logits: torch.Tensor,
    old: SparsePolicy,
    rows: list[reference.OldRow],
    kl_bound: float,
    pull: Any = "projection",
    *,
    rtol: float,
    atol: float,
) -> None:
    """The gradient of each output is what the reference says."""
    logits = new_logits.requires_grad_()
    step = trust_region_step(logits, old, kl_bound, pull=pull)
    for name in ("log_ratio", "log_prob", "regression"):
        (gradient,) = torch.autograd.grad(getattr(step, name).sum(), logits, retain_graph=True)
        for b, row in enumerate(rows):
            wanted = getattr(reference.step(array(new_logits[b]), row, kl_bound, pull), f"{name}_gradient")
            np.testing.assert_allclose(
                array(gradient[b]), wanted, rtol=within(rtol), atol=within(atol), err_msg=f"{name}, row {b}"
            )


@settings(max_examples=350, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=9),
    top_k=st.integers(1, 10),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.5]),
    kl_bound=st.sampled_from([1e-3, 0.05, 0.5, math.inf]),
    pull=st.sampled_from(PULLS),
    data=st.data(),
)
def test_any_step(rows, top_k, threshold, kl_bound, pull, data):
    old_logits, new_logits = np.array(rows).T.reshape(2, -1)
    assume(reference.is_finite_row(old_logits) and reference.is_finite_row(new_logits))
    token = data.draw(st.integers(0, len(rows) - 1))
    row = reference.capture(old_logits, token, top_k, threshold)
    expected = reference.step(new_logits, row, kl_bound, pull)
    assume(abs(expected.kl_before - kl_bound) > 1e-9)

    old = troll.capture(tensor(old_logits[None]), torch.tensor([token]), top_k=top_k, mass_threshold=threshold)
    logits = tensor(new_logits[None]).requires_grad_()
    step = trust_region_step(logits, old, kl_bound, pull=pull)
    assert_step(step, 0, new_logits, row, kl_bound, pull)
    (of_pull,) = torch.autograd.grad(step.regression.sum(), logits, retain_graph=True)
    if pull == "proximal":
        np.testing.assert_allclose(
            array(of_pull[0]), expected.regression_gradient, rtol=within(1e-7), atol=within(1e-8)
        )
    if step.log_ratio.item() > -math.inf:
        (of_ratio,) = torch.autograd.grad(step.log_ratio.sum(), logits)
        assert (of_ratio + of_pull).isfinite().all()


def test_gradcheck():
    """Of the ratio, log p̃ and the proximal pull; the paper's stops at q, which finite differences cannot."""
    generator = torch.Generator().manual_seed(0)
    old_logits = 1.5 * torch.randn(6, 10, generator=generator, dtype=torch.float64)
    new_logits = old_logits + torch.randn(6, 10, generator=generator, dtype=torch.float64)
    old_logits[4:, 9], new_logits[4:, 9] = -40.0, -41.0  # sampled, and below the floor
    token_ids = torch.tensor([0, 3, 5, 7, 9, 9])
    old = troll.capture(old_logits, token_ids, top_k=4, mass_threshold=1e-2)
    kl_before = trust_region_step(new_logits, old).kl_before
    kl_bound = kl_before * torch.tensor([0.1, 0.5, 0.7, 1.5, 0.3, 3.0], dtype=torch.float64)

    def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step = trust_region_step(logits, old, kl_bound, pull="proximal")
        return step.log_ratio, step.log_prob, step.regression

    assert torch.autograd.gradcheck(outputs, new_logits.requires_grad_(), eps=1e-5, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    old_logits, new_logits = (tensor(x, dtype) for x in pairs("flat", 60, 300, seed=5))
    token_ids = torch.from_numpy(np.random.default_rng(5).integers(300, size=60))
    kl_bound = bounds(60, seed=5)
    old = troll.capture(old_logits, token_ids, top_k=64, mass_threshold=1e-5)
    logits = new_logits.clone().requires_grad_()
    step = trust_region_step(logits, old, tensor(kl_bound, torch.float32))
    for name in TOKEN_FIELDS[:-1]:
        assert getattr(step, name).dtype == torch.float32, name
    (step.log_ratio + step.regression).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype and logits.grad.isfinite().all()
    rows = capture_rows(array(old_logits), array(token_ids), 64, 1e-5)
    for b, row in enumerate(rows):
        expected = reference.step(array(new_logits[b]), row, float(kl_bound[b]))
        assert step.kl_before[b].item() == pytest.approx(expected.kl_before, rel=1e-4, abs=1e-6)
        assert step.kl_after[b].item() <= kl_bound[b] * (1 + 1e-3)
        assert step.log_ratio[b].item() == pytest.approx(expected.log_ratio, abs=2e-3)
        assert step.regression[b].item() == pytest.approx(expected.regression, rel=5e-3, abs=1e-5)


def test_proximal_pull_of_equal_policies_is_zero():
    logits = random_logits(4, 9, seed=4).requires_grad_()
    old = troll.capture(logits, torch.arange(4), top_k=4)
    step = trust_region_step(logits, old, pull="proximal")
    (gradient,) = torch.autograd.grad(step.regression.sum(), logits)
    assert step.regression.abs().max() <= 1e-14 and gradient.abs().max() <= 1e-14


@pytest.mark.parametrize("family", ["flat", "peaked", "nearly_equal"])
def test_float32_gradients(family):
    """Also where the tail is tiny: ∂L/∂log p̃(tail) over p̃(tail) is then too large to be added and taken off again."""
    old_logits, new_logits = (tensor(x, torch.float32) for x in pairs(family, 40, 60, seed=6))
    token_ids = old_logits.argmax(-1)
    old = troll.capture(old_logits, token_ids, top_k=16, mass_threshold=1e-5)
    rows = capture_rows(array(old_logits), array(token_ids), 16, 1e-5)
    assert_gradients(new_logits, old, rows, 0.05, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl_bound", [1e-3, math.inf])
def test_step_and_gradients_are_those_of_full_logits(kind, kl_bound):
    problem = Problem(kind, transform="all", bias=True, rows=True, spread=2.0)
    old = troll.capture(problem.logits(), problem.token_ids, top_k=8, mass_threshold=1e-2)
    for leaf in problem.leaves:
        leaf.data.mul_(1.5).add_(0.02)
    results = []
    for source in (problem.source(), problem.logits()):
        step = trust_region_step(source, old, kl_bound, entropy=True)
        weights = torch.linspace(-1, 1, step.log_ratio.numel(), dtype=torch.float64).view(step.log_ratio.shape)
        assert step.entropy is not None
        total = ((step.log_ratio + 0.3 * step.log_prob + 0.2 * step.entropy) * weights + step.regression).sum()
        outputs = [getattr(step, name).detach() for name in (*TOKEN_FIELDS, "entropy")]
        results.append([*outputs, *problem.gradients(total)])
    assert bool(results[0][6].any()) == (kl_bound == 1e-3)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_that_have_been_read_give_the_same_step(kind):
    problem = Problem(kind, spread=2.0)
    old = troll.capture(problem.source(), problem.token_ids, top_k=8, mass_threshold=1e-2)
    for leaf in problem.leaves:
        leaf.data.mul_(1.1)
    expected = trust_region_step(problem.source(), old, 1e-3)
    new = troll.log_probs_at(problem.source(), old.token_ids)
    for policy in (old, PackedPolicy.of(old).unpack()):  # whose ids are the same, and not the same tensor
        step = trust_region_step(new, policy, 1e-3)
        for name in TOKEN_FIELDS:
            assert torch.equal(getattr(step, name), getattr(expected, name)), name
    gradients = [problem.gradients((x.log_ratio + x.regression).sum()) for x in (step, expected)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def test_entropy_is_that_of_the_whole_vocabulary():
    """Also where one token has almost everything, and where the support is everything."""
    for spread in (0.1, 1.0, 20.0):
        for top_k in (8, 1000):
            problem = Problem("logits", spread=spread)
            old = troll.capture(problem.source(), problem.token_ids, top_k=top_k, mass_threshold=0.0)
            entropy = trust_region_step(problem.source(), old, entropy=True).entropy
            log_probs = torch.log_softmax(problem.logits(), -1)
            expected = -(log_probs.exp() * log_probs).sum(-1)
            assert entropy is not None
            torch.testing.assert_close(entropy, expected, rtol=1e-11, atol=1e-11)
            (ours,), (theirs,) = (problem.gradients(x.sum()) for x in (entropy, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0)])
def test_shapes(shape):
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(*shape, 11, generator=generator).requires_grad_()
    token_ids = torch.randint(11, shape, generator=generator)
    old = troll.capture(torch.randn(*shape, 11, generator=generator), token_ids, top_k=4)
    step = trust_region_step(logits, old, entropy=True)
    for name in (*TOKEN_FIELDS, "entropy"):
        assert getattr(step, name).shape == shape, name
    (step.log_ratio.sum() + step.regression.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_the_regression_is_differentiable_where_nothing_is_projected():
    """As in the first update after a rollout: 0, and so is its gradient, rows that are no distribution included."""
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(7))
    logits[1, 3] = -math.inf
    old = troll.capture(logits, torch.tensor([0, 3, 2, 2]), top_k=4)
    logits[2, 5] = math.nan
    logits.requires_grad_()
    step = trust_region_step(logits, old)
    assert not step.projected.any()
    assert step.regression[2].isnan() and not step.regression[[0, 1, 3]].any()
    (gradient,) = torch.autograd.grad(step.regression.sum(), logits)
    assert not gradient.any()


def test_numbers_about_the_step_carry_no_gradient():
    new_logits, old, _ = setting("flat", 4, 1e-2)
    step = trust_region_step(tensor(new_logits).requires_grad_(), old, entropy=True)
    assert step.log_ratio.requires_grad and step.log_prob.requires_grad and step.regression.requires_grad
    assert step.entropy is not None and step.entropy.requires_grad
    for name in ("kl_before", "kl_after", "multiplier", "projected"):
        assert not getattr(step, name).requires_grad, name


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("side", ["new", "old"])
def test_rows_that_are_not_finite(side, pull):
    generator = torch.Generator().manual_seed(7)
    old_logits, new_logits = (torch.randn(6, 12, generator=generator) for _ in range(2))
    token_ids = torch.arange(6)

    def run() -> tuple[TrustRegionStep, torch.Tensor]:
        old = troll.capture(old_logits, token_ids, top_k=4)
        logits = new_logits.clone().requires_grad_()
        return trust_region_step(logits, old, 0.05, pull=pull, entropy=True), logits

    clean, _ = run()
    assert clean.projected.any()
    broken = new_logits if side == "new" else old_logits
    broken[1, 8] = math.nan
    broken[2, 9] = math.inf
    broken[3] = -math.inf
    step, logits = run()
    fine = torch.tensor([0, 4, 5])
    for name in ("kl_before", "kl_after", "log_ratio", "regression", "log_prob"):
        assert getattr(step, name)[1:4].isnan().all(), name
    assert not step.projected[1:4].any()
    for name in (*TOKEN_FIELDS, "entropy"):
        assert torch.equal(getattr(step, name)[fine], getattr(clean, name)[fine]), name
    (step.log_ratio + step.regression)[fine].sum().backward()
    # Masked tokens may be such rows, and one NaN there would reach every weight of the model.
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[1:4].any()


@pytest.mark.parametrize("kl_bound", [0.05, math.inf])
def test_a_sampled_token_that_the_new_policy_excludes_has_ratio_0(kl_bound):
    """Non-finite means NaN, +inf or a row that is all −inf; one −inf logit is a masked token."""
    old = troll.capture(torch.zeros(1, 4), torch.tensor([0]))
    logits = torch.tensor([[-math.inf, 0.0, 0.0, 0.0]], requires_grad=True)
    step = trust_region_step(logits, old, kl_bound)
    assert bool(step.projected) == (kl_bound == 0.05)
    assert step.log_ratio.item() == -math.inf
    assert step.kl_before.isfinite().all()
    (step.log_ratio.exp() + step.regression).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


IDS = torch.tensor([[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("kl_bound must be above 0, got 0.0", {"kl_bound": 0.0}),
        ("kl_bound must broadcast to (2), got (3)", {"kl_bound": torch.full((3,), 0.1)}),
        ("pull must be one of projection, proximal, got 'old'", {"pull": "old"}),
        ("source must have the old policy's 8 tokens, got 7", {"source": torch.zeros(2, 7)}),
        ("old must hold the positions (3), got (2)", {"source": torch.zeros(3, 8)}),
        ("old must hold the positions (), got (2)", {"source": torch.zeros(8)}),
        ("old must hold the positions (1, 2), got (2)", {"source": torch.zeros(1, 2, 8)}),
        ("new must be read at the old policy's 3 slots, got 2", {"read_at": IDS[:, :2]}),
        ("new must be read at the old policy's 3 slots, got 4", {"read_at": torch.cat([IDS, IDS[:, :1] + 5], -1)}),
        ("new must be read at the old policy's tokens: log_probs_at(_, old.token_ids)", {"read_at": IDS.flip(1)}),
    ],
    ids=range(10),
)
def test_what_does_not_fit_is_named(message, change):
    old = troll.capture(torch.zeros(2, 8), torch.tensor([0, 1]), top_k=3, mass_threshold=0.0)
    assert old.token_ids.tolist() == [[0, 1, 2]] * 2
    arguments: dict[str, Any] = {"source": torch.zeros(2, 8), "old": old} | change
    if "read_at" in arguments:
        arguments["source"] = troll.log_probs_at(torch.zeros(2, 8), arguments.pop("read_at"))
    with pytest.raises(ValueError, match=re.escape(message)):
        trust_region_step(**arguments)
