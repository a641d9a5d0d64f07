"""The kernels of a step against the torch code next to them, in float64; and rows that are no distribution."""

import math
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.troll.trust_region.cases import FAMILIES, array, bounds, pairs, tensor, true_kl
from tests.troll.trust_region.steps import (
    DEVICE,
    DIFFERENTIABLE,
    FIELDS,
    Case,
    assert_agrees,
    case_of,
    numbers,
    run,
    triton_step,
)
from troll.trust_region import step_triton
from troll.trust_region.kernels import VARIABLE
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.top import Top
from troll.trust_region.policy.top_triton import slots
from troll.trust_region.step import PULLS, trust_region_step


@pytest.mark.parametrize(("size", "pull"), [(7, "projection"), (33, "projection"), (7, "proximal")])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_torch(family, size, pull):
    """Values, and the gradient of all outputs together."""
    rows = 10
    case = case_of(family, rows, size)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(rows, generator=generator).to(DEVICE) for name in DIFFERENTIABLE}
    made = assert_agrees(case, weights, pull)
    assert not made.projected.all()
    assert made.projected.any() or family == "nearly_equal"


@pytest.mark.parametrize(
    ("name", "pull"), [*((name, "projection") for name in DIFFERENTIABLE), ("regression", "proximal")]
)
def test_gradient_of_one_output(name, pull):
    """Nothing arrives at the others."""
    for family in ("peaked", "masked"):
        case = case_of(family, 12, 5, seed=1)
        weights = {name: torch.linspace(-2, 2, 12, device=DEVICE)}
        assert_agrees(case, weights, pull)
        _, (gradient, *_) = run(case, weights, pull=pull)
        assert gradient.abs().max() > 0.05


def test_without_entropy_and_without_gradient():
    case = case_of("peaked", 6, 5)
    expected, _ = run(case, by_triton=True)
    new, old = case._replace(logits=case.logits.clone().requires_grad_()).policies()
    with torch.no_grad():
        quiet = triton_step(new, old, case.bound)
    made = triton_step(new, old, case.bound)
    assert made.entropy is None and made.log_ratio.requires_grad and not quiet.log_ratio.requires_grad
    assert not (made.kl_before.requires_grad or made.multiplier.requires_grad)
    for one in (made, quiet):
        assert all(torch.equal(getattr(one, name), getattr(expected, name)) for name in FIELDS if name != "entropy")


@pytest.mark.parametrize("family", ["peaked", "nearly_disjoint", "near_deterministic", "masked"])
def test_the_bound_is_met_for_any_sampled_token(family):
    """To the promise for float32, judged in float64: the whole of q is read by sampling every outcome."""
    rows, size = 5, 5
    old, new = (tensor(x) for x in pairs(family, rows, size, seed=2))
    kl_bound = bounds(rows, seed=3)
    nothing = torch.full((rows * size,), -math.inf)
    case = Case(
        new.float().repeat_interleave(size, 0),
        nothing,
        torch.zeros(rows * size),
        torch.arange(size).expand(rows * size, -1),
        old.log_softmax(-1).float().repeat_interleave(size, 0),
        nothing,
        torch.arange(size).repeat(rows),
        tensor(kl_bound, torch.float32).repeat_interleave(size),
        size,
    )
    made, _ = run(case.each(lambda x: x.to(DEVICE)), by_triton=True)
    projected = array(made.projected.cpu()).reshape(rows, size)
    assert (projected == projected[:, :1]).all() and projected.any()
    raw = [x.log_softmax(-1) for x in (old, new)]
    floored = [x.clamp(min=math.log(1e-12)).log_softmax(-1) for x in raw]
    tau = 1 / (1 + made.multiplier.cpu().double().view(rows, size))
    log_q = array((floored[0] + tau * (floored[1] - floored[0])).log_softmax(-1))
    unfloored = array((torch.stack(raw) > math.log(1e-12)).all(0) & made.projected.cpu().view(rows, size))
    log_ratio = array(made.log_ratio.cpu()).reshape(rows, size)
    np.testing.assert_allclose(log_ratio[unfloored], (log_q - array(floored[0]))[unfloored], atol=1e-4)
    kl = true_kl(log_q, array(old))[projected[:, 0]]
    np.testing.assert_allclose(kl, kl_bound[projected[:, 0]], rtol=1e-3)
    np.testing.assert_allclose(array(made.kl_after.cpu()).reshape(rows, size)[projected[:, 0], 0], kl, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow")  # of a step that is not taken
@pytest.mark.parametrize("family", ["flat", "near_deterministic"])
def test_bounds_below_what_float32_can_meet(family):
    """No promise is made below 1e-3, but the search ends, and every value and gradient is finite."""
    bound = tensor(bounds(12, low=1e-14, high=1e-6), torch.float32).to(DEVICE)
    case = case_of(family, 12, 5, seed=4)._replace(bound=bound)
    made, grads = run(case, by_triton=True)
    assert made.projected.sum() > 3
    assert all(x.isfinite().all() for x in numbers(made, grads).values())
    assert (made.kl_after <= bound * (1 + 1e-3))[made.projected].all()


def test_equal_policies_that_were_captured_have_ratio_one_to_the_last_digit():
    """What normalises a captured policy is computed as what normalises the one that is read at its slots."""
    generator = torch.Generator().manual_seed(0)
    rows, k = 20, 12
    ids = torch.stack([torch.randperm(50, generator=generator)[:k].sort().values for _ in range(rows)]).to(DEVICE)
    z = (5 * torch.randn(rows, k, generator=generator)).to(DEVICE)
    rest = torch.randn(rows, generator=generator).to(DEVICE)
    kept, log_probs, tail_log_prob, slot = slots(Top(ids, z, z, z[:, 3].clone(), rest), ids[:, 3].clone(), 50, 1e-2)
    at = (kept.unsqueeze(-1) == ids.unsqueeze(1)).to(torch.uint8).argmax(-1)
    logits = z.gather(-1, at).masked_fill(kept < 0, -math.inf)
    dropped = ~(kept.unsqueeze(1) == ids.unsqueeze(-1)).any(-1)
    tail_logit = torch.logsumexp(torch.cat([rest.unsqueeze(-1), z.masked_fill(~dropped, -math.inf)], -1), -1)
    new = PolicyOnSupport(kept, logits, tail_logit, 50)
    made = triton_step(new, SparsePolicy(kept, log_probs, tail_log_prob, slot, 50, 1e-2), 0.05)
    assert (kept < 0).any() and not made.projected.any()
    torch.testing.assert_close(made.log_prob, log_probs.gather(-1, slot.unsqueeze(-1)).squeeze(-1), rtol=0, atol=0)
    assert not made.log_ratio.any()


def test_no_tokens_and_shapes_and_bounds_that_broadcast():
    case = case_of("peaked", 6, 5)._replace(bound=torch.tensor([0.01, 0.1, 1.0], device=DEVICE).repeat(2))
    expected, _ = run(case, by_triton=True)
    ids, logits, log_probs = (x.view(2, 3, -1) for x in (case.ids, case.logits, case.old_log_probs))
    tail_logit, old_tail, slot = (x.view(2, 3) for x in (case.tail_logit, case.old_tail, case.slot))
    strided = logits.movedim(-1, 0).contiguous().movedim(0, -1)
    new = PolicyOnSupport(ids, strided, tail_logit.T.contiguous().T, case.vocab_size)
    old = SparsePolicy(ids, log_probs, old_tail, slot.T.contiguous().T, case.vocab_size, 0.0)
    made = triton_step(new, old, torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64))
    assert all(torch.equal(getattr(made, n), getattr(expected, n).view(2, 3)) for n in FIELDS if n != "entropy")
    one_bound = triton_step(new, old, 0.1)
    assert torch.equal(one_bound.log_ratio[:, 1], made.log_ratio[:, 1])
    none = triton_step(
        PolicyOnSupport(ids[:0], logits[:0].clone().requires_grad_(), tail_logit[:0], 9),
        SparsePolicy(ids[:0], log_probs[:0], old_tail[:0], slot[:0], 9, 0.0),
        0.1,
    )
    assert none.log_ratio.shape == (0, 3)
    none.log_ratio.sum().backward()


@pytest.mark.parametrize("kl_bound", [0.0, -1.0, math.nan])
def test_bad_bounds(kl_bound):
    with pytest.raises(ValueError, match="kl_bound"):
        triton_step(*case_of("flat", 3, 4).policies(), kl_bound)


@pytest.mark.parametrize(("dtype", "taken"), [(torch.float32, True), (torch.float64, False)])
def test_what_the_kernel_computes(dtype, taken, monkeypatch):
    """Float64 is left to torch."""
    spy = mock.Mock(wraps=step_triton.step)
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(step_triton, "step", spy)
    trust_region_step(*case_of("peaked", 3, 6).to(dtype).policies(), 0.05)
    assert spy.called == taken


FLOATS = [name for name in FIELDS if name != "projected"]


@pytest.mark.parametrize("pull", PULLS)
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
def test_rows_that_are_no_distribution(where, value, pull, monkeypatch):
    """NaN in every number, no gradient whatever arrives, and nothing of it in other rows."""
    case = case_of("peaked", 6, 5)
    broken = case._replace(**{where: getattr(case, where).clone()})
    at = (slice(1, 2), int(case.slot[1]) - 1) if getattr(case, where).dim() == 2 else slice(1, 2)
    getattr(broken, where)[at] = value
    weights = {name: torch.ones(6, device=DEVICE) for name in DIFFERENTIABLE}
    weights["log_ratio"][1] = weights["entropy"][1] = math.nan
    # A bound on a GPU is not looked at before, one on a CPU is.
    monkeypatch.setattr(step_triton, "broadcast_bound", lambda bound, shape, like: bound)
    made, grads = run(broken, weights, pull=pull, by_triton=True)
    assert all(getattr(made, name)[1].isnan() for name in FLOATS) and not made.projected[1]
    assert not any(g[1].any() for g in grads)
    weights = {name: x[2:] for name, x in weights.items()}
    alone = numbers(*run(case.each(lambda x: x[2:]), weights, pull=pull, by_triton=True))
    assert all(torch.equal(x[2:], alone[name]) for name, x in numbers(made, grads).items())
    assert all(x.isfinite().all() for x in alone.values())


def test_a_row_of_minus_infinity():
    case = case_of("peaked", 4, 5)
    case.logits[0], case.tail_logit[0] = -math.inf, -math.inf
    made, grads = run(case, by_triton=True)
    assert made.kl_before.isnan().tolist() == [True, False, False, False]
    assert not any(g[0].any() for g in grads) and grads[0][1:].any()


def test_gradients_ignore_nan_at_outputs_that_do_not_depend_on_logits():
    """A masked token may bring NaN to the regression of a token that is not projected."""
    case = case_of("nearly_equal", 4, 5)._replace(bound=torch.full((4,), math.inf, device=DEVICE))
    made, grads = run(case, {"regression": torch.full((4,), math.nan)}, by_triton=True)
    assert not made.projected.any() and not any(g.any() for g in grads)


def test_a_sampled_token_that_either_policy_excludes():
    """The new one: ratio 0. The old one: it cannot have been sampled, and nothing flows through it."""
    case = case_of("flat", 8, 6, seed=2)
    rows = torch.arange(8, device=DEVICE)
    case.logits[rows[:4], case.slot[:4]] = -math.inf
    case.old_log_probs[rows[4:], case.slot[4:]] = -math.inf
    assert (case.logits > -math.inf).any(-1).all()
    for bound in (math.inf, 0.01):  # projected and not
        bounded = case._replace(bound=torch.full((8,), bound, device=DEVICE))
        # What arrives at a ratio of 0 is 0.
        weights = {"log_ratio": torch.tensor([0.0] * 4 + [1.0] * 4), "regression": torch.ones(8)}
        made = assert_agrees(bounded, weights)
        assert made.log_ratio[:4].isneginf().all() and made.log_ratio[4:].isfinite().all()
        assert made.projected.all() == (bound < 1)


def test_a_tail_without_mass_has_no_entropy():
    case = case_of("flat", 8, 6)
    case.tail_logit[:] = -math.inf
    expected, _ = run(case._replace(tail_entropy=torch.zeros_like(case.tail_entropy)), by_triton=True)
    case.tail_entropy[:] = math.nan
    made, grads = run(case, {"entropy": torch.ones(8)}, by_triton=True)
    assert made.entropy is not None and expected.entropy is not None
    assert torch.equal(made.entropy, expected.entropy) and made.entropy.isfinite().all()
    assert all(g.isfinite().all() for g in grads) and not grads[1].any() and not grads[2].any()


def test_one_outcome():
    certain = torch.zeros(1, 1, device=DEVICE)
    nothing = torch.full((1,), -math.inf, device=DEVICE)
    bound = torch.full((1,), 1e-3, device=DEVICE)
    case = Case(certain + 3, nothing, nothing * 0, certain.long(), certain, nothing, certain[0].long(), bound, 1)
    made, (gradient, *_) = run(case, by_triton=True)
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
        made, (gradient, *_) = run(case, {"log_ratio": torch.ones(6)}, by_triton=True)
        assert made.projected.all()
        # Terms of size 1 that cancel, each off by a few roundings of log-probabilities up to 20.
        assert gradient.abs().max() <= 3 * 4 * 20 * 2.0**-24
        _, (pull, *_) = run(case, {"regression": torch.ones(6)}, by_triton=True)
        assert pull[:2, :2].abs().min() > 0.1
