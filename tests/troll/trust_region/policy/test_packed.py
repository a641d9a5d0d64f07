"""PackedPolicy: whatever is done to the packed form and then unpacked is what is done to the padded form."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices
from torch import Tensor

import troll
from tests.troll.trust_region.policy.policies import (
    FIELDS,
    OTHER_CAPTURES,
    TEMPERATURES,
    assert_identical,
    by_pickle,
    by_torch,
    many_examples,
    padded,
    random_policy,
    waits,
)
from troll import PackedPolicy, SparsePolicy

TENSORS = (*FIELDS, "counts")


@st.composite
def policies(draw: st.DrawFn, min_dims: int = 0) -> SparsePolicy:
    shape = draw(st.just(()) if min_dims == 0 and draw(st.booleans()) else array_shapes(min_dims=1, min_side=0))
    top_k = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    low, high = draw(st.sampled_from([(0, top_k), (0, 0), (top_k, top_k), (1, 1), (0, 1)]))
    counts = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    dtype, truncated = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.booleans())
    temperature = draw(TEMPERATURES)
    return padded(counts, top_k, dtype=dtype, truncated=truncated, temperature=temperature, seed=seed)


def backwards(index: Any) -> bool:
    """Whether there is a negative step, which tensors do not take."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, slice) and part.step is not None and part.step < 0 for part in parts)


def assert_consistent(packed: PackedPolicy) -> None:
    """The tensors fit each other and are of the documented types."""
    assert packed.token_ids.dtype == packed.counts.dtype == packed.slot.dtype == torch.int32
    assert packed.log_probs.dtype == packed.tail_log_prob.dtype
    assert packed.token_ids.shape == packed.log_probs.shape == (int(packed.counts.sum()),)
    assert packed.shape == packed.counts.shape == packed.tail_log_prob.shape == packed.slot.shape
    assert packed.offsets.dtype == torch.int64 and packed.offsets[0] == 0
    assert torch.equal(packed.offsets.diff(), packed.counts.flatten().long())


def assert_packs(packed: PackedPolicy, policy: SparsePolicy) -> None:
    assert_consistent(packed)
    assert_identical(packed.unpack(), policy)
    assert packed.temperature == packed.unpack().temperature == policy.temperature
    # A position without slots has no sampled token.
    log_prob = policy.log_prob.masked_fill(~policy.used.any(-1), -torch.inf)
    torch.testing.assert_close(packed.log_prob, log_prob, rtol=0, atol=0, equal_nan=True)


def joined(policies: list[SparsePolicy], join: Callable[[list[Tensor]], Tensor]) -> SparsePolicy:
    tensors: dict[str, Any] = {name: join([getattr(policy, name) for policy in policies]) for name in FIELDS}
    return dataclasses.replace(policies[0], **tensors)


@many_examples
@given(policy=policies())
def test_unpack_undoes_packing(policy):
    assert_packs(PackedPolicy.of(policy), policy)


def test_nbytes_counts_used_slots():
    logits = torch.zeros(64, 1000)
    logits[:, 3] = 30.0
    policy = troll.capture(logits, torch.full((64,), 3), top_k=64, mass_threshold=1e-5)
    packed = PackedPolicy.of(policy)
    assert packed.nbytes == 64 * (4 + 4 + 4 + 4 + 4)  # an id, its log-probability, the count, the tail, the slot
    assert packed[:2].nbytes == 2 * 20
    storages = sum(value.untyped_storage().nbytes() for value in vars(packed).values() if torch.is_tensor(value))
    assert storages == packed.nbytes  # none of the padded form's memory is kept alive


@many_examples
@given(policy=policies(), data=st.data())
def test_index_by_integers_and_slices(policy, data):
    index = data.draw(basic_indices(tuple(policy.shape), allow_newaxis=True).filter(lambda index: not backwards(index)))
    assert_packs(PackedPolicy.of(policy)[index], policy[index])


@many_examples
@given(policy=policies(min_dims=1), data=st.data())
def test_slice_of_first_dimension_is_view(policy, data):
    bound = st.none() | st.integers(-7, 7)
    index = slice(data.draw(bound), data.draw(bound))
    packed = PackedPolicy.of(policy)
    part = packed[index]
    assert_packs(part, policy[index])
    for name in TENSORS:
        assert getattr(part, name).untyped_storage().data_ptr() == getattr(packed, name).untyped_storage().data_ptr()


@many_examples
@given(policy=policies(), data=st.data())
def test_index_by_mask(policy, data):
    dims = data.draw(st.integers(0, len(policy.shape)))
    seed = data.draw(st.integers(0, 2**16))
    mask = torch.rand(policy.shape[:dims], generator=torch.Generator().manual_seed(seed)) < 0.5
    assert_packs(PackedPolicy.of(policy)[mask], policy[mask])


@many_examples
@given(policy=policies(min_dims=1), data=st.data())
def test_index_by_tensor(policy, data):
    length = policy.shape[0]
    chosen = data.draw(st.lists(st.integers(-length, length - 1), max_size=8)) if length else []
    index = torch.tensor(chosen, dtype=torch.int64)
    assert_packs(PackedPolicy.of(policy)[index], policy[index])
    if chosen:
        assert_packs(PackedPolicy.of(policy)[index[0]], policy[index[0]])
        assert_packs(PackedPolicy.of(policy)[index.view(-1, 1), ...], policy[index.view(-1, 1), ...])


@pytest.mark.parametrize("index", [3, -4, (0, 4), torch.tensor([3])], ids=str)
def test_index_out_of_range_is_refused(index):
    with pytest.raises(IndexError):
        PackedPolicy.of(random_policy((3, 4)))[index]


@many_examples
@given(policy=policies(), dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]))
def test_to_moves_packed_policy(policy, dtype):
    packed = PackedPolicy.of(policy)
    assert_packs(packed.to("cpu", dtype, non_blocking=True), policy.to(dtype))
    assert_packs(packed.to(torch.device("cpu")), policy)
    assert_packs(packed.to(torch.empty(0, dtype=policy.log_probs.dtype)), policy)


@many_examples
@given(policy=policies(min_dims=1))
def test_unbind_gives_views(policy):
    packed = PackedPolicy.of(policy)
    entries = packed.unbind()
    assert len(entries) == policy.shape[0]
    for row, entry in enumerate(entries):
        assert_packs(entry, policy[row])
        for name in TENSORS:
            shared, whole = getattr(entry, name), getattr(packed, name)
            assert shared.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), name


@many_examples
@given(policy=policies(min_dims=1), data=st.data())
def test_stack_undoes_unbind(policy, data):
    length = policy.shape[0]
    if not length:
        return
    rows = data.draw(st.permutations(range(length)) | st.lists(st.integers(0, length - 1), min_size=1, max_size=6))
    entries = PackedPolicy.of(policy).unbind()
    assert_packs(PackedPolicy.stack([entries[row] for row in rows]), joined([policy[row] for row in rows], torch.stack))


@many_examples
@given(policy=policies(min_dims=1), data=st.data())
def test_cat_undoes_slicing(policy, data):
    cut = data.draw(st.integers(0, policy.shape[0]))
    packed = PackedPolicy.of(policy)
    assert_packs(PackedPolicy.cat([packed[cut:], packed[:cut]]), joined([policy[cut:], policy[:cut]], torch.cat))


@pytest.mark.parametrize(
    ("name", "other"),
    [*OTHER_CAPTURES, ("dtype", random_policy(dtype=torch.float64)), ("shape", random_policy((3, 5)))],
)
@pytest.mark.parametrize("join", [PackedPolicy.stack, PackedPolicy.cat])
def test_stack_and_cat_refuse_other_captures(join, name, other):
    with pytest.raises(ValueError, match=f"policies must share one {name}, got .+, .+"):
        join([PackedPolicy.of(random_policy()), PackedPolicy.of(other)])


@pytest.mark.parametrize("join", [PackedPolicy.stack, PackedPolicy.cat])
def test_stack_and_cat_refuse_nothing(join):
    with pytest.raises(ValueError, match="policies must hold at least one"):
        join([])


def test_stack_refuses_other_length():
    policy = PackedPolicy.of(random_policy((3, 4)))
    assert PackedPolicy.cat([policy, policy[:1]]).shape == (4, 4)
    with pytest.raises(ValueError, match=r"share one shape, got \(3, 4\), \(1, 4\)"):
        PackedPolicy.stack([policy, policy[:1]])


def test_unbind_and_cat_refuse_single_position():
    single = PackedPolicy.of(random_policy(()))
    with pytest.raises(ValueError, match="unbind"):
        single.unbind()
    with pytest.raises(ValueError, match="stack them"):
        PackedPolicy.cat([single, single])
    assert_packs(PackedPolicy.stack([single, single]), joined([random_policy(())] * 2, torch.stack))


@pytest.mark.parametrize("through", [by_pickle, by_torch, copy.deepcopy])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(policy=policies(min_dims=1))
def test_pickle_keeps_packed_policy(through, policy):
    packed = PackedPolicy.of(policy)
    assert_packs(through(packed), policy)
    for row, entry in enumerate(packed.unbind()):
        assert_packs(through(entry), policy[row])


@pytest.mark.parametrize("take", [lambda packed: packed[17], lambda packed: packed[17:18], lambda p: p.unbind()[17]])
def test_pickle_of_part_holds_only_that_part(take):
    packed = PackedPolicy.of(padded(torch.randint(1, 9, (64, 100)), 8))
    part = take(packed)
    assert len(pickle.dumps(part)) < part.nbytes + 3000 < packed.nbytes / 20
    copied = copy.deepcopy(part)
    for value in vars(copied).values():
        assert not torch.is_tensor(value) or value.untyped_storage().nbytes() == value.nbytes


def test_unpack_stack_and_cat_do_not_wait():
    """On the meta device there are no numbers: what would wait for one fails."""
    packed = PackedPolicy.of(random_policy((6, 4)))
    entries = [entry.to("meta") for entry in packed.unbind()]
    assert PackedPolicy.stack(entries).unpack().log_probs.shape == (6, 4, 8)
    joined = PackedPolicy.cat([packed.to("meta")] * 2)
    assert joined.unpack().token_ids.shape == (12, 4, 8)
    assert joined.log_prob.shape == (12, 4) and joined.nbytes == 2 * packed.nbytes


@pytest.mark.parametrize(
    ("take", "wait"),
    [
        (lambda packed, policy: PackedPolicy.of(policy), "nonzero"),
        (lambda packed, _: packed[torch.tensor([3, 0])], "_local_scalar_dense"),
        (lambda packed, _: packed[:, 2], "_local_scalar_dense"),
        (lambda packed, _: packed.unbind(), "tolist"),
        (lambda packed, _: packed[2:4], "tolist"),
        (lambda packed, _: packed[-1], "tolist"),
    ],
)
def test_packing_and_indexing_wait_once(take, wait):
    policy = random_policy((6, 4))
    packed = PackedPolicy.of(policy)
    with waits() as names:
        take(packed, policy)
    assert names == [wait]
