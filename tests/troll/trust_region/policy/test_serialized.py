"""Records of old policies: what comes back is what was written, bit for bit, or an error says what happened to it."""

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
from troll import PackedPolicy
from troll.trust_region.policy.serialized import HEADER, CorruptPolicy, from_records, to_records

LENGTHS = (3, 0, 1, 4)
BAD_LENGTHS = [[3, 4], [9], [-1, 9], [], [3, 5, 1]]


def captured(lengths: tuple[int, ...] = LENGTHS, **keywords: Any) -> PackedPolicy:
    return PackedPolicy.of(random_policy((sum(lengths),), **keywords))


def records() -> list[torch.Tensor]:
    return to_records(captured(), LENGTHS)


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
    written = to_records(policy, lengths)
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
    written = to_records(policy, lengths)
    expected = PackedPolicy.cat([policy[starts[row] : starts[row] + lengths[row]] for row in chosen])
    assert_same(from_records([written[row] for row in chosen]), expected)


def test_no_sequences_are_no_records():
    assert to_records(captured(()), []) == []


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
    assert 4 * HEADER == 52


def test_a_record_has_a_storage_of_its_own():
    lengths = (50,) * 64
    written = to_records(captured(lengths), lengths)
    for record in written:
        assert record.dtype == torch.int32 and record.ndim == 1 and record.is_contiguous()
        assert record.untyped_storage().nbytes() == record.nbytes
    assert len(pickle.dumps(written[17])) < written[17].nbytes + 1000


@pytest.mark.parametrize("convert", [lambda: captured(), lambda: records()], ids=["to_records", "from_records"])
def test_the_device_is_waited_for_once(convert):
    given = convert()
    with waits() as names:
        to_records(given, LENGTHS) if isinstance(given, PackedPolicy) else from_records(given)
    assert names == ["tolist"]


def test_the_layout_stays_what_it_is():
    """Buffers on disk and processes of other versions read it: another layout needs another number."""
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
    header, checksum = [0x54524C04, 20, 1, 2, 3, 9, 0, 1070596096], [2027915167, 1070638498]
    words = [1, 0, 1071644672, 2, -1073741824, 1, 7, 2, -1090519040, -1077936128]
    (record,) = to_records(policy, [1])
    assert record.tolist() == [*header, *checksum, *words]
    assert checksum == splitmix_checksum([*header, 0, 0, *words])


def splitmix_checksum(words: list[int]) -> list[int]:
    """The checksum in plain integers."""
    total, modulus = 0, 2**64
    for place, word in enumerate(words):
        value = (place << 32) | (word % 2**32)
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % modulus
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % modulus
        total += (value ^ (value >> 31)) * (place not in (8, 9))
    halves = total % 2**32, total // 2**32 % 2**32
    return [half - 2**32 if half >= 2**31 else half for half in halves]


def test_every_flipped_bit_is_noticed():
    first, small = to_records(captured((2, 2), size=6, top_k=3), [2, 2])
    for word in range(small.numel()):
        for bit in range(32):
            damaged = small.clone()
            damaged[word] ^= 1 << bit if bit < 31 else -(2**31)
            with pytest.raises(CorruptPolicy, match="record 1 "):
                from_records([first, damaged])


def test_every_truncation_is_noticed():
    written = records()
    whole = written[3]
    for size in range(whole.numel()):
        says = f"says it has {whole.numel()} words and has {size}" if size >= HEADER else "is truncated"
        with pytest.raises(CorruptPolicy, match=f"record 3 {says}"):
            from_records([*written[:3], whole[:size]])
    with pytest.raises(CorruptPolicy, match=f"and has {whole.numel() + 1}"):
        from_records([*written[:3], torch.cat([whole, whole[-1:]])])


def test_every_two_swapped_words_are_noticed():
    (record,) = to_records(captured((2,), size=6, top_k=3), [2])
    for a in range(record.numel()):
        for b in range(a):
            if record[a] != record[b]:
                swapped = record.clone()
                swapped[[a, b]] = record[[b, a]]
                with pytest.raises(CorruptPolicy, match="record 0 "):
                    from_records([swapped])


def test_words_of_one_record_in_another_are_noticed():
    """The records that a buffer overwrites in part are of one size."""
    a, b = to_records(captured((4, 4), top_k=8, mass_threshold=0.0), [4, 4])
    assert a.numel() == b.numel()
    for cut in range(1, a.numel()):
        mixed = torch.cat([a[:cut], b[cut:]])
        if not torch.equal(mixed, a) and not torch.equal(mixed, b):
            with pytest.raises(CorruptPolicy, match="record 0 was damaged"):
                from_records([mixed])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (torch.zeros(40, dtype=torch.int32), "is not a record of old policies: its first word is 0"),
        (torch.zeros(0, dtype=torch.int32), "is truncated: it has 0 words, and a header has 13"),
        (torch.zeros(40), "is not a record of old policies: expected 1-D torch.int32, got 1-D torch.float32"),
        (torch.zeros(4, 10, dtype=torch.int32), "is not a record .+, got 2-D torch.int32"),
        (torch.tensor(3, dtype=torch.int32), "is not a record .+, got 0-D torch.int32"),
    ],
)
def test_what_is_no_record_is_refused(record, says):
    with pytest.raises(CorruptPolicy, match=f"record 1 {says}"):
        from_records([records()[0], record])


def test_another_layout_is_refused():
    record = records()[0]
    record[0] += 1
    with pytest.raises(CorruptPolicy, match="record 0 has layout 5, and this version of troll reads 4"):
        from_records([record])


@pytest.mark.parametrize(("name", "other"), OTHER_CAPTURES)
def test_records_of_two_captures_are_refused(name, other):
    others = to_records(PackedPolicy.of(other.view((12,))), [12])
    with pytest.raises(ValueError, match=f"records must share one {name}, got .+, .+") as refused:
        from_records([*records(), *others])
    assert not isinstance(refused.value, CorruptPolicy)


def test_nothing_to_read_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        from_records([])


@pytest.mark.parametrize(
    ("change", "lengths", "message"),
    [
        *((lambda policy: policy, lengths, r"lengths must be .+ for shape \(8,\)") for lengths in BAD_LENGTHS),
        (lambda _: PackedPolicy.of(random_policy((3, 4))), [12], r"for shape \(3, 4\)"),
        (lambda policy: policy.to(torch.float64), LENGTHS, "policy must have float32 log_probs, got torch"),
        (lambda policy: policy.to(torch.bfloat16), LENGTHS, "policy must have float32 log_probs, got torch"),
        (
            lambda policy: dataclasses.replace(policy, counts=policy.counts + 1),
            LENGTHS,
            r"policy has counts of .+ slots in all, and .+ slots",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(change, lengths, message):
    with pytest.raises(ValueError, match=message):
        to_records(change(captured()), lengths)
