"""Captured policies, from either source and from what has been read, against the reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, xlogy
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import FAMILIES, array, pairs, tensor
from tests.troll.trust_region.policy.policies import assert_identical
from tests.troll.trust_region.reading.sources import KINDS, Problem
from troll.trust_region.reading.capture import captured

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k"), [(5, 8), (40, 8)])
def test_capture_entropy_is_that_of_vocabulary(family, size, top_k):
    logits, _ = pairs(family, 20, size)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(size, size=20))
    settings = {"top_k": top_k, "mass_threshold": 1e-2}
    policy, entropy, _ = captured(troll.Logits(tensor(logits)), tokens, **settings, entropy=True)
    assert entropy is not None
    assert_identical(policy, troll.capture(tensor(logits), tokens, **settings))
    log_probs = log_softmax(logits, axis=-1)
    expected = -xlogy(np.exp(log_probs), np.exp(log_probs)).sum(-1)
    np.testing.assert_allclose(array(entropy), expected, rtol=within(1e-12), atol=within(1e-12))


def test_capture_entropy_of_broken_rows_is_nan():
    logits = torch.zeros(4, 30)
    logits[1, 7], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    source = troll.Logits(logits)
    entropy = captured(source, torch.arange(4), top_k=6, mass_threshold=1e-5, entropy=True).entropy
    assert entropy is not None and entropy.isnan().tolist() == [False, True, True, True]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -30.0, -2.0, -0.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    threshold=st.sampled_from([0.0, 1e-5, 1.1e-2, 0.31, 0.91]),  # no fraction m/n, where rounding would decide
    data=st.data(),
)
def test_capture_of_any_row_with_ties(logits, top_k, threshold, data):
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    token = data.draw(st.integers(0, len(logits) - 1))
    row = np.array(logits)
    policy = troll.capture(tensor(row), torch.tensor(token), top_k=top_k, mass_threshold=threshold)
    expected = reference.capture(row, token, top_k, threshold)
    assert policy.token_ids.tolist() == expected.padded_ids() and policy.slot.item() == expected.slot
    np.testing.assert_allclose(array(policy.log_probs), expected.padded_log_probs(), rtol=0, atol=within(1e-12))
    assert policy.tail_log_prob.item() == pytest.approx(expected.tail_log_prob, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_capture_tail_keeps_digits_below_rounding(kind):
    weight = torch.full((1000, 1), -25.0)
    weight[0] = 0.0
    source = troll.LMHead(torch.ones(1, 1), weight) if kind == "head" else troll.Logits(weight.t())
    policy = troll.capture(source, torch.tensor([0]), top_k=2, mass_threshold=1e-5)
    assert policy.token_ids.tolist() == [[0, -1]]
    assert policy.tail_log_prob.item() == pytest.approx(-25.0 + math.log(999), abs=4 * 25 * 2.0**-24)


@pytest.mark.parametrize("kind", KINDS)
def test_capture_copies_its_source(kind):
    problem = Problem(kind, dtype=torch.float32)
    copies = [leaf.detach().clone() for leaf in problem.leaves]
    policy = troll.capture(problem.source(), problem.token_ids, top_k=5)
    troll.log_probs_at(problem.source(), policy.token_ids)
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(problem.leaves, copies, strict=True))
    assert not policy.log_probs.requires_grad and not policy.tail_log_prob.requires_grad
    before = policy.log_probs.clone()
    for leaf in problem.leaves:
        leaf.data.zero_()
    assert torch.equal(policy.log_probs, before)


def read_with_sampled(logits: Tensor, token_ids: Tensor, slots: int) -> Any:
    """The largest logits in no order, the sampled token among them, and unused slots at the end."""
    generator = torch.Generator().manual_seed(5)
    ids = logits.topk(slots, -1).indices
    ids[..., 0] = torch.where((ids == token_ids.unsqueeze(-1)).any(-1), ids[..., 0], token_ids)
    ids = ids[..., torch.randperm(slots, generator=generator)]
    return troll.log_probs_at(logits, torch.nn.functional.pad(ids, (0, 2), value=-1))


@pytest.mark.parametrize("top_k", [1, 4, 9, 30])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_capture_takes_policy_that_was_read(top_k, threshold):
    """As an engine that says as much of the same policy; everything else is tail."""
    logits = tensor(pairs("peaked", 30, 25)[0])
    token_ids = torch.randint(25, (30,), generator=torch.Generator().manual_seed(6))
    policy, settings = read_with_sampled(logits, token_ids, 9), {"top_k": top_k, "mass_threshold": threshold}
    old = troll.capture(policy, token_ids, **settings)
    assert (old.vocab_size, old.top_k) == (25, min(top_k, 11))
    sampled = torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    expected = troll.capture_top(policy.token_ids, policy.log_probs, token_ids, sampled, 25, **settings)
    assert torch.equal(old.slot, expected.slot) and torch.equal(old.token_ids, expected.token_ids[:, : old.top_k])
    for b, used in enumerate(old.used):
        log_probs, tail = reference.on_support(array(logits[b]), old.token_ids[b, used].tolist())
        np.testing.assert_allclose(array(old.log_probs[b, used]), log_probs, rtol=within(1e-12), atol=within(1e-12))
        assert old.tail_log_prob[b].item() == pytest.approx(tail, rel=1e-12, abs=1e-12)


def test_capture_refuses_policy_without_sampled_token():
    policy = troll.log_probs_at(torch.zeros(2, 9), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match="token_ids must be among the tokens that the source was read at, got 4"):
        troll.capture(policy, torch.tensor([1, 4]))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("top_k must be an integer of at least 1", {"top_k": 0}),
        ("top_k must be an integer of at least 1", {"top_k": -3}),
        ("top_k must be an integer of at least 1", {"top_k": 2.5}),
        ("top_k must be an integer of at least 1, got True", {"top_k": True}),
        (r"mass_threshold must be in \[0, 1\)", {"mass_threshold": 1.0}),
        (r"mass_threshold must be in \[0, 1\)", {"mass_threshold": -1e-9}),
        ("mass_threshold must be", {"mass_threshold": math.nan}),
        (r"token_ids must be in \[0, 10\)", {"token_ids": torch.tensor([0, 10])}),
        (r"token_ids must be in \[0, 10\)", {"token_ids": torch.tensor([-1, 0])}),
        (r"token_ids must be \(2\)", {"token_ids": torch.tensor([0, 1, 2])}),
        (r"token_ids must be \(2\)", {"token_ids": torch.tensor([[0, 1]])}),
        ("token_ids must be integers", {"token_ids": torch.tensor([0.0, 1.0])}),
        ("token_ids must be integers", {"token_ids": torch.tensor([True, False])}),
        (r"logits must be floating point \(..., V\)", {"source": torch.zeros(2, 0)}),
    ],
    ids=range(14),
)
def test_capture_refuses_arguments_that_do_not_fit(message, change):
    arguments: dict[str, Any] = {"source": torch.zeros(2, 10), "token_ids": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        troll.capture(**arguments)
