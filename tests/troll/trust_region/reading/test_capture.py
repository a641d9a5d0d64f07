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
from tests.troll.trust_region.cases import FAMILIES, array, capture_rows, pairs, tensor
from tests.troll.trust_region.policy.policies import assert_identical
from tests.troll.trust_region.reading.sources import KINDS, TRANSFORMS, Problem
from troll import SparsePolicy
from troll.trust_region.reading.capture import capture_with_entropy

pytestmark = pytest.mark.usefixtures("small_tiles")


def assert_matches(policy: SparsePolicy, rows: list[reference.OldRow], atol: float = 1e-12) -> None:
    assert policy.token_ids.tolist() == [row.padded_ids() for row in rows]
    assert policy.slot.tolist() == [row.slot for row in rows]
    for actual, expected in (
        (policy.log_probs, [row.padded_log_probs() for row in rows]),
        (policy.tail_log_prob, [row.tail_log_prob for row in rows]),
        (policy.log_prob, [row.log_prob for row in rows]),
    ):
        np.testing.assert_allclose(array(actual), np.array(expected), rtol=within(1e-12), atol=within(atol))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k", "threshold"), [(1, 64, 1e-5), (5, 3, 0.0), (40, 8, 1e-2), (130, 64, 1e-5)])
def test_logits_agree_with_the_reference(family, size, top_k, threshold):
    logits, _ = pairs(family, 20, size)
    tokens = np.random.default_rng(0).integers(size, size=20)
    policy = troll.capture(tensor(logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold)
    assert policy.token_ids.dtype == policy.slot.dtype == torch.int64
    assert policy.log_probs.dtype == policy.tail_log_prob.dtype == torch.float64
    assert policy.token_ids.shape == policy.log_probs.shape == (20, min(top_k, size))
    assert (policy.vocab_size, policy.mass_threshold) == (size, threshold)
    assert_matches(policy, capture_rows(logits, tokens, top_k, threshold))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k"), [(1, 64), (5, 3), (40, 8), (130, 64)])
def test_the_entropy_is_that_of_the_whole_vocabulary(family, size, top_k):
    logits, _ = pairs(family, 20, size)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(size, size=20))
    settings = {"top_k": top_k, "mass_threshold": 1e-2}
    policy, entropy = capture_with_entropy(troll.Logits(tensor(logits)), tokens, **settings)
    assert_identical(policy, troll.capture(tensor(logits), tokens, **settings))
    log_probs = log_softmax(logits, axis=-1)
    expected = -xlogy(np.exp(log_probs), np.exp(log_probs)).sum(-1)
    np.testing.assert_allclose(array(entropy), expected, rtol=within(1e-12), atol=within(1e-12))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_entropy_of_either_source(kind, transform):
    problem = Problem(kind, transform=transform, rows=True, spread=3.0)
    _, entropy = capture_with_entropy(problem.source(), problem.token_ids, top_k=8, mass_threshold=0.3)
    expected = torch.distributions.Categorical(logits=problem.logits()).entropy()
    np.testing.assert_allclose(array(entropy), array(expected), rtol=within(1e-12), atol=within(1e-12))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -30.0, -2.0, -0.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    threshold=st.sampled_from([0.0, 1e-5, 1.1e-2, 0.31, 0.91]),  # no fraction m/n, where rounding would decide
    data=st.data(),
)
def test_rows_with_many_ties(logits, top_k, threshold, data):
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    token = data.draw(st.integers(0, len(logits) - 1))
    row = np.array(logits)
    policy = troll.capture(tensor(row), torch.tensor(token), top_k=top_k, mass_threshold=threshold)
    assert policy.shape == ()
    assert_matches(policy[None], [reference.capture(row, token, top_k, threshold)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_either_source_agrees_with_the_reference(kind, transform, with_bias, with_rows, threshold):
    problem = Problem(kind, transform=transform, bias=with_bias, rows=with_rows, spread=3.0)
    policy = troll.capture(problem.source(), problem.token_ids, top_k=8, mass_threshold=threshold)
    logits = array(problem.logits()).reshape(-1, 1000)
    rows = capture_rows(logits, array(problem.token_ids).flatten(), 8, threshold)
    assert policy.shape == problem.shape
    assert_matches(policy.view((-1,)), rows, atol=1e-11)
    if threshold and transform == "plain":
        assert not policy.used.all() and policy.slot.unique().numel() > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(kind, dtype):
    """The logits of a head are those of a product in float32 of what its operands are; torch's own are rounded."""
    problem = Problem(kind, shape=(50,), size=1000, dtype=dtype)
    policy = troll.capture(problem.source(), problem.token_ids, top_k=64, mass_threshold=0.0)
    assert policy.log_probs.dtype == policy.tail_log_prob.dtype == torch.float32
    leaves = [leaf.detach().double() for leaf in problem.leaves]
    exact = leaves[0] if kind == "logits" else leaves[0] @ leaves[1].t()
    log_probs = torch.log_softmax(exact, -1).gather(-1, policy.token_ids)
    half = kind == "head" and dtype != torch.float32
    # Half a unit in the last place of a logit of at most 12 that only counts in the total; else a few
    # roundings of numbers of up to 16.
    tolerance = 12 * torch.finfo(dtype).eps / 2 if half else 12 * 16 * 2.0**-24
    assert (policy.log_probs - log_probs).abs().max() <= within(tolerance)
    if not half:
        rows = capture_rows(array(exact), array(problem.token_ids), 64, 0.0)
        assert policy.token_ids.tolist() == [row.ids for row in rows]  # of bf16 logits hundreds tie
        np.testing.assert_allclose(
            array(policy.tail_log_prob), [row.tail_log_prob for row in rows], atol=within(tolerance)
        )
        return
    # Of each other they are as far as in float32: the rounding of a total is one for all.
    difference = policy.log_probs - log_probs
    assert (difference - difference[:, :1]).abs().max() <= within(12 * 16 * 2.0**-24)
    assert (policy.log_probs.diff(dim=-1) <= 0)[:, :-1].all()  # in order, but for the sampled token in the last slot


@pytest.mark.parametrize("kind", KINDS)
def test_tail_mass_is_exact_where_one_minus_the_sum_would_be_noise(kind):
    weight = torch.full((1000, 1), -25.0)
    weight[0] = 0.0
    source = troll.LMHead(torch.ones(1, 1), weight) if kind == "head" else troll.Logits(weight.t())
    policy = troll.capture(source, torch.tensor([0]), top_k=2, mass_threshold=1e-5)
    assert policy.token_ids.tolist() == [[0, -1]]
    assert policy.tail_log_prob.item() == pytest.approx(-25.0 + math.log(999), abs=4 * 25 * 2.0**-24)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_leaves_its_source_and_stands_on_its_own(kind):
    problem = Problem(kind, dtype=torch.float32, transform="all")
    copies = [leaf.detach().clone() for leaf in problem.leaves]
    policy = troll.capture(problem.source(), problem.token_ids, top_k=5)
    troll.log_probs_at(problem.source(), policy.token_ids)
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(problem.leaves, copies, strict=True))
    assert not policy.log_probs.requires_grad and not policy.tail_log_prob.requires_grad
    before = policy.log_probs.clone()
    for leaf in problem.leaves:
        leaf.data.zero_()
    assert torch.equal(policy.log_probs, before)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_capture_of_broken_rows_does_not_change_others(broken):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    token_ids = torch.tensor([0, 1, 2, 3])
    clean = troll.capture(logits, token_ids, top_k=6)
    logits[2, 7] = broken
    logits[3] = -math.inf
    policy, entropy = capture_with_entropy(troll.Logits(logits), token_ids, top_k=6, mass_threshold=1e-5)
    assert_identical(policy[:2], clean[:2])
    assert entropy.isnan().tolist() == [False, False, True, True]
    assert (policy.log_probs[~policy.used] == -math.inf).all()
    assert policy.log_prob[2:].isnan().all()
    assert policy.tail_log_prob[2:].isnan().all()


def read_with_sampled(logits: Tensor, token_ids: Tensor, slots: int) -> Any:
    """The largest logits in no order, the sampled token among them, and unused slots at the end."""
    generator = torch.Generator().manual_seed(5)
    ids = logits.topk(slots, -1).indices
    ids[..., 0] = torch.where((ids == token_ids.unsqueeze(-1)).any(-1), ids[..., 0], token_ids)
    ids = ids[..., torch.randperm(slots, generator=generator)]
    return troll.log_probs_at(logits, torch.nn.functional.pad(ids, (0, 2), value=-1))


@pytest.mark.parametrize("top_k", [1, 4, 9, 30])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_outcomes_are_a_source(top_k, threshold):
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


def test_outcomes_that_lack_the_sampled_token_are_refused():
    policy = troll.log_probs_at(torch.zeros(2, 9), torch.tensor([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match="token_ids must be among the tokens that the source was read at, got 4"):
        troll.capture(policy, torch.tensor([1, 4]))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("top_k must be an integer of at least 1, got 0", {"top_k": 0}),
        ("top_k must be an integer of at least 1, got -3", {"top_k": -3}),
        ("top_k must be an integer of at least 1, got 2.5", {"top_k": 2.5}),
        (r"mass_threshold must be in \[0, 1\), got 1.0", {"mass_threshold": 1.0}),
        (r"mass_threshold must be in \[0, 1\), got -1e-09", {"mass_threshold": -1e-9}),
        ("mass_threshold must be .* got nan", {"mass_threshold": math.nan}),
        (r"token_ids must be in \[0, 10\), got 10", {"token_ids": torch.tensor([0, 10])}),
        (r"token_ids must be in \[0, 10\), got -1", {"token_ids": torch.tensor([-1, 0])}),
        (r"token_ids must be \(2\), got \(3\)", {"token_ids": torch.tensor([0, 1, 2])}),
        (r"token_ids must be \(2\), got \(1, 2\)", {"token_ids": torch.tensor([[0, 1]])}),
        ("token_ids must be integers, got torch.float32", {"token_ids": torch.tensor([0.0, 1.0])}),
        ("token_ids must be integers, got torch.bool", {"token_ids": torch.tensor([True, False])}),
        (r"logits must be floating point \(..., V\), got torch.float32 \(2, 0\)", {"source": torch.zeros(2, 0)}),
    ],
    ids=range(13),
)
def test_what_does_not_fit_is_named(message, change):
    arguments: dict[str, Any] = {"source": torch.zeros(2, 10), "token_ids": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        troll.capture(**arguments)
