"""Rows in which the kernels of a step meet something that is not a number, not possible, or not there."""

import math

import pytest
import torch

pytest.importorskip("triton")

from tests.trust_region.steps import DEVICE, DIFFERENTIABLE, FIELDS, Case, assert_agrees, case_of, numbers, run
from troll.trust_region import step_triton
from troll.trust_region.step import PULLS, TAILS

FLOATS = [name for name in FIELDS if name != "projected"]


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("logits", math.nan),
        ("logits", math.inf),
        ("tail_logit", math.nan),
        ("old_log_probs", math.nan),
        ("old_tail", math.nan),
        ("bound", math.nan),
        ("bound", 0.0),
        ("bound", -1.0),
    ],
)
def test_rows_that_are_no_distribution(where, value, tail, pull, monkeypatch):
    """NaN in every number, no gradient whatever arrives, and nothing of it in other rows."""
    case = case_of("peaked", 6, 5, tail)
    broken = case._replace(**{where: getattr(case, where).clone()})
    at = (slice(1, 2), int(case.slot[1]) - 1) if getattr(case, where).dim() == 2 else slice(1, 2)
    getattr(broken, where)[at] = value
    weights = {name: torch.ones(6, device=DEVICE) for name in DIFFERENTIABLE}
    weights["log_ratio"][1] = weights["entropy"][1] = math.nan
    # A bound on a GPU is not looked at before, one on a CPU is.
    monkeypatch.setattr(step_triton, "broadcast_bound", lambda bound, shape, like: bound)
    made, grads = run(broken, tail, weights, pull=pull, by_triton=True)
    assert all(getattr(made, name)[1].isnan() for name in FLOATS) and not made.projected[1]
    assert not any(g[1].any() for g in grads)
    weights = {name: x[2:] for name, x in weights.items()}
    alone = numbers(*run(case.each(lambda x: x[2:]), tail, weights, pull=pull, by_triton=True))
    assert all(torch.equal(x[2:], alone[name]) for name, x in numbers(made, grads).items())
    assert all(x.isfinite().all() for x in alone.values())


def test_a_row_of_minus_infinity():
    case = case_of("peaked", 4, 5, "bucket")
    case.logits[0], case.tail_logit[0] = -math.inf, -math.inf
    made, grads = run(case, "bucket", by_triton=True)
    assert made.kl_before.isnan().tolist() == [True, False, False, False]
    assert not any(g[0].any() for g in grads) and grads[0][1:].any()


def test_gradients_ignore_nan_at_outputs_that_do_not_depend_on_logits():
    """A masked token may bring NaN to the regression of a token that is not projected."""
    case = case_of("nearly_equal", 4, 5, "bucket")._replace(bound=torch.full((4,), math.inf, device=DEVICE))
    made, grads = run(case, "bucket", {"regression": torch.full((4,), math.nan)}, by_triton=True)
    assert not made.projected.any() and not any(g.any() for g in grads)


def test_a_sampled_token_that_either_policy_excludes():
    """The new one: ratio 0. The old one: it cannot have been sampled, and nothing flows through it."""
    case = case_of("flat", 8, 6, "bucket", seed=2)
    rows = torch.arange(8, device=DEVICE)
    case.logits[rows[:4], case.slot[:4]] = -math.inf
    case.old_log_probs[rows[4:], case.slot[4:]] = -math.inf
    assert (case.logits > -math.inf).any(-1).all()
    for bound in (math.inf, 0.01):  # projected and not
        bounded = case._replace(bound=torch.full((8,), bound, device=DEVICE))
        # What arrives at a ratio of 0 is 0.
        weights = {"log_ratio": torch.tensor([0.0] * 4 + [1.0] * 4), "regression": torch.ones(8)}
        made = assert_agrees(bounded, "bucket", weights)
        assert made.log_ratio[:4].isneginf().all() and made.log_ratio[4:].isfinite().all()
        assert made.projected.all() == (bound < 1)


def test_a_tail_without_mass_has_no_entropy():
    case = case_of("flat", 8, 6, "bucket")
    case.tail_logit[:] = -math.inf
    expected, _ = run(case._replace(tail_entropy=torch.zeros_like(case.tail_entropy)), "bucket", by_triton=True)
    case.tail_entropy[:] = math.nan
    made, grads = run(case, "bucket", {"entropy": torch.ones(8)}, by_triton=True)
    assert made.entropy is not None and expected.entropy is not None
    assert torch.equal(made.entropy, expected.entropy) and made.entropy.isfinite().all()
    assert all(g.isfinite().all() for g in grads) and not grads[1].any() and not grads[2].any()


def test_one_outcome():
    certain = torch.zeros(1, 1, device=DEVICE)
    nothing = torch.full((1,), -math.inf, device=DEVICE)
    bound = torch.full((1,), 1e-3, device=DEVICE)
    case = Case(certain + 3, nothing, nothing * 0, certain.long(), certain, nothing, certain[0].long(), bound, 1)
    for tail in TAILS:
        made, (gradient, *_) = run(case, tail, by_triton=True)
        assert not made.projected.any() and made.kl_before.item() == 0 and made.log_ratio.item() == 0
        assert gradient.item() == 0


def test_two_outcomes_have_no_gradient_through_the_ratio():
    """The surface of the ball is a single point. A third outcome that is absent makes no difference."""
    old = torch.tensor([[0.0, 0.0], [0.0, -20.0], [-9.0, 0.0]]).repeat_interleave(2, 0)
    new = torch.tensor([[3.0, 0.0], [-20.0, 0.0], [0.0, 0.0]]).repeat_interleave(2, 0)
    absent = torch.full((6, 1), -math.inf)
    ids = torch.tensor([0, 1]).expand(6, 2)
    for unused in (0, 1):
        case = Case(
            torch.cat([new, absent[:, :unused]], -1),
            absent[:, 0],
            torch.zeros(6),
            torch.cat([ids, absent.long()[:, :unused].clamp(min=-1)], -1),
            torch.cat([old.log_softmax(-1), absent[:, :unused]], -1),
            absent[:, 0],
            torch.tensor([0, 1]).repeat(3),
            torch.full((6,), 1e-3),
            2,
        )
        case = case.each(lambda x: x.to(DEVICE))
        for tail in TAILS:
            made, (gradient, *_) = run(case, tail, {"log_ratio": torch.ones(6)}, by_triton=True)
            assert made.projected.all()
            # Terms of size 1 that cancel, each off by a few roundings of log-probabilities up to 20.
            assert gradient.abs().max() <= 3 * 4 * 20 * 2.0**-24
            _, (pull, *_) = run(case, tail, {"regression": torch.ones(6)}, by_triton=True)
            assert pull[:2, :2].abs().min() > 0.1
