"""trust_region_log_probs against the reference, and troll_loss against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import troll
from tests.trust_region import reference
from tests.trust_region.cases import FAMILIES, array, bounds, capture_rows, pairs, root_tolerance, tensor
from troll.trust_region.objective import TrustRegionStep, troll_loss, trust_region_log_probs
from troll.trust_region.policy import SparsePolicy
from troll.trust_region.projection import project

TAILS = ("bucket", "floor")
SUPPORTS = [(1, 0.0), (4, 1e-2), (9, 1e-5), (20, 0.0)]
TOKEN_FIELDS = ("log_probs", "new_log_probs", "regression", "kl_before", "kl_after", "multiplier", "projected")


def setting(
    family: str, top_k: int, threshold: float, tail: Any, rows: int = 24, size: int = 20, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, SparsePolicy, list[reference.OldRow]]:
    """New logits, sampled tokens, and the captured old policy in both worlds."""
    old_logits, new_logits = pairs(family, rows, size, seed)
    rng = np.random.default_rng(seed)
    likely = old_logits.argmax(1)
    tokens = np.where(rng.random(rows) < 0.5, likely, rng.integers(size, size=rows))
    old = SparsePolicy.from_logits(
        tensor(old_logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold, tail=tail
    )
    return new_logits, tokens, old, capture_rows(old_logits, tokens, top_k, threshold, tail)


# ---------------------------------------------------------------------------------------------------------------------
# The step


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("top_k", "threshold"), SUPPORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_step_agrees_with_the_reference(family, top_k, threshold, tail):
    new_logits, tokens, old, rows = setting(family, top_k, threshold, tail)
    kl_bound = bounds(24, low=1e-2)
    step = trust_region_log_probs(tensor(new_logits), tensor(tokens, torch.int64), old, kl_bound=tensor(kl_bound))
    assert isinstance(step, TrustRegionStep)
    np.testing.assert_allclose(
        array(old.log_prob(tensor(tokens, torch.int64))),
        [row.log_prob(int(token)) for row, token in zip(rows, tokens, strict=True)],
        atol=1e-12,
    )
    for b, old_row in enumerate(rows):
        token, row_bound = int(tokens[b]), float(kl_bound[b])
        expected = reference.step(new_logits[b], token, old_row, row_bound)
        assert bool(step.projected[b]) == expected.projected
        assert step.new_log_probs[b].item() == pytest.approx(expected.new_log_prob, rel=1e-10, abs=1e-12)
        assert step.kl_before[b].item() == pytest.approx(expected.kl_before, rel=1e-9, abs=1e-11)
        assert step.kl_after[b].item() == pytest.approx(expected.kl_after, abs=1e-9)
        if not expected.projected:
            assert step.log_probs[b].item() == step.new_log_probs[b].item()
            assert step.regression[b].item() == 0.0
            assert step.multiplier[b].item() == 0.0
            continue
        outcomes = reference.outcomes_of(new_logits[b], token, old_row)
        solution = reference.solve(outcomes.log_old, outcomes.log_new, row_bound)
        tolerance = root_tolerance(reference.ProjectedRow(solution.log_q, solution, outcomes, new_logits[b]))
        at = outcomes.tokens.index([token])
        assert abs(step.log_probs[b].item() - expected.log_prob) <= tolerance[at]
        # d KL(p̃ ‖ q) / d log q = −p̃
        slack = float(np.sum(np.exp(outcomes.log_new) * tolerance))
        assert abs(step.regression[b].item() - expected.regression) <= slack + 1e-9
        assert step.multiplier[b].item() == pytest.approx(expected.multiplier, rel=1e-4, abs=1e-6) or slack > 1e-6


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("top_k", "threshold"), SUPPORTS)
@pytest.mark.parametrize("family", ["peaked", "flat", "nearly_equal", "masked"])
def test_gradients_agree_with_the_reference(family, top_k, threshold, tail):
    new_logits, tokens, old, rows = setting(family, top_k, threshold, tail, seed=1)
    logits = tensor(new_logits).requires_grad_()
    step = trust_region_log_probs(logits, tensor(tokens, torch.int64), old, kl_bound=0.02)
    gradients = {}
    for name in ("log_probs", "new_log_probs", "regression"):
        (gradient,) = torch.autograd.grad(getattr(step, name).sum(), logits, retain_graph=True)
        gradients[name] = array(gradient)
    for b, old_row in enumerate(rows):
        expected = reference.step(new_logits[b], int(tokens[b]), old_row, 0.02)
        for name, wanted in (
            ("log_probs", expected.log_prob_gradient),
            ("new_log_probs", expected.new_log_prob_gradient),
            ("regression", expected.regression_gradient),
        ):
            np.testing.assert_allclose(gradients[name][b], wanted, rtol=1e-6, atol=1e-6, err_msg=f"{name}, row {b}")


LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, 1.0, -30.0, -math.inf]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=9),
    top_k=st.integers(1, 10),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.5]),
    tail=st.sampled_from(TAILS),
    kl_bound=st.sampled_from([1e-3, 0.05, 0.5, math.inf]),
    data=st.data(),
)
def test_any_step(rows, top_k, threshold, tail, kl_bound, data):
    old_logits, new_logits = np.array(rows).T.reshape(2, -1)
    assume(reference.is_finite_row(old_logits) and reference.is_finite_row(new_logits))
    token = data.draw(st.integers(0, len(rows) - 1))
    row = reference.capture(old_logits, token, top_k, threshold, tail)
    expected = reference.step(new_logits, token, row, kl_bound)
    assume(abs(expected.kl_before - kl_bound) > 1e-9)

    token_ids = torch.tensor([token])
    old = SparsePolicy.from_logits(
        tensor(old_logits[None]), token_ids, top_k=top_k, mass_threshold=threshold, tail=tail
    )
    logits = tensor(new_logits[None]).requires_grad_()
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=kl_bound)
    assert bool(step.projected) == expected.projected
    assert step.kl_before.item() == pytest.approx(expected.kl_before, rel=1e-9, abs=1e-11)
    assert step.kl_after.item() == pytest.approx(expected.kl_after, abs=1e-9)
    if expected.projected:
        outcomes = reference.outcomes_of(new_logits, token, row)
        solution = reference.solve(outcomes.log_old, outcomes.log_new, kl_bound)
        tolerance = root_tolerance(reference.ProjectedRow(solution.log_q, solution, outcomes, new_logits))
        assert abs(step.log_probs.item() - expected.log_prob) <= tolerance[outcomes.tokens.index([token])]
    else:
        assert step.log_probs.item() == pytest.approx(expected.log_prob, rel=1e-12, abs=1e-12)
        assert step.regression.item() == 0.0
    if step.log_probs.item() > -math.inf:
        (step.log_probs + step.regression).sum().backward()
        assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("solver", ["newton", "bracket"])
def test_gradcheck(tail, solver):
    """Of log q and log p̃; the regression stops the gradient at q, which finite differences cannot."""
    generator = torch.Generator().manual_seed(0)
    old_logits = 1.5 * torch.randn(5, 10, generator=generator, dtype=torch.float64)
    new_logits = old_logits + torch.randn(5, 10, generator=generator, dtype=torch.float64)
    token_ids = torch.tensor([0, 3, 5, 7, 9])
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=4, mass_threshold=1e-2, tail=tail)
    kl_before = trust_region_log_probs(new_logits, token_ids, old, kl_bound=0.05).kl_before
    kl_bound = kl_before * torch.tensor([0.1, 0.5, 0.7, 1.5, 3.0], dtype=torch.float64)

    def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = trust_region_log_probs(logits, token_ids, old, kl_bound=kl_bound, solver=solver)
        return step.log_probs, step.new_log_probs

    assert torch.autograd.gradcheck(outputs, new_logits.requires_grad_(), eps=1e-5, atol=1e-6, rtol=1e-5)


def test_regression_moves_a_token_of_two_outcomes():
    old_logits = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    old = SparsePolicy.from_logits(old_logits, torch.tensor([0]), mass_threshold=0.0)
    step = trust_region_log_probs(logits, torch.tensor([0]), old, kl_bound=0.05)
    (through_q,) = torch.autograd.grad(step.log_probs.sum(), logits, retain_graph=True)
    (through_regression,) = torch.autograd.grad(step.regression.sum(), logits)
    assert through_q.abs().max() <= 1e-9
    assert through_regression[0, 0] > 0.01 and through_regression[0, 1] < -0.01


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_support_equals_the_dense_projection(family, tail):
    old_logits, new_logits = (tensor(x) for x in pairs(family, 20, 15, seed=2))
    token_ids = old_logits.argmax(-1)
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=64, mass_threshold=0.0, tail=tail)
    logits = new_logits.clone().requires_grad_()
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=0.05)
    dense_logits = new_logits.clone().requires_grad_()
    dense = project(dense_logits, old_logits, kl_bound=0.05)
    log_probs = dense.log_probs.gather(-1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(step.log_probs, log_probs, rtol=0, atol=1e-7)
    torch.testing.assert_close(step.kl_before, dense.kl_before, rtol=1e-9, atol=1e-10)
    assert torch.equal(step.projected, dense.projected)
    if family != "near_deterministic":
        (ours,) = torch.autograd.grad(step.log_probs.sum(), logits)
        (theirs,) = torch.autograd.grad(log_probs.sum(), dense_logits)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
def test_the_old_logits_are_left_as_they_are(tail):
    """On-policy: q = p̃, the ratio is 1 (bucket), the regression 0 and the gradient that of the raw log-prob."""
    logits = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(3)).requires_grad_()
    token_ids = torch.randint(50, (3, 5), generator=torch.Generator().manual_seed(4))
    old = SparsePolicy.from_logits(logits, token_ids, top_k=50, mass_threshold=0.0, tail=tail)
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=0.05)
    assert not step.projected.any()
    torch.testing.assert_close(step.log_probs, old.log_prob(token_ids), rtol=0, atol=2e-6)
    assert not step.regression.any()
    (ours,) = torch.autograd.grad(step.log_probs.sum(), logits, retain_graph=True)
    plain = torch.log_softmax(logits, -1).gather(-1, token_ids[..., None]).sum()
    (theirs,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_floor_keeps_the_new_policys_own_favourites():
    """A token that only the new policy likes makes the two nearly disjoint, with either policy's top K in the union."""
    old_logits = torch.tensor([[5.0, 4.0, 0.0, 0.0, -9.0, -9.0]], dtype=torch.float64)
    new_logits = torch.tensor([[5.0, 4.0, 0.0, 0.0, -9.0, 9.0]], dtype=torch.float64)
    old = SparsePolicy.from_logits(old_logits, torch.tensor([0]), top_k=2, mass_threshold=0.0, tail="floor")
    step = trust_region_log_probs(new_logits, torch.tensor([0]), old, kl_bound=0.05)
    row = reference.capture(array(old_logits[0]), 0, 2, 0.0, "floor")
    expected = reference.step(array(new_logits[0]), 0, row, 0.05)
    # The sampled token takes the last slot of the new policy's two: the union is {0, 1, 5}.
    assert step.kl_before.item() > 20.0
    assert step.kl_before.item() == pytest.approx(expected.kl_before, rel=1e-9)
    assert step.log_probs.item() == pytest.approx(expected.log_prob, abs=1e-7)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(tail, dtype):
    old_logits, new_logits = (tensor(x, dtype) for x in pairs("flat", 60, 300, seed=5))
    token_ids = torch.from_numpy(np.random.default_rng(5).integers(300, size=60))
    kl_bound = bounds(60, seed=5)
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=64, mass_threshold=1e-5, tail=tail)
    logits = new_logits.clone().requires_grad_()
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=tensor(kl_bound, torch.float32))
    for name in TOKEN_FIELDS[:-1]:
        assert getattr(step, name).dtype == torch.float32, name
    (step.log_probs + step.regression).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype and logits.grad.isfinite().all()
    rows = capture_rows(array(old_logits), array(token_ids), 64, 1e-5, tail)
    for b, row in enumerate(rows):
        expected = reference.step(array(new_logits[b]), int(token_ids[b]), row, float(kl_bound[b]))
        assert step.kl_before[b].item() == pytest.approx(expected.kl_before, rel=1e-4, abs=1e-6)
        assert step.kl_after[b].item() <= kl_bound[b] * (1 + 1e-3)
        assert step.log_probs[b].item() == pytest.approx(expected.log_prob, abs=2e-3)
        assert step.regression[b].item() == pytest.approx(expected.regression, rel=5e-3, abs=1e-5)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("family", ["flat", "peaked"])
def test_float32_gradients(family, tail):
    """Also where the tail is tiny: ∂L/∂log p̃(tail) over p̃(tail) is then too large to be added and taken off again."""
    old_logits, new_logits = (tensor(x, torch.float32) for x in pairs(family, 40, 60, seed=6))
    token_ids = old_logits.argmax(-1)
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=16, mass_threshold=1e-5, tail=tail)
    logits = new_logits.clone().requires_grad_()
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=0.05)
    rows = capture_rows(array(old_logits), array(token_ids), 16, 1e-5, tail)
    for name in ("log_probs", "regression"):
        (gradient,) = torch.autograd.grad(getattr(step, name).sum(), logits, retain_graph=True)
        for b, row in enumerate(rows):
            expected = reference.step(array(new_logits[b]), int(token_ids[b]), row, 0.05)
            wanted = expected.log_prob_gradient if name == "log_probs" else expected.regression_gradient
            np.testing.assert_allclose(array(gradient[b]), wanted, rtol=1e-3, atol=1e-4, err_msg=f"{name}, row {b}")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0)])
def test_shapes(shape, tail):
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(*shape, 11, generator=generator).requires_grad_()
    token_ids = torch.randint(11, shape, generator=generator)
    old = SparsePolicy.from_logits(torch.randn(*shape, 11, generator=generator), token_ids, top_k=4, tail=tail)
    step = trust_region_log_probs(logits, token_ids, old)
    for name in TOKEN_FIELDS:
        assert getattr(step, name).shape == shape, name
    (step.log_probs.sum() + step.regression.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_diagnostics_carry_no_gradient():
    new_logits, tokens, old, _ = setting("flat", 4, 1e-2, "bucket")
    step = trust_region_log_probs(tensor(new_logits).requires_grad_(), tensor(tokens, torch.int64), old)
    assert step.log_probs.requires_grad and step.new_log_probs.requires_grad and step.regression.requires_grad
    for name in ("kl_before", "kl_after", "multiplier", "projected"):
        assert not getattr(step, name).requires_grad, name


@pytest.mark.parametrize("tail", TAILS)
def test_rows_of_a_packed_policy_give_the_same_step(tail):
    new_logits, tokens, old, _ = setting("peaked", 8, 1e-2, tail)
    token_ids = tensor(tokens, torch.int64)
    whole = trust_region_log_probs(tensor(new_logits), token_ids, old, kl_bound=0.02)
    part = trust_region_log_probs(tensor(new_logits)[5:9], token_ids[5:9], old.pack().unpack()[5:9], kl_bound=0.02)
    torch.testing.assert_close(part.log_probs, whole.log_probs[5:9], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("side", ["new", "old"])
def test_rows_that_are_not_finite(side, tail):
    generator = torch.Generator().manual_seed(7)
    old_logits = torch.randn(6, 12, generator=generator)
    new_logits = torch.randn(6, 12, generator=generator)
    token_ids = torch.arange(6)

    def run() -> tuple[TrustRegionStep, torch.Tensor]:
        old = SparsePolicy.from_logits(old_logits, token_ids, top_k=4, tail=tail)
        logits = new_logits.clone().requires_grad_()
        return trust_region_log_probs(logits, token_ids, old, kl_bound=0.05), logits

    clean, _ = run()
    broken = new_logits if side == "new" else old_logits
    broken[1, 8] = math.nan
    broken[2, 9] = math.inf
    broken[3] = -math.inf
    step, logits = run()
    fine = torch.tensor([0, 4, 5])
    assert step.kl_before[1:4].isnan().all()
    assert step.log_probs[1:4].isnan().all()
    for name in TOKEN_FIELDS:
        assert torch.equal(getattr(step, name)[fine], getattr(clean, name)[fine]), name
    (step.log_probs + step.regression)[fine].sum().backward()
    assert logits.grad is not None and logits.grad[fine].isfinite().all()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("kl_bound", {"kl_bound": 0.0}),
        ("kl_bound", {"kl_bound": -1.0}),
        ("kl_bound", {"kl_bound": math.nan}),
        ("kl_bound", {"kl_bound": torch.tensor([0.1, -0.1])}),
        ("kl_bound", {"kl_bound": torch.full((3,), 0.1)}),
        ("solver", {"solver": "brent"}),
        ("logits", {"logits": torch.zeros(2, 7)}),
        ("logits|token_ids", {"logits": torch.zeros(3, 8)}),
        ("logits|token_ids", {"logits": torch.zeros(8)}),
        ("token_ids", {"token_ids": torch.tensor([0, 1, 2])}),
        ("token_ids", {"token_ids": torch.tensor([0, 8])}),
        ("token_ids", {"token_ids": torch.tensor([0, -1])}),
        ("token_ids", {"token_ids": torch.tensor([0, 7])}),  # inside the vocabulary, outside the support
    ],
)
def test_bad_input(argument, change):
    token_ids = torch.tensor([0, 1])
    old = SparsePolicy.from_logits(torch.zeros(2, 8), token_ids, top_k=3, mass_threshold=0.0)
    arguments = {"logits": torch.zeros(2, 8), "token_ids": token_ids, "old": old} | change
    with pytest.raises(ValueError, match=argument):
        trust_region_log_probs(**arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The loss

LEVELS = ("token", "sequence")
AGGREGATIONS: tuple[Any, ...] = ("sequence_mean", "token_mean", "fixed_length")
METRICS = {
    "kl_before_mean",
    "kl_before_max",
    "kl_after_mean",
    "kl_after_max",
    "projected_fraction",
    "multiplier",
    "regression",
    "nonfinite",
}
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]], dtype=torch.bool)


def random_step(garbage: float | None = None, leaf: bool = False) -> tuple[TrustRegionStep, torch.Tensor]:
    """A step with made-up per-token values (4, 5), and old log-probs; `garbage` fills the masked positions."""
    generator = torch.Generator().manual_seed(8)

    def draw() -> torch.Tensor:
        values = torch.rand(4, 5, generator=generator, dtype=torch.float64)
        return values if garbage is None else torch.where(MASK, values, garbage)

    old_log_probs = -draw()
    values = {name: draw() for name in TOKEN_FIELDS[:-1]}
    values["log_probs"] = -values["log_probs"]
    values["new_log_probs"] = -values["new_log_probs"]
    projected = torch.rand(4, 5, generator=generator) < 0.6
    values["multiplier"] = torch.where(projected, values["multiplier"], 0.0)
    if leaf:
        for name in ("log_probs", "regression"):
            values[name] = values[name].detach().requires_grad_()
    return TrustRegionStep(**values, projected=projected), old_log_probs


def draw_advantages(per_token: bool) -> torch.Tensor:
    return torch.randn(
        *((4, 5) if per_token else (4,)), generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3])
def test_loss_agrees_with_the_reference(ratio_level, aggregation, weight, per_token):
    step, old_log_probs = random_step()
    advantages = draw_advantages(per_token)
    max_length = 7 if aggregation == "fixed_length" else None
    loss, _ = troll_loss(
        step,
        old_log_probs,
        advantages,
        MASK,
        regression_weight=weight,
        ratio_level=ratio_level,
        aggregation=aggregation,
        max_length=max_length,
    )
    expected = reference.loss(
        array(step.log_probs),
        array(step.regression),
        array(old_log_probs),
        array(advantages),
        array(MASK),
        weight,
        ratio_level,
        aggregation,
        max_length,
    )
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio_level", "aggregation", "expected"),
    [
        # Sequence 1: ratios 2 and 1/2, advantage 1, regression 0.1 and 0.3. Sequence 2: ratio 4, advantage −2, 0.2.
        ("token", "sequence_mean", ((-2 + 0.1 - 0.5 + 0.3) / 2 + (8 + 0.2)) / 2),
        ("token", "token_mean", ((-2 + 0.1 - 0.5 + 0.3) + (8 + 0.2)) / 3),
        ("token", "fixed_length", ((-2 + 0.1 - 0.5 + 0.3) + (8 + 0.2)) / (2 * 10)),
        # The geometric mean of 2 and 1/2 is 1.
        ("sequence", "sequence_mean", ((-1 + 0.1 - 1 + 0.3) / 2 + (8 + 0.2)) / 2),
        ("sequence", "token_mean", ((-1 + 0.1 - 1 + 0.3) + (8 + 0.2)) / 3),
        ("sequence", "fixed_length", ((-1 + 0.1 - 1 + 0.3) + (8 + 0.2)) / (2 * 10)),
    ],
)
def test_loss_by_hand(ratio_level, aggregation, expected):
    zeros = torch.zeros(2, 2)
    step = TrustRegionStep(
        log_probs=torch.tensor([[math.log(2.0), math.log(0.5)], [math.log(4.0), 9.0]]),
        new_log_probs=zeros,
        regression=torch.tensor([[0.1, 0.3], [0.2, 9.0]]),
        kl_before=zeros,
        kl_after=zeros,
        multiplier=zeros,
        projected=zeros.bool(),
    )
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = troll_loss(
        step,
        zeros,
        torch.tensor([1.0, -2.0]),
        mask,
        ratio_level=ratio_level,
        aggregation=aggregation,
        max_length=10 if aggregation == "fixed_length" else None,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_defaults_are_those_of_the_design():
    step, old_log_probs = random_step()
    advantages = draw_advantages(per_token=False)
    spelled_out, _ = troll_loss(
        step, old_log_probs, advantages, MASK, regression_weight=1.0, ratio_level="token", aggregation="sequence_mean"
    )
    assert torch.equal(troll_loss(step, old_log_probs, advantages, MASK)[0], spelled_out)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_gradient_of_the_loss(ratio_level, aggregation):
    """Against central differences of the reference's loss: the sequence ratio is differentiated as it stands."""
    step, old_log_probs = random_step(leaf=True)
    advantages = draw_advantages(per_token=False)
    max_length = 7 if aggregation == "fixed_length" else None
    loss, _ = troll_loss(
        step,
        old_log_probs,
        advantages,
        MASK,
        regression_weight=0.7,
        ratio_level=ratio_level,
        aggregation=aggregation,
        max_length=max_length,
    )
    loss.backward()

    def value(log_probs: np.ndarray, regression: np.ndarray) -> float:
        arguments = array(old_log_probs), array(advantages), array(MASK), 0.7, ratio_level, aggregation, max_length
        return reference.loss(log_probs, regression, *arguments)

    point = {"log_probs": array(step.log_probs), "regression": array(step.regression)}
    for name in point:
        gradient = getattr(step, name).grad
        assert gradient is not None
        for index in np.ndindex(4, 5):
            change = np.zeros((4, 5))
            change[index] = 1e-6
            up, down = point | {name: point[name] + change}, point | {name: point[name] - change}
            assert gradient[index].item() == pytest.approx((value(**up) - value(**down)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_masked_positions_do_not_leak(ratio_level, aggregation, per_token, garbage):
    advantages = draw_advantages(per_token)
    options = {
        "ratio_level": ratio_level,
        "aggregation": aggregation,
        "max_length": 7 if aggregation == "fixed_length" else None,
    }
    clean_step, clean_old = random_step(leaf=True)
    clean, clean_metrics = troll_loss(clean_step, clean_old, advantages, MASK, **options)
    clean.backward()
    step, old_log_probs = random_step(garbage=garbage, leaf=True)
    if per_token:
        advantages = torch.where(MASK, advantages, garbage)
    loss, metrics = troll_loss(step, old_log_probs, advantages, MASK, **options)
    loss.backward()
    torch.testing.assert_close(loss, clean, rtol=1e-12, atol=0)
    for name in ("log_probs", "regression"):
        ours, theirs = getattr(step, name).grad, getattr(clean_step, name).grad
        assert not ours[~MASK].any()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for name, value in clean_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("where", ["new", "old", "both"])
def test_masked_logits_that_are_not_finite_leave_every_gradient_finite(where, tail):
    """From the logits on: padding may hold anything, and one NaN there would reach every weight of the model."""
    generator = torch.Generator().manual_seed(10)
    old_logits, new_logits = (torch.randn(2, 4, 9, generator=generator) for _ in range(2))
    token_ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    if where in ("old", "both"):
        old_logits[~mask] = math.nan
    if where in ("new", "both"):
        new_logits[~mask] = math.nan
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=3, tail=tail)
    logits = new_logits.requires_grad_()
    step = trust_region_log_probs(logits, token_ids, old, kl_bound=0.05)
    loss, metrics = troll_loss(step, old.log_prob(token_ids), torch.ones(2), mask)
    loss.backward()
    assert loss.isfinite()
    assert metrics["nonfinite"] == 0
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert logits.grad[mask].abs().amax(-1).min() > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_masks_of_any_type(dtype):
    step, old_log_probs = random_step()
    advantages = draw_advantages(per_token=False)
    expected, _ = troll_loss(step, old_log_probs, advantages, MASK)
    loss, _ = troll_loss(step, old_log_probs, advantages, MASK.to(dtype))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_metrics():
    step, old_log_probs = random_step(garbage=1e6)
    advantages = draw_advantages(per_token=False)
    _, metrics = troll_loss(step, old_log_probs, advantages, MASK, aggregation="token_mean")
    assert set(metrics) >= METRICS
    for name, value in metrics.items():
        assert isinstance(value, torch.Tensor) and value.shape == () and not value.requires_grad, name
    kept = {name: getattr(step, name)[MASK] for name in TOKEN_FIELDS}
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
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value.item()), name


def test_metrics_without_a_projected_token():
    step, old_log_probs = random_step()
    nothing = {"projected": MASK & False, "multiplier": torch.zeros_like(step.multiplier)}
    step = TrustRegionStep(**{name: getattr(step, name) for name in TOKEN_FIELDS} | nothing)
    _, metrics = troll_loss(step, old_log_probs, draw_advantages(False), MASK)
    assert metrics["multiplier"].item() == 0.0
    assert metrics["projected_fraction"].item() == 0.0


def test_nothing_but_masked_tokens():
    step, old_log_probs = random_step(leaf=True)
    for aggregation in AGGREGATIONS:
        max_length = 7 if aggregation == "fixed_length" else None
        loss, metrics = troll_loss(
            step, old_log_probs, draw_advantages(False), MASK & False, aggregation=aggregation, max_length=max_length
        )
        assert loss.item() == 0.0
        loss.backward()
        assert all(value.isfinite() for value in metrics.values())
    assert step.log_probs.grad is None or not step.log_probs.grad.any()


def test_non_finite_tokens_are_counted():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(11))
    token_ids = torch.zeros(2, 4, dtype=torch.int64)
    old = SparsePolicy.from_logits(logits, token_ids)
    new_logits = logits.clone()
    new_logits[0, 1, 3] = math.nan
    new_logits[0, 2] = -math.inf
    new_logits[1, 3, 0] = math.inf  # masked: not counted
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    step = trust_region_log_probs(new_logits, token_ids, old)
    _, metrics = troll_loss(step, old.log_prob(token_ids), torch.ones(2), mask)
    assert metrics["nonfinite"].item() == 2


def test_a_sampled_token_without_mass_is_not_a_broken_row():
    """Non-finite means NaN, +inf or a row that is all −inf; one −inf logit is a masked token."""
    old_logits = torch.zeros(1, 2, 4)
    new_logits = old_logits.clone()
    new_logits[0, 1, 0] = -math.inf
    token_ids = torch.zeros(1, 2, dtype=torch.int64)
    old = SparsePolicy.from_logits(old_logits, token_ids)
    for kl_bound, projected in ((0.05, True), (math.inf, False)):
        logits = new_logits.clone().requires_grad_()
        step = trust_region_log_probs(logits, token_ids, old, kl_bound=kl_bound)
        assert bool(step.projected[0, 1]) == projected
        assert step.kl_before.isfinite().all()
        loss, metrics = troll_loss(step, old.log_prob(token_ids), torch.ones(1), torch.ones(1, 2))
        loss.backward()
        assert metrics["nonfinite"].item() == 0
        assert metrics["projected_fraction"].item() == pytest.approx(0.5 if projected else 0.0)
        assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("ratio_level", {"ratio_level": "tokne"}),
        ("aggregation", {"aggregation": "mean"}),
        ("max_length", {"aggregation": "fixed_length"}),
        ("max_length", {"aggregation": "fixed_length", "max_length": 0}),
        ("advantages", {"advantages": torch.zeros(5)}),
        ("advantages", {"advantages": torch.zeros(4, 4)}),
        ("mask", {"mask": torch.ones(4, 4, dtype=torch.bool)}),
        ("old_log_probs", {"old_log_probs": torch.zeros(4)}),
    ],
)
def test_bad_loss_input(argument, change):
    step, old_log_probs = random_step()
    arguments = {
        "step": step,
        "old_log_probs": old_log_probs,
        "advantages": torch.zeros(4),
        "mask": MASK,
    } | change
    with pytest.raises(ValueError, match=argument):
        troll_loss(**arguments)


def test_the_public_names_are_these():
    assert troll.SparsePolicy is SparsePolicy
    assert troll.project is project
    assert troll.trust_region_log_probs is trust_region_log_probs
    assert troll.troll_loss is troll_loss


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "fixed_length"])
def test_a_batch_of_no_sequences_has_loss_zero(aggregation):
    logits, token_ids = torch.zeros(0, 5, 7, requires_grad=True), torch.zeros(0, 5, dtype=torch.int64)
    old = troll.SparsePolicy.from_logits(logits, token_ids)
    step = troll.trust_region_log_probs(logits, token_ids, old)
    loss, metrics = troll.troll_loss(
        step,
        old.log_prob(token_ids),
        torch.zeros(0),
        torch.ones(0, 5),
        aggregation=aggregation,
        max_length=5 if aggregation == "fixed_length" else None,
    )
    loss.backward()
    assert loss.item() == 0
    assert all(value.item() == 0 for value in metrics.values())
