"""From the largest entries of a distribution to slots: ties, thresholds, and what an inference engine reports."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import troll
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import FAMILIES, array, pairs, tensor
from tests.troll.trust_region.policy.policies import assert_identical
from troll import SparsePolicy
from troll.trust_region.policy.top import BLOCK, Top, largest, policy_from_top, top_ids

#: Thresholds that no fraction m/n with n ≤ 13 meets: there, rounding would decide.
THRESHOLDS = st.sampled_from([0.0, 1e-5, 1.1e-2, 0.31, 0.91])


@pytest.mark.parametrize("k", [1, 10])
@pytest.mark.parametrize("size", [64 * 40, 64 * 40 + 17])
@pytest.mark.parametrize("levels", [None, 2])
def test_top_ids_by_blocks_are_those_of_stable_sort(k, size, levels):
    assert size // BLOCK > 2 * k, "else no blocks are used"
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(6, size, generator=generator)
    if levels:
        z = torch.randint(levels, (6, size), generator=generator).float()
    z[:, -1] = 100.0  # the remainder counts
    z[3, k:] = -torch.inf
    expected = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(top_ids(z, k), expected)


def test_largest_and_rest_are_the_whole():
    """The rest is made of the tail's own numbers, without the sampled token."""
    ids = torch.tensor([[1, 4, 6, 9], [0, 2, 3, -1]])
    z = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 5.0, 0.0, -math.inf]], dtype=torch.float64)
    sampled, sampled_z = torch.tensor([9, 7]), torch.tensor([0.0, 1.0], dtype=torch.float64)
    parts = torch.tensor([[-1.0, -2.0], [-math.inf, -3.0]], dtype=torch.float64)
    top = largest(ids, z, z - 0.25, sampled, sampled_z, parts, 2)
    assert top.ids.tolist() == [[4, 6], [2, 0]]  # the tie of 0 and 3 goes to the smaller id
    assert top.logits.tolist() == [[3.0, 2.0], [5.0, 0.0]]
    assert torch.equal(top.tail_logits, top.logits - 0.25)
    expected = [np.logaddexp.reduce([-1.0, -2.0, 0.75]), np.logaddexp.reduce([-3.0, -0.25])]
    np.testing.assert_allclose(array(top.log_rest), expected, rtol=1e-14)


def test_policy_from_top_adds_dropped_to_tail():
    """Also what the sampled token pushes out; and the sampled token itself never, whichever numbers it has."""
    z = torch.tensor([[4.0, 3.0, -8.0], [4.0, 3.0, 2.0], [4.0, 3.0, 2.0], [9.0, 0.0, -1.0]], dtype=torch.float64)
    tail_z = z + torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    ids, rest = torch.tensor([[1, 3, 5]]).expand(4, 3), torch.tensor([-7.0, -9.0, -9.0, -9.0], dtype=torch.float64)
    sampled = torch.tensor([1, 0, 3, 3])
    sampled_z = torch.tensor([4.0, -6.0, 3.0, 0.0], dtype=torch.float64)
    policy = policy_from_top(Top(ids, z, tail_z, sampled_z, rest), sampled, 10, 1e-3)
    assert policy.token_ids.tolist() == [[1, 3, -1], [1, 3, 0], [1, 3, 5], [1, 3, -1]]
    assert policy.slot.tolist() == [0, 2, 1, 1]
    unnormalised = [
        [4.0, 3.0, -np.inf, np.logaddexp(-7.0, -7.7)],
        [4.0, 3.0, -6.0, np.logaddexp(-9.0, 2.3)],
        [4.0, 3.0, 2.0, -9.0],
        [9.0, 0.0, -np.inf, np.logaddexp(-9.0, -0.7)],
    ]
    expected = np.array([reference.log_softmax(np.array(row)) for row in unnormalised])
    np.testing.assert_allclose(array(policy.outcomes), expected, rtol=1e-14)


def engine_entries(
    logits: torch.Tensor, token_ids: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of capture_top as vLLM has them: the likeliest in order, then the sampled one if they lack it."""
    log_probs = torch.log_softmax(logits, -1)
    ids = log_probs.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    sampled = token_ids.unsqueeze(-1)
    ids = torch.cat([ids, sampled.masked_fill((ids == sampled).any(-1, keepdim=True), -1)], -1)
    values = log_probs.gather(-1, ids.clamp(min=0))
    return ids, values.masked_fill(ids < 0, torch.nan), token_ids, log_probs.gather(-1, sampled).squeeze(-1)


def without_the_sampled(
    ids: torch.Tensor, log_probs: torch.Tensor, token_ids: torch.Tensor, sampled_log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return ids.masked_fill(ids == token_ids.unsqueeze(-1), -1), log_probs, token_ids, sampled_log_probs


def assert_same_policy(actual: SparsePolicy, expected: SparsePolicy, rtol: float, atol: float) -> None:
    """To rounding, but for the 1e-12 to which the rest may have been raised: it moves mass from all others to the tail.

    The tail is compared as a mass, which is how it is known.
    """
    assert torch.equal(actual.token_ids, expected.token_ids) and torch.equal(actual.slot, expected.slot)
    assert (actual.vocab_size, actual.mass_threshold) == (expected.vocab_size, expected.mass_threshold)
    assert actual.log_probs.dtype == expected.log_probs.dtype
    ours, theirs = (array(policy.log_probs[policy.log_probs > -math.inf]) for policy in (actual, expected))
    lost, rounding = theirs - ours, atol + rtol * np.abs(theirs)
    assert (lost >= -rounding).all() and (lost <= 1e-12 + rounding).all()
    gained = array(actual.tail_log_prob.exp()) - array(expected.tail_log_prob.exp())
    assert (gained >= -atol).all() and (gained <= 1e-12 + atol).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k", "threshold"), [(40, 8, 1e-2), (130, 64, 1e-5)])
def test_capture_top_is_capture_of_logits(family, size, top_k, threshold):
    logits = tensor(pairs(family, 50, size)[0]).view(5, 10, size)
    token_ids = torch.randint(size, (5, 10), generator=torch.Generator().manual_seed(0))
    settings = {"top_k": top_k, "mass_threshold": threshold}
    expected = troll.capture(logits, token_ids, **settings)
    entries = engine_entries(logits, token_ids, min(top_k, size))
    # Each p is off by |log p| eps/2 of itself, so the whole by eps/2 times the entropy, of at most log 130; up to
    # 64 eps come with the sum of 64 masses in float64, and some with each subtraction.
    for given_entries in (entries, without_the_sampled(*entries)):
        actual = troll.capture_top(*given_entries, size, **settings)
        assert_same_policy(actual, expected, rtol=4 * 2**-52, atol=128 * 2**-52)

    in_float32 = troll.capture_top(entries[0], entries[1].float(), token_ids, entries[3].float(), size, **settings)
    assert_same_policy(in_float32, expected.to(torch.float32), rtol=4 * 2**-23, atol=16 * 2**-23)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-30.0, -2.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    more=st.integers(0, 4),
    threshold=THRESHOLDS,
    with_the_sampled=st.booleans(),
    data=st.data(),
)
def test_capture_top_takes_ties_in_any_order(logits, top_k, more, threshold, with_the_sampled, data):
    z = torch.tensor(logits, dtype=torch.float64)
    token_ids = torch.tensor(data.draw(st.integers(0, len(logits) - 1)))
    entries = engine_entries(z, token_ids, min(top_k + more, len(logits)))
    ids, log_probs, _, sampled_log_probs = entries if with_the_sampled else without_the_sampled(*entries)
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
    settings = {"top_k": top_k, "mass_threshold": threshold}
    expected = troll.capture(z, token_ids, **settings)
    actual = troll.capture_top(ids[order], log_probs[order], token_ids, sampled_log_probs, len(logits), **settings)
    assert_same_policy(actual, expected, rtol=4 * 2**-52, atol=128 * 2**-52)


def test_capture_top_prefers_entry_of_sampled_token():
    ids, log_probs, sampled = torch.tensor([7, 3]), torch.tensor([0.5, 0.25]).log(), torch.tensor(3)
    expected = troll.capture_top(ids, log_probs, sampled, log_probs[1], 10)
    for other in (-9.0, -0.01, math.nan):
        assert_identical(troll.capture_top(ids, log_probs, sampled, torch.tensor(other), 10), expected)


@pytest.mark.parametrize("vocab_size", [2, 3])
@pytest.mark.parametrize("with_the_sampled", [True, False])
def test_capture_top_has_no_tail_for_whole_vocabulary(vocab_size, with_the_sampled):
    log_probs = torch.tensor([0.7, 0.305]).log()  # rounded up: 1.005 in all
    ids, entries = (torch.tensor([0, 1]), log_probs) if with_the_sampled else (torch.tensor([0]), log_probs[:1])
    policy = troll.capture_top(ids, entries, torch.tensor(1), log_probs[1], vocab_size, mass_threshold=0.0)
    assert policy.token_ids[:2].tolist() == [0, 1] and policy.slot.item() == 1
    torch.testing.assert_close(policy.log_probs[:2].exp(), torch.tensor([0.7, 0.305]) / 1.005)
    # The floor itself, renormalised by 1.005.
    floor = -math.inf if vocab_size == 2 else math.log(1e-12 / 1.005)
    assert policy.tail_log_prob.item() == pytest.approx(floor, rel=1e-6)


def test_capture_top_keeps_small_tail():
    certain = torch.tensor([-3e-9])
    policy = troll.capture_top(torch.tensor([4]), certain, torch.tensor(4), certain[0], 10, mass_threshold=0.0)
    assert policy.tail_log_prob.item() == pytest.approx(math.log(3e-9), abs=1e-4)


def test_capture_top_detaches_and_copies():
    log_probs = torch.tensor([[0.5, 0.25], [0.5, 0.5]]).log().requires_grad_()
    policy = troll.capture_top(torch.tensor([[0, 1]] * 2), log_probs, torch.tensor([0, 1]), log_probs[:, 1], 5)
    assert not policy.log_probs.requires_grad and not policy.tail_log_prob.requires_grad
    before = policy.log_probs.clone()
    with torch.no_grad():
        log_probs.zero_()
    assert torch.equal(policy.log_probs, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_capture_top_computes_half_precision_in_float32(dtype):
    # Powers of ½, whose logarithms are rounded; their sum stays below 1.
    log_probs = torch.tensor([[0.5, 0.25, 0.125]]).log().to(dtype)
    sampled = torch.tensor([2])
    policy = troll.capture_top(torch.tensor([[0, 1, 2]]), log_probs, sampled, log_probs[:, 2], 9)
    assert policy.log_probs.dtype == policy.tail_log_prob.dtype == torch.float32
    expected = torch.cat([log_probs[0].double(), (-torch.expm1(log_probs.double().logsumexp(-1))).log()])
    # log(1 − Σ) is of float64, and rounded once; a few roundings more come with the normalisation.
    used = torch.tensor([0, 1, 2, -1])
    torch.testing.assert_close(policy.outcomes[0, used].double(), expected, rtol=0, atol=8 * 2**-23 * 3)


@pytest.mark.parametrize(("shape", "truncated"), [((0,), False), ((0,), True), ((2, 0), False)])
def test_capture_top_of_no_positions(shape, truncated):
    ids, sampled = torch.zeros(*shape, 3, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    policy = troll.capture_top(
        ids, torch.zeros(*shape, 3), sampled, torch.zeros(shape), 9, top_k=2, truncated=truncated
    )
    assert policy.shape == shape and policy.token_ids.shape == (*shape, 2) and policy.truncated == truncated


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (r"sampled_ids must be in \[0, 9\)", {"sampled_ids": torch.tensor([0, 9])}),
        (r"sampled_ids must be in \[0, 9\)", {"sampled_ids": torch.tensor([0, -1])}),
        ("sampled_ids must be integers", {"sampled_ids": torch.tensor([0.0, 1.0])}),
        (r"sampled_log_probs must be \(2\)", {"sampled_log_probs": torch.zeros(3)}),
        ("sampled_log_probs must be floating", {"sampled_log_probs": torch.zeros(2, dtype=torch.int64)}),
        (r"token_ids must be \(2, M\)", {"token_ids": torch.tensor([[0, 1]])}),
        (r"token_ids must be \(2, M\)", {"token_ids": torch.tensor(0)}),
        (r"token_ids must be \(2, M\)", {"token_ids": torch.zeros(2, 0, dtype=torch.int64)}),
        ("token_ids must be integers", {"token_ids": torch.zeros(2, 2)}),
        (r"token_ids must be in \[0, 9\)", {"token_ids": torch.tensor([[0, 9], [0, 1]])}),
        (r"token_ids must be in \[0, 9\)", {"token_ids": torch.tensor([[0, -2], [0, 1]])}),
        ("token_ids must differ .* 1 twice", {"token_ids": torch.tensor([[0, 3], [1, 1]])}),
        (r"log_probs must be \(2, M\)", {"log_probs": torch.zeros(2, 3)}),
        ("log_probs must be floating", {"log_probs": torch.zeros(2, 2, dtype=torch.int64)}),
        ("log_probs must be log-probabilities", {"log_probs": torch.zeros(2, 2)}),
        ("log_probs must be .* add up to nan", {"log_probs": torch.tensor([[-1.0, -2.0], [torch.nan, -2.0]])}),
        (
            "log_probs must be .* add up to nan",
            {"sampled_ids": torch.tensor([0, 4]), "sampled_log_probs": torch.tensor([-1.0, torch.nan])},
        ),
        ("top_k", {"top_k": 0}),
        ("mass_threshold", {"mass_threshold": 1.0}),
    ],
)
def test_capture_top_refuses_bad_arguments(argument, change):
    arguments: dict[str, Any] = {
        "token_ids": torch.tensor([[0, 3], [1, 0]]),
        "log_probs": torch.full((2, 2), -1.0),
        "sampled_ids": torch.tensor([0, 1]),
        "sampled_log_probs": torch.full((2,), -1.0),
        "vocab_size": 9,
    }
    with pytest.raises(ValueError, match=argument):
        troll.capture_top(**arguments | change)
