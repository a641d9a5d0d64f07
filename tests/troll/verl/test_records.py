"""Records of old policies: what comes back is what was written, bit for bit, or an error says what it is not."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.troll.trust_region.policy.policies import (
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
from tests.troll.verl.records import records_of
from troll import PackedPolicy
from troll.verl.records import HEADER, from_records, to_record, without_policies

LENGTHS = (3, 0, 1, 4)


def captured(lengths: tuple[int, ...] = LENGTHS, **keywords: Any) -> PackedPolicy:
    return PackedPolicy.of(random_policy((sum(lengths),), **keywords))


def records() -> list[torch.Tensor]:
    return records_of(captured(), LENGTHS)


def assert_same(a: PackedPolicy, b: PackedPolicy) -> None:
    assert_identical(a.unpack(), b.unpack())
    assert a.temperature == b.temperature
    for name in ("counts", "token_ids", "slot"):
        assert getattr(a, name).dtype == getattr(b, name).dtype, name


@st.composite
def batches(draw: st.DrawFn) -> tuple[PackedPolicy, list[int]]:
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    top_k, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**16))
    low, high = draw(st.sampled_from([(0, top_k), (0, 0), (top_k, top_k), (0, 1)]))
    counts = torch.randint(low, high + 1, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    policy = PackedPolicy.of(padded(counts, top_k, truncated=draw(st.booleans()), seed=seed))
    policy = dataclasses.replace(policy, temperature=draw(TEMPERATURES))
    threshold = draw(st.floats(0, 1, exclude_max=True))
    return dataclasses.replace(policy, mass_threshold=threshold), lengths


@many_examples
@given(batch=batches())
def test_a_round_trip_is_exact(batch):
    policy, lengths = batch
    written = records_of(policy, lengths)
    assert len(written) == len(lengths)
    if written:
        assert_same(from_records(written), policy)


@many_examples
@given(batch=batches(), data=st.data())
def test_any_records_of_a_capture_in_any_order(batch, data):
    policy, lengths = batch
    if not lengths:
        return
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    written = records_of(policy, lengths)
    expected = PackedPolicy.cat([policy[starts[row] : starts[row] + lengths[row]] for row in chosen])
    assert_same(from_records([written[row] for row in chosen]), expected)


def by_nested(written: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.nested.as_nested_tensor(written, layout=torch.jagged).unbind())


@pytest.mark.parametrize("through", [by_pickle, by_torch, by_nested])
def test_records_survive_what_carries_tensors(through: Callable[[list[torch.Tensor]], list[torch.Tensor]]):
    assert_same(from_records(through(records())), captured())


def test_size():
    policy = captured()
    positions, written = 0, records()
    for length, record in zip(LENGTHS, written, strict=True):
        part = policy[positions : positions + length]
        assert record.nbytes == 4 * HEADER + 12 * length + 8 * part.token_ids.numel()
        positions += length
    assert 4 * HEADER == 40


def test_a_record_has_a_storage_of_its_own():
    lengths = (50,) * 64
    written = records_of(captured(lengths), lengths)
    for record in written:
        assert record.dtype == torch.int32 and record.ndim == 1 and record.is_contiguous()
        assert record.untyped_storage().nbytes() == record.nbytes
    assert len(pickle.dumps(written[17])) < written[17].nbytes + 1000


def test_the_device_is_waited_for_once_by_who_reads_and_not_by_who_writes():
    policy, written = captured(), records()
    with waits() as names:
        to_record(policy)
    assert not names
    with waits() as names:
        from_records(written)
    assert names == ["tolist"]


def test_the_layout_stays_what_it_is():
    """Processes of other versions read it: another layout needs another number."""
    policy = PackedPolicy(
        token_ids=torch.tensor([7, 2], dtype=torch.int32),
        log_probs=torch.tensor([-0.5, -1.5]),
        counts=torch.tensor([2], dtype=torch.int32),
        tail_log_prob=torch.tensor([-2.0]),
        slot=torch.tensor([1], dtype=torch.int32),
        top_k=3,
        vocab_size=9,
        mass_threshold=0.25,
        truncated=True,
        temperature=0.5,
    )
    header = [0x54524C05, 1, 2, 3, 9, 0, 1070596096, 1, 0, 1071644672]
    assert to_record(policy).tolist() == [*header, 2, -1073741824, 1, 7, 2, -1090519040, -1077936128]


def test_truncated_policies_of_unequal_slots_are_joined():
    wide, narrow = (dataclasses.replace(captured((6,), top_k=k), truncated=True) for k in (7, 2))
    joined = from_records([to_record(narrow), to_record(wide)])
    assert joined.top_k == 7
    assert_same(joined, PackedPolicy.cat([narrow, wide]))


@pytest.mark.parametrize("truncated", [False, True])
def test_tokens_without_a_policy_go_with_any_capture(truncated: bool):
    policy = dataclasses.replace(captured((2, 3)), truncated=truncated, temperature=0.5)
    first, second = records_of(policy, (2, 3))
    found = from_records([without_policies(1), first, without_policies(0), second, without_policies(2)])
    assert found.counts.tolist() == [0, *policy.counts.tolist(), 0, 0]
    assert_same(found[1:6], policy)
    assert from_records([without_policies(3)]).shape == (3,)


def test_a_record_of_another_length_is_refused():
    first, whole = records_of(captured((2, 4)), [2, 4])
    lengths = [*range(HEADER, whole.numel()), whole.numel() + 1]
    for length in lengths:
        with pytest.raises(
            ValueError, match=f"record 1 must have {whole.numel()} words .+, got {length}: it was damaged"
        ):
            from_records([first, torch.cat([whole, whole[-1:]])[:length]])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (torch.zeros(40, dtype=torch.int32), r"must begin with \d+, as this version of troll writes it, got 0"),
        (torch.zeros(0, dtype=torch.int32), "must be 1-D torch.int32 of at least 10 words, got 1-D torch.int32 of 0"),
        (torch.zeros(40), "must be 1-D torch.int32 .+, got 1-D torch.float32"),
        (torch.zeros(4, 10, dtype=torch.int32), "must be 1-D torch.int32 .+, got 2-D torch.int32"),
        (torch.tensor(3, dtype=torch.int32), "must be 1-D torch.int32 .+, got 0-D torch.int32"),
    ],
)
def test_what_is_no_record_is_refused(record, says):
    with pytest.raises(ValueError, match=f"record 1 {says}"):
        from_records([records()[0], record])


def test_another_layout_is_refused():
    record = records()[0]
    record[0] += 1
    with pytest.raises(ValueError, match=r"record 0 must begin with .+ or is of another version"):
        from_records([record])


@pytest.mark.parametrize(("name", "other"), OTHER_CAPTURES)
def test_records_of_two_captures_are_refused(name, other):
    others = records_of(PackedPolicy.of(other.view((12,))), [12])
    with pytest.raises(ValueError, match=f"records must share one {name}, got .+, .+"):
        from_records([*records(), *others])


def test_nothing_to_read_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        from_records([])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PackedPolicy.of(random_policy((3, 4))), r"policy must have the shape \(T,\) of one sequence, got \(3, 4\)"),
        (captured().to(torch.float64), "policy must have float32 log_probs, got torch"),
        (captured().to(torch.bfloat16), "policy must have float32 log_probs, got torch"),
    ],
)
def test_what_cannot_be_written_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        to_record(policy)
