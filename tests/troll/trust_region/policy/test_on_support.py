"""Outcomes, and what is said of two policies on common ones: against scipy, finite differences and the chain rule."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import entr, log_softmax
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import FAMILIES, Array, array, pairs, tensor
from tests.troll.trust_region.policy.policies import many_examples, random_policy
from troll import PolicyOnSupport
from troll.trust_region.policy.on_support import sparse_entropy, sparse_kl

IDS = torch.tensor([[5, 2, -1], [0, 7, 4]])


def outcomes(logits: list[list[float]], tail: list[float], ids: Tensor = IDS) -> PolicyOnSupport:
    return PolicyOnSupport(ids, torch.tensor(logits, dtype=torch.float64), torch.tensor(tail, dtype=torch.float64), 9)


def random_outcomes(seed: int, rows: int = 6, slots: int = 4, scale: float = 1.0) -> PolicyOnSupport:
    """All slots used, and a tail."""
    z = scale * torch.randn(rows, slots + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return PolicyOnSupport(torch.arange(slots).expand(rows, slots), z[:, :-1], z[:, -1], 100)


def test_sparse_kl_of_close_policies_in_float32():
    """Divergences of about 1e-8, where the textbook sum Σ p x has an error of about 1e-7."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(8).expand(50, 8)
    first = torch.randn(50, 9, generator=generator, dtype=torch.float64).float()
    second = first + torch.randint(-1, 2, (50, 9), generator=generator) * 2.0**-12
    policies = [PolicyOnSupport(ids, z[:, :-1], z[:, -1], 100) for z in (second, first)]
    log_a, log_b = (log_softmax(array(z), axis=-1) for z in (second, first))
    exact = np.array([reference.kl_divergence(a, b) for a, b in zip(log_a, log_b, strict=True)])
    # The two log-probabilities are rounded by δ ≤ 2·2^-23·|log p| each, which adds Σ p x δ: |x| ≤ 2^-11, |log p| ≤ 8.
    np.testing.assert_allclose(array(sparse_kl(*policies)), exact, rtol=0, atol=2**-11 * 4 * 2**-23 * 8)
    assert exact.mean() > 1e-8


def test_sparse_kl_of_equal_policies_is_zero():
    policy = random_policy()
    assert torch.equal(sparse_kl(policy, policy), torch.zeros(3, 4))
    assert torch.equal(sparse_kl(random_outcomes(0), random_outcomes(0)), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_sparse_kl_gradients_by_differences(scale):
    first, second = random_outcomes(2, scale=scale), random_outcomes(3, scale=scale)
    # Masked in new, in old and in both where new has no mass: none of it is infinite.
    first.logits[0, 1] = first.logits[1, 2] = second.logits[1, 2] = -math.inf
    first.tail_logit[2] = first.tail_logit[3] = second.tail_logit[3] = -math.inf
    assert sparse_kl(first, second).isfinite().all()

    def kl(new_logits: Tensor, new_tail: Tensor, old_logits: Tensor, old_tail: Tensor) -> Tensor:
        new = dataclasses.replace(first, logits=new_logits, tail_logit=new_tail)
        return sparse_kl(new, dataclasses.replace(second, logits=old_logits, tail_logit=old_tail))

    leaves = [x.clone().requires_grad_() for x in (first.logits, first.tail_logit, second.logits, second.tail_logit)]
    # h²/6 times a third derivative of about 10, and eps/h of values of about 10: both some 1e-10.
    assert torch.autograd.gradcheck(kl, leaves, eps=1e-5, atol=within(2e-9), rtol=0)


@many_examples
@given(
    rows=st.lists(
        st.tuples(*[st.sampled_from([-math.inf, -800.0, -60.0, -5.0, 0.0, 2.0, 30.0])] * 2), min_size=2, max_size=7
    )
)
def test_sparse_kl_of_any_two_policies(rows):
    """What scipy says, infinities included; and a gradient that is finite wherever the value is."""
    z = np.array(rows).T
    if (z == -np.inf).all(-1).any():
        z = np.column_stack([z, [0.0, 0.0]])
    leaf = tensor(z).requires_grad_()
    ids = torch.arange(z.shape[1] - 1)
    new, old = (PolicyOnSupport(ids, row[:-1], row[-1], 50) for row in leaf)
    found = sparse_kl(new, old)
    assert not found < 0
    a, b = (log_softmax(row) for row in z)
    # By hand, since exp(−800) is 0 in both and its logarithm is not.
    with np.errstate(invalid="ignore"):
        expected = np.sum(np.where(a == -np.inf, 0.0, np.exp(a) * (a - b)))
    vanishes = (a > -np.inf) & (np.exp(a) == 0) & (b == -np.inf)
    if vanishes.any():
        return  # 0 · inf: a mass that float64 cannot hold
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-13)
    if math.isfinite(expected):
        (gradient,) = torch.autograd.grad(found, leaf)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_sparse_kl_of_broken_row_is_nan(broken):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(5))
    old = troll.capture(logits, torch.tensor([3, 2, 1]), top_k=4)
    damaged = logits.clone()
    damaged[1, 0], damaged[2] = broken, -math.inf
    new = troll.log_probs_at(damaged, old.token_ids)
    assert sparse_kl(new, old).isnan().tolist() == sparse_kl(old, new).isnan().tolist() == [False, True, True]


def test_sparse_kl_refuses_two_supports():
    policy = random_policy()
    elsewhere = troll.capture(torch.arange(40.0).expand(3, 4, 40), torch.zeros(3, 4, dtype=torch.int64), top_k=8)
    for other in (random_policy((3, 5)), elsewhere):
        with pytest.raises(ValueError, match=r"share one support.*log_probs_at\(_, old.token_ids\)"):
            sparse_kl(policy, other)


def test_sparse_kl_computes_half_precision_in_float32():
    policy = random_policy(mass_threshold=0.0)
    new = troll.log_probs_at(torch.zeros(3, 4, 40), policy.token_ids)
    halved = dataclasses.replace(new, logits=new.logits.half(), tail_logit=new.tail_logit.half())
    found = sparse_kl(halved, policy.to(torch.float16))
    assert found.dtype == sparse_entropy(halved).dtype == torch.float32
    # Numbers of up to 40 are rounded to 2^-11 of themselves.
    torch.testing.assert_close(found, sparse_kl(new, policy), rtol=4 * 2**-11, atol=4 * 2**-11)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_sparse_kl_of_no_positions(shape):
    policy = random_policy(shape)
    assert sparse_kl(policy, policy).shape == sparse_entropy(policy).shape == shape


def entropy_of_row(log_probs: Array) -> float:
    return float(entr(np.exp(log_probs)).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_entropy_is_at_most_that_of_vocabulary(family):
    logits, _ = pairs(family, 30, 33)
    tokens = torch.arange(30)
    full = np.array([entropy_of_row(row) for row in log_softmax(logits, axis=-1)])
    dense = troll.capture(tensor(logits), tokens, top_k=33, mass_threshold=0.0)
    np.testing.assert_allclose(array(sparse_entropy(dense)), full, rtol=1e-9, atol=1e-12)

    sparse = troll.capture(tensor(logits), tokens, top_k=4)
    found, tail = array(sparse_entropy(sparse)), array(sparse.tail_log_prob.exp())
    assert (found <= full + 1e-12).all()
    assert (full <= found + tail * math.log(33) + 1e-12).all()
    by_hand = [entropy_of_row(row) for row in array(sparse.outcomes)]
    np.testing.assert_allclose(found, by_hand, rtol=1e-12, atol=1e-15)


def test_sparse_entropy_of_certain_token_in_float32():
    logits = torch.tensor([[0.0, -20.0, -torch.inf]])
    exact = entropy_of_row(log_softmax([0.0, -20.0, -np.inf]))
    # Of 21 e^-20, the 20 of the rare token. The certain one's −log p of e^-20 is lost where 1 + e^-20 is rounded.
    found = sparse_entropy(troll.capture(logits, torch.tensor([0]))).item()
    assert found == pytest.approx(exact, rel=0, abs=3 * math.exp(-20))


def test_sparse_entropy_is_differentiable():
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()

    def of(z: Tensor) -> Tensor:
        return sparse_entropy(PolicyOnSupport(torch.arange(5).expand(4, 5), z[:, :-1], z[:, -1], 50))

    assert torch.autograd.gradcheck(of, z)
