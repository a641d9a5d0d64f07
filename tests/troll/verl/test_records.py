"""Records of old policies: what comes back is what was written, bit for bit, or an error says what it is not."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.troll.trust_region.policy.policies import (
    OTHER_CAPTURES,
    TEMPERATURES,
    assert_identical,
    many_examples,
    padded,
    random_policy,
    waits,
)
from tests.troll.verl.records import records_of
from troll import PackedPolicy
from troll.verl.records import HEADER, from_records, to_record, without_policies


def captured(positions: int, **options: Any) -> PackedPolicy:
    return PackedPolicy.of(random_policy((positions,), **options))


def assert_same(a: PackedPolicy, b: PackedPolicy) -> None:
    assert_identical(a.unpack(), b.unpack())
    assert a.temperature == b.temperature
    for name in ("counts", "token_ids", "slot"):
        assert getattr(a, name).dtype == getattr(b, name).dtype, name


@st.composite
def batches(draw: st.DrawFn) -> tuple[PackedPolicy, list[int]]:
    """Policies, and the lengths of the sequences to which their positions belong."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    top_k, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**16))
    low, high = draw(st.sampled_from([(0, top_k), (0, 0), (top_k, top_k), (0, 1)]))
    counts = torch.randint(low, high + 1, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    policy = PackedPolicy.of(padded(counts, top_k, truncated=draw(st.booleans()), seed=seed))
    policy = dataclasses.replace(policy, temperature=draw(TEMPERATURES))
    threshold = draw(st.floats(0, 1, exclude_max=True))
    return dataclasses.replace(policy, mass_threshold=threshold), lengths


@many_examples
@given(batch=batches(), data=st.data())
def test_round_trip_is_exact_in_any_order(batch, data):
    policy, lengths = batch
    rows = st.integers(0, len(lengths) - 1)
    chosen = data.draw(st.permutations(range(len(lengths))) | st.lists(rows, min_size=1, max_size=8))
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    written = records_of(policy, lengths)
    expected = PackedPolicy.cat([policy[starts[row] : starts[row] + lengths[row]] for row in chosen])
    assert_same(from_records([written[row] for row in chosen]), expected)


def test_record_has_storage_of_its_own():
    records = records_of(captured(64 * 50), (50,) * 64)
    assert all(record.untyped_storage().nbytes() == record.nbytes for record in records)
    assert len(pickle.dumps(records[17])) < records[17].nbytes + 1000


def test_only_reading_waits_for_the_device_once():
    policy, records = captured(8), records_of(captured(8), (3, 0, 1, 4))
    with waits() as names:
        to_record(policy)
    assert not names
    with waits() as names:
        from_records(records)
    assert names == ["tolist"]


def test_layout_stays_what_it_is():
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
    wide, narrow = (dataclasses.replace(captured(6, top_k=k), truncated=True) for k in (7, 2))
    joined = from_records([to_record(narrow), to_record(wide)])
    assert joined.top_k == 7
    assert_same(joined, PackedPolicy.cat([narrow, wide]))


@pytest.mark.parametrize("truncated", [False, True])
def test_tokens_without_policies_go_with_any_capture(truncated: bool):
    policy = dataclasses.replace(captured(5), truncated=truncated, temperature=0.5)
    first, second = records_of(policy, (2, 3))
    found = from_records([without_policies(1), first, without_policies(0), second, without_policies(2)])
    assert found.counts.tolist() == [0, *policy.counts.tolist(), 0, 0]
    assert_same(found[1:6], policy)


RECORD = to_record(captured(4))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "at least one record"),
        ([RECORD, RECORD[: HEADER - 1]], "record 1 must be 1-D torch.int32 of at least 10 words, got .* of 9"),
        ([RECORD, RECORD.float()], "record 1 .* got 1-D torch.float32"),
        ([RECORD, RECORD[None]], "record 1 .* got 2-D"),
        ([RECORD + 1], r"record 0 must begin with .+ another version"),
        ([RECORD, RECORD[:HEADER]], "record 1 .* damaged"),
        ([RECORD, RECORD[:-1]], "record 1 .* damaged"),
        ([RECORD, torch.cat([RECORD, RECORD[-1:]])], "record 1 .* damaged"),
    ],
)
def test_what_is_no_record_is_refused(records, says):
    with pytest.raises(ValueError, match=says):
        from_records(records)


@pytest.mark.parametrize(("name", "other"), OTHER_CAPTURES)
def test_records_of_two_captures_are_refused(name, other):
    with pytest.raises(ValueError, match=f"policies must share one {name}"):
        from_records([RECORD, to_record(PackedPolicy.of(other.view((12,))))])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PackedPolicy.of(random_policy((3, 4))), r"the shape \(T,\) of one sequence, got \(3, 4\)"),
        (captured(3).to(torch.float64), "float32 log_probs"),
    ],
)
def test_what_cannot_be_written_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        to_record(policy)
