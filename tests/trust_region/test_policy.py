"""SparsePolicy: slots, tails, lookup, the new policy on the old support, KL, moves, indexing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trust_region import reference
from tests.trust_region.cases import FAMILIES, array, capture_rows, pairs, tensor
from troll.trust_region.policy import SparsePolicy

TAILS = ("bucket", "floor")


def random_policy(
    shape: tuple[int, ...] = (3, 4),
    size: int = 40,
    tail: Any = "bucket",
    dtype: torch.dtype = torch.float32,
    **keywords,
) -> SparsePolicy:
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(dtype)
    token_ids = torch.randint(size, shape, generator=generator)
    keywords = {"top_k": 8, "mass_threshold": 1e-2} | keywords
    return SparsePolicy.from_logits(logits, token_ids, tail=tail, **keywords)


def assert_identical(a: SparsePolicy, b: SparsePolicy) -> None:
    """Bit for bit, NaN and −inf included."""
    assert a.shape == b.shape
    assert a.tail == b.tail
    assert a.mass_threshold == b.mass_threshold
    assert a.vocab_size == b.vocab_size
    for name in ("token_ids", "log_probs", "tail_log_prob"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes(), name


def assert_matches(policy: SparsePolicy, rows: list[reference.OldRow], atol: float = 1e-12) -> None:
    assert policy.token_ids.tolist() == [row.padded_ids() for row in rows]
    np.testing.assert_allclose(
        array(policy.log_probs), np.array([row.padded_log_probs() for row in rows]), rtol=1e-12, atol=atol
    )
    np.testing.assert_allclose(
        array(policy.tail_log_prob), np.array([row.tail_log_prob for row in rows]), rtol=1e-12, atol=atol
    )


# ---------------------------------------------------------------------------------------------------------------------
# Capture


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k", "threshold"), [(1, 64, 1e-5), (5, 3, 0.0), (40, 8, 1e-2), (130, 64, 1e-5)])
def test_capture_agrees_with_the_reference(family, tail, size, top_k, threshold):
    logits, _ = pairs(family, 20, size)
    tokens = np.random.default_rng(0).integers(size, size=20)
    policy = SparsePolicy.from_logits(
        tensor(logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold, tail=tail
    )
    assert policy.token_ids.dtype == torch.int64
    assert policy.log_probs.dtype == policy.tail_log_prob.dtype == torch.float64
    assert policy.token_ids.shape == policy.log_probs.shape == (20, min(top_k, size))
    assert_matches(policy, capture_rows(logits, tokens, top_k, threshold, tail))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -30.0, -2.0, -0.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.3, 0.9]),
    tail=st.sampled_from(TAILS),
    data=st.data(),
)
def test_capture_with_many_ties(logits, top_k, threshold, tail, data):
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    token = data.draw(st.integers(0, len(logits) - 1))
    row = np.array(logits)
    policy = SparsePolicy.from_logits(
        tensor(row), torch.tensor(token), top_k=top_k, mass_threshold=threshold, tail=tail
    )
    expected = reference.capture(row, token, top_k, threshold, tail)
    assert policy.shape == ()
    assert policy.token_ids.tolist() == expected.padded_ids()
    np.testing.assert_allclose(array(policy.log_probs), expected.padded_log_probs(), atol=1e-12)
    np.testing.assert_allclose(array(policy.tail_log_prob), expected.tail_log_prob, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (3.0 * torch.randn(50, 2000, generator=generator)).to(dtype)  # bf16: hundreds of ties
    token_ids = torch.randint(2000, (50,), generator=generator)
    policy = SparsePolicy.from_logits(logits, token_ids, top_k=64, mass_threshold=0.0)
    assert policy.log_probs.dtype == policy.tail_log_prob.dtype == torch.float32
    rows = capture_rows(array(logits), array(token_ids), 64, 0.0, "bucket")
    assert policy.token_ids.tolist() == [row.ids for row in rows]
    np.testing.assert_allclose(array(policy.log_probs), np.array([row.log_probs for row in rows]), atol=5e-6)
    np.testing.assert_allclose(array(policy.tail_log_prob), np.array([row.tail_log_prob for row in rows]), atol=5e-6)


def test_constant_logits_keep_the_smallest_ids():
    policy = SparsePolicy.from_logits(
        torch.zeros(1, 50_000, dtype=torch.bfloat16), torch.tensor([49_999]), top_k=64, mass_threshold=0.0
    )
    assert policy.token_ids[0].tolist() == [*range(63), 49_999]


def test_tail_mass_is_exact_where_one_minus_the_sum_would_be_noise():
    logits = torch.full((1, 1000), -25.0)
    logits[0, 0] = 0.0
    policy = SparsePolicy.from_logits(logits, torch.tensor([0]), top_k=2, mass_threshold=1e-5)
    assert policy.token_ids.tolist() == [[0, -1]]
    assert policy.tail_log_prob.item() == pytest.approx(-25.0 + math.log(999), abs=1e-5)


def test_sampled_token_far_outside_the_top_k():
    logits = torch.arange(1000.0, 0.0, -1.0).expand(2, 3, 1000)
    token_ids = torch.tensor([[999, 0, 63], [64, 500, 5]])
    policy = SparsePolicy.from_logits(logits, token_ids, top_k=64, mass_threshold=0.0)
    assert (policy.token_ids == token_ids[..., None]).any(-1).all()
    assert policy.token_ids[0, 0].tolist() == [*range(63), 999]
    assert policy.token_ids[0, 1].tolist() == [*range(64)]
    torch.testing.assert_close(
        policy.log_prob(token_ids), torch.log_softmax(logits, -1).gather(-1, token_ids[..., None])[..., 0]
    )


@pytest.mark.parametrize("tail", TAILS)
def test_capture_carries_no_gradient_and_stands_on_its_own(tail):
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(2)).requires_grad_()
    policy = SparsePolicy.from_logits(logits, torch.zeros(4, dtype=torch.int64), top_k=5, tail=tail)
    assert not policy.log_probs.requires_grad and not policy.tail_log_prob.requires_grad
    before = policy.log_probs.clone()
    with torch.no_grad():
        logits.zero_()
    assert torch.equal(policy.log_probs, before)


def test_defaults_are_those_of_the_design():
    logits, token_ids = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2])
    assert_identical(
        SparsePolicy.from_logits(logits, token_ids),
        SparsePolicy.from_logits(logits, token_ids, top_k=64, mass_threshold=1e-5, tail="bucket"),
    )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_rows_leave_the_others_alone(tail, broken):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    token_ids = torch.tensor([0, 1, 2, 3])
    clean = SparsePolicy.from_logits(logits, token_ids, top_k=6, tail=tail)
    logits[2, 7] = broken
    logits[3] = -math.inf
    policy = SparsePolicy.from_logits(logits, token_ids, top_k=6, tail=tail)
    assert_identical(policy[:2], clean[:2])
    assert (policy.log_probs[~policy.used] == -math.inf).all()
    assert policy.log_prob(token_ids)[2:].isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Lookup


@pytest.mark.parametrize("tail", TAILS)
def test_log_prob_of_every_stored_token(tail):
    policy = random_policy(tail=tail)
    for slot in range(policy.token_ids.shape[-1]):
        used = policy.token_ids[..., slot] >= 0
        ids = torch.where(used, policy.token_ids[..., slot], policy.token_ids[..., 0])
        expected = torch.where(used, policy.log_probs[..., slot], policy.log_probs[..., 0])
        assert torch.equal(policy.log_prob(ids), expected)


@pytest.mark.parametrize("outside", [-1, 3, 10_000])
def test_log_prob_outside_the_support_is_an_error(outside):
    logits = torch.tensor([[5.0, 4.0, 0.0, -5.0], [5.0, 4.0, 0.0, -5.0]])
    policy = SparsePolicy.from_logits(logits, torch.tensor([0, 0]), top_k=3, mass_threshold=0.05)
    assert (policy.token_ids == -1).any()
    with pytest.raises(ValueError, match="token_ids"):
        policy.log_prob(torch.tensor([0, outside]))


def test_log_prob_with_the_wrong_shape():
    with pytest.raises(ValueError, match="token_ids"):
        random_policy((3, 4)).log_prob(torch.zeros(3, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------------------------------
# The new policy on the old support, and KL


def test_on_support_agrees_with_the_reference():
    old_logits, new_logits = pairs("peaked", 30, 25)
    tokens = np.random.default_rng(1).integers(25, size=30)
    old = SparsePolicy.from_logits(tensor(old_logits), tensor(tokens, torch.int64), top_k=6, mass_threshold=1e-2)
    new = old.on_support(tensor(new_logits))
    assert torch.equal(new.token_ids, old.token_ids)
    rows = capture_rows(old_logits, tokens, 6, 1e-2, "bucket")
    for b, row in enumerate(rows):
        log_probs, tail = reference.on_support(new_logits[b], row.ids)
        np.testing.assert_allclose(array(new.log_probs[b, : len(row.ids)]), log_probs, atol=1e-12)
        assert (new.log_probs[b, len(row.ids) :] == -math.inf).all()
        assert new.tail_log_prob[b].item() == pytest.approx(tail, abs=1e-12)


def test_on_support_of_the_same_logits_is_the_old_policy():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(5))
    old = SparsePolicy.from_logits(logits, torch.zeros(5, dtype=torch.int64), top_k=6, mass_threshold=1e-2)
    new = old.on_support(logits)
    torch.testing.assert_close(new.log_probs, old.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(new.tail_log_prob, old.tail_log_prob, rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_k", [3, 9])
def test_on_support_is_differentiable(top_k):
    """Also where the complement is empty, and with −inf logits: gradients are those of autograd, and finite."""
    generator = torch.Generator().manual_seed(6)
    old_logits = 2 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    logits = old_logits + torch.randn(6, 9, generator=generator, dtype=torch.float64)
    logits[1, 4] = -math.inf
    weight = torch.randn(6, top_k + 1, generator=generator, dtype=torch.float64)
    old = SparsePolicy.from_logits(old_logits, torch.zeros(6, dtype=torch.int64), top_k=top_k, mass_threshold=0.0)

    def objective(log_probs: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        everything = torch.cat([log_probs, tail[..., None]], -1)
        present = everything > -math.inf
        return (weight * torch.where(present, everything, 0.0)).sum()

    ours = logits.clone().requires_grad_()
    new = old.on_support(ours)
    objective(new.log_probs, new.tail_log_prob).backward()

    plain = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(plain, -1)
    inside = torch.zeros(6, 9, dtype=torch.bool).scatter(-1, old.token_ids, True)
    if top_k < 9:
        tail = torch.logsumexp(log_probs.masked_fill(inside, -math.inf), -1)
    else:
        tail = torch.full((6,), -math.inf, dtype=torch.float64)
    objective(log_probs.gather(-1, old.token_ids), tail).backward()
    assert ours.grad is not None and plain.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-10)


def test_on_support_skips_unused_slots_without_nan_gradients():
    logits = torch.tensor([[9.0, 0.0, -1.0, -2.0, -3.0]], dtype=torch.float64)
    old = SparsePolicy.from_logits(logits, torch.tensor([0]), top_k=4, mass_threshold=1e-2)
    assert old.token_ids.tolist() == [[0, -1, -1, -1]]
    new_logits = logits.clone().requires_grad_()
    new = old.on_support(new_logits)
    (new.log_probs.exp().sum() + new.tail_log_prob.exp().sum()).backward()
    assert new_logits.grad is not None
    torch.testing.assert_close(new_logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


def dense_kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = torch.log_softmax(a, -1), torch.log_softmax(b, -1)
    return (a.exp() * (a - b)).sum(-1)


def test_chain_rule_between_bucket_and_dense():
    """KL_full = KL_bucket + p̃(tail) KL(p̃(·|tail) ‖ p(·|tail)); nothing here is below the floor."""
    old_logits, new_logits = (tensor(x) for x in pairs("flat", 50, 30))
    old = SparsePolicy.from_logits(old_logits, torch.zeros(50, dtype=torch.int64), top_k=7, mass_threshold=0.0)
    new = old.on_support(new_logits)
    inside = torch.zeros(50, 30, dtype=torch.bool).scatter(-1, old.token_ids, True)
    rest_old = old_logits[~inside].view(50, 23)
    rest_new = new_logits[~inside].view(50, 23)
    gap = new.tail_log_prob.exp() * dense_kl(rest_new, rest_old)
    torch.testing.assert_close(new.kl(old) + gap, dense_kl(new_logits, old_logits), rtol=0, atol=1e-12)
    assert (new.kl(old) <= dense_kl(new_logits, old_logits) + 1e-12).all()


def test_kl_of_a_policy_and_itself_is_zero():
    policy = random_policy()
    assert torch.equal(policy.kl(policy), torch.zeros(policy.shape))


def test_kl_needs_one_support():
    a, b = random_policy(), random_policy(shape=(3, 5))
    with pytest.raises(ValueError):
        a.kl(b)
    other = SparsePolicy.from_logits(torch.arange(40.0).expand(3, 4, 40), torch.zeros(3, 4, dtype=torch.int64), top_k=8)
    with pytest.raises(ValueError):
        a.kl(other)


# ---------------------------------------------------------------------------------------------------------------------
# Moves, indexing, concatenation


def test_moves():
    policy = random_policy()
    double = policy.to(torch.float64)
    assert double.log_probs.dtype == double.tail_log_prob.dtype == torch.float64
    assert double.token_ids.dtype == torch.int64
    assert double.tail == policy.tail and double.mass_threshold == policy.mass_threshold
    assert_identical(double.to(torch.float32), policy)
    assert_identical(policy.to("cpu"), policy)
    assert_identical(policy.to(torch.device("cpu")), policy)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, 3),
        (slice(None), slice(1, 4)),
        (1, 2),
        (slice(None), 0),
        (..., slice(1, 3)),  # the last batch dimension, never the slots
        torch.tensor([2, 0, 0]),
        torch.tensor([[True, False, True, True]] * 3),
        torch.zeros(3, 4, dtype=torch.bool),
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", TAILS)
def test_indexing_is_along_the_batch(index, tail):
    policy = random_policy((3, 4), tail=tail)
    part = policy[index]
    expected = policy.tail_log_prob[index]
    assert part.shape == expected.shape
    assert torch.equal(part.tail_log_prob, expected)
    assert part.token_ids.shape == part.log_probs.shape == (*expected.shape, 8)
    rows = torch.arange(12).view(3, 4)[index]
    assert torch.equal(part.token_ids, policy.token_ids.view(12, 8)[rows])
    assert torch.equal(part.log_probs, policy.log_probs.view(12, 8)[rows])
    assert part.tail == tail and part.mass_threshold == policy.mass_threshold


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_cat_undoes_splitting(dim):
    policy = random_policy((3, 4))
    along = dim % 2
    parts = [policy[:1], policy[1:]] if along == 0 else [policy[:, :1], policy[:, 1:]]
    assert_identical(SparsePolicy.cat(parts, dim=dim), policy)


@pytest.mark.parametrize(
    "other",
    [
        random_policy(tail="floor"),
        random_policy(mass_threshold=0.5),
        random_policy(size=41),
        random_policy(top_k=9),
    ],
    ids=["tail", "mass_threshold", "vocabulary", "top_k"],
)
def test_cat_refuses_policies_captured_differently(other):
    with pytest.raises(ValueError, match="must share tail, mass threshold, vocabulary and K"):
        SparsePolicy.cat([random_policy(), other])


@pytest.mark.parametrize("dim", [2, -3])
def test_cat_refuses_a_dimension_that_is_not_there(dim):
    with pytest.raises(ValueError, match=r"dim must be .* in \[-2, 2\), got"):
        SparsePolicy.cat([random_policy()] * 2, dim=dim)


def test_cat_of_nothing_is_refused():
    with pytest.raises(ValueError, match="policies"):
        SparsePolicy.cat([])


def test_a_single_position_can_be_given_a_batch():
    single = random_policy(shape=())
    assert single[None].shape == (1,)
    assert_identical(single[None][0], single)


def test_half_precision_policies_are_compared_in_float32():
    policy = random_policy(mass_threshold=0.0)
    other = random_policy(mass_threshold=0.0, size=40)
    shifted = policy.on_support(torch.zeros(3, 4, 40))
    halved = SparsePolicy.kl(shifted.to(torch.float16), other.to(torch.float16))
    assert halved.dtype == torch.float32
    torch.testing.assert_close(halved, shifted.kl(other), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Empty batches and bad input


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("tail", TAILS)
def test_empty_batches(shape, tail):
    policy = random_policy(shape, tail=tail)
    assert policy.shape == shape
    assert policy.token_ids.shape == (*shape, 8)
    assert policy.log_prob(torch.zeros(shape, dtype=torch.int64)).shape == shape
    assert policy.kl(policy).shape == shape


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": -3}),
        ("mass_threshold", {"mass_threshold": 1.0}),
        ("mass_threshold", {"mass_threshold": -1e-9}),
        ("mass_threshold", {"mass_threshold": math.nan}),
        ("tail", {"tail": "bukcet"}),
        ("token_ids", {"token_ids": torch.tensor([0, 10])}),
        ("token_ids", {"token_ids": torch.tensor([-1, 0])}),
        ("token_ids", {"token_ids": torch.tensor([0, 1, 2])}),
        ("token_ids", {"token_ids": torch.tensor([[0, 1]])}),
        ("token_ids", {"token_ids": torch.tensor([0.0, 1.0])}),
        ("logits", {"logits": torch.tensor(1.0)}),
        ("logits", {"logits": torch.zeros(2, 0)}),
        ("logits", {"logits": torch.zeros(2, 10, dtype=torch.int64)}),
    ],
)
def test_bad_input(argument, change):
    arguments = {"logits": torch.zeros(2, 10), "token_ids": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=argument):
        SparsePolicy.from_logits(**arguments)


def test_errors_say_what_they_got_and_what_they_take():
    misspelt: Any = "bukcet"
    with pytest.raises(ValueError, match=r"tail.*(bukcet.*bucket|bucket.*bukcet)"):
        SparsePolicy.from_logits(torch.zeros(1, 3), torch.tensor([0]), tail=misspelt)
    with pytest.raises(ValueError, match=r"top_k.*0"):
        SparsePolicy.from_logits(torch.zeros(1, 3), torch.tensor([0]), top_k=0)
    with pytest.raises(ValueError, match=r"token_ids.*17"):
        SparsePolicy.from_logits(torch.zeros(1, 3), torch.tensor([17]))


@pytest.mark.parametrize("shape", [(2, 2), (2, 9), (2, 11), (3, 10), (10,)])
def test_on_support_with_other_shapes(shape):
    old = SparsePolicy.from_logits(torch.zeros(2, 10), torch.tensor([0, 1]), top_k=4)
    with pytest.raises(ValueError, match="logits"):
        old.on_support(torch.zeros(shape))


# ---------------------------------------------------------------------------------------------------------------------
# From the top log-probabilities of an inference engine


def engine_entries(logits: torch.Tensor, token_ids: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probs as vLLM gives them: the `number` likeliest in order, then the sampled one if they lack it."""
    log_probs = torch.log_softmax(logits, -1)
    ids = log_probs.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    sampled = token_ids.unsqueeze(-1)
    ids = torch.cat([ids, sampled.masked_fill((ids == sampled).any(-1, keepdim=True), -1)], -1)
    values = log_probs.gather(-1, ids.clamp(min=0))
    return ids, values.masked_fill(ids < 0, torch.nan)


def assert_same_policy(actual: SparsePolicy, expected: SparsePolicy, atol: float, tail_atol: float) -> None:
    """The tail is compared as a mass, which is how it is known."""
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert actual.log_probs.dtype == expected.log_probs.dtype
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=0, atol=atol)
    torch.testing.assert_close(actual.tail_log_prob.exp(), expected.tail_log_prob.exp(), rtol=0, atol=tail_atol)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "top_k", "threshold"), [(1, 64, 1e-5), (5, 3, 0.0), (40, 8, 1e-2), (130, 64, 1e-5)])
def test_top_log_probs_make_the_policy_of_their_logits(family, tail, size, top_k, threshold):
    logits = tensor(pairs(family, 50, size)[0]).view(5, 10, size)
    token_ids = torch.randint(size, (5, 10), generator=torch.Generator().manual_seed(0))
    settings = {"top_k": top_k, "mass_threshold": threshold, "tail": tail}
    expected = SparsePolicy.from_logits(logits, token_ids, **settings)
    entries = engine_entries(logits, token_ids, min(top_k, size))
    actual = SparsePolicy.from_top_log_probs(*entries, token_ids, vocab_size=size, **settings)
    assert (actual.tail, actual.mass_threshold, actual.vocab_size) == (tail, threshold, size)
    assert_same_policy(actual, expected, atol=1e-10, tail_atol=2e-12)

    in_float32 = SparsePolicy.from_top_log_probs(entries[0], entries[1].float(), token_ids, vocab_size=size, **settings)
    assert_same_policy(in_float32, expected.to(torch.float32), atol=1e-6 if tail == "bucket" else 2e-6, tail_atol=1e-6)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-30.0, -2.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    more=st.integers(0, 4),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.3, 0.9]),
    data=st.data(),
)
def test_top_log_probs_with_ties_in_any_order(logits, top_k, more, threshold, data):
    z = torch.tensor(logits, dtype=torch.float64)
    token_ids = torch.tensor(data.draw(st.integers(0, len(logits) - 1)))
    ids, log_probs = engine_entries(z, token_ids, min(top_k + more, len(logits)))
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
    expected = SparsePolicy.from_logits(z, token_ids, top_k=top_k, mass_threshold=threshold)
    actual = SparsePolicy.from_top_log_probs(
        ids[order], log_probs[order], token_ids, vocab_size=len(logits), top_k=top_k, mass_threshold=threshold
    )
    assert_same_policy(actual, expected, atol=1e-10, tail_atol=2e-12)


def test_fewer_entries_than_slots_leave_the_rest_to_the_tail():
    policy = SparsePolicy.from_top_log_probs(
        torch.tensor([7, 3]), torch.tensor([0.5, 0.25]).log(), torch.tensor(3), vocab_size=10, top_k=4
    )
    assert policy.token_ids.tolist() == [7, 3, -1, -1]
    torch.testing.assert_close(policy.outcomes.exp(), torch.tensor([0.5, 0.25, 0, 0, 0.25]))
    assert policy.log_prob(torch.tensor(3)).item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("vocab_size", [2, 3])
def test_the_tail_is_absent_only_where_the_entries_are_the_whole_vocabulary(vocab_size):
    log_probs = torch.tensor([0.7, 0.305]).log()  # rounded up: 1.005 in all
    policy = SparsePolicy.from_top_log_probs(
        torch.tensor([0, 1]), log_probs, torch.tensor(0), vocab_size=vocab_size, mass_threshold=0.0
    )
    torch.testing.assert_close(policy.log_probs[:2].exp(), torch.tensor([0.7, 0.305]) / 1.005)
    assert policy.tail_log_prob.item() == pytest.approx(-math.inf if vocab_size == 2 else math.log(1e-12), rel=1e-3)


def test_a_nearly_certain_token_keeps_its_small_tail():
    policy = SparsePolicy.from_top_log_probs(
        torch.tensor([4]), torch.tensor([-3e-9]), torch.tensor(4), vocab_size=10, mass_threshold=0.0
    )
    assert policy.tail_log_prob.item() == pytest.approx(math.log(3e-9), abs=1e-4)


def test_top_log_probs_of_no_distribution_make_nan():
    log_probs = torch.tensor([[-1.0, -2.0], [torch.nan, -2.0], [-1.0, -3.0]])
    policy = SparsePolicy.from_top_log_probs(
        torch.tensor([[0, 1]] * 3), log_probs, torch.tensor([0, 1, 1]), vocab_size=5
    )
    assert policy.tail_log_prob.isnan().tolist() == [False, True, False]
    assert policy.log_prob(torch.tensor([0, 1, 1])).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("token_ids must be among .* 2 ", {"token_ids": torch.tensor([0, 2])}),
        (r"token_ids must be in \[0, 9\)", {"token_ids": torch.tensor([0, 9])}),
        ("token_ids must be integers", {"token_ids": torch.tensor([0.0, 1.0])}),
        (r"top_token_ids must be \(2, M\)", {"top_token_ids": torch.tensor([[0, 1]])}),
        (r"top_token_ids must be \(2, M\)", {"top_token_ids": torch.tensor(0)}),
        (r"top_token_ids must be \(2, M\)", {"top_token_ids": torch.zeros(2, 0, dtype=torch.int64)}),
        ("top_token_ids must be integers", {"top_token_ids": torch.zeros(2, 2)}),
        (r"top_token_ids must be in \[0, 9\)", {"top_token_ids": torch.tensor([[0, 9], [0, 1]])}),
        (r"top_token_ids must be in \[0, 9\)", {"top_token_ids": torch.tensor([[0, -2], [0, 1]])}),
        ("top_token_ids must differ .* 1 twice", {"top_token_ids": torch.tensor([[0, 3], [1, 1]])}),
        (r"top_log_probs must be \(2, M\)", {"top_log_probs": torch.zeros(2, 3)}),
        ("top_log_probs must be floating", {"top_log_probs": torch.zeros(2, 2, dtype=torch.int64)}),
        ("top_log_probs must be log-probabilities", {"top_log_probs": torch.zeros(2, 2)}),
        ("top_k", {"top_k": 0}),
        ("mass_threshold", {"mass_threshold": 1.0}),
        ("tail", {"tail": "bukcet"}),
    ],
)
def test_bad_top_log_probs(argument, change):
    arguments: dict[str, Any] = {
        "top_token_ids": torch.tensor([[0, 3], [1, 0]]),
        "top_log_probs": torch.full((2, 2), -1.0),
        "token_ids": torch.tensor([0, 1]),
        "vocab_size": 9,
    }
    with pytest.raises(ValueError, match=argument):
        SparsePolicy.from_top_log_probs(**arguments | change)
