"""Old policies as a field of verl's batches: where tokens stand, and what the batch's ways leave of the records."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches, restore_dynamic_batch
from verl.workers.engine.utils import pad_packed_inputs
from verl.workers.utils.padding import no_padding_2_padding

from tests.troll.verl.actor import as_batch, nested, rollout
from tests.troll.verl.records import records_of
from troll import PackedPolicy, SparsePolicy, capture, trust_region_step
from troll.verl.old_policies import Captured, ResponseTokens, fill_unreported, reported_policies, response_places
from troll.verl.records import from_records, to_record, without_policies

VOCABULARY = 99


def batch_of(*lengths: tuple[int, int], seed: int = 0) -> TensorDict:
    """Of the lengths of prompts and responses."""
    generator = torch.Generator().manual_seed(seed)
    own, answers = (
        [torch.randint(0, VOCABULARY, (pair[part],), generator=generator) for pair in lengths] for part in (0, 1)
    )
    return tu.get_tensordict(
        {
            "input_ids": nested(torch.cat(pair) for pair in zip(own, answers, strict=True)),
            "prompts": nested(own),
            "responses": nested(answers),
            "response_mask": nested(torch.ones_like(answer) for answer in answers),
        },
        {"temperature": 1.0},
    )


def captured(data: TensorDict, seed: int = 0, top_k: int = 6) -> SparsePolicy:
    tokens = data["responses"].values()
    logits = 3 * torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return capture(logits, tokens, top_k=top_k, mass_threshold=1e-2)


def as_field(policy: SparsePolicy, data: TensorDict) -> Tensor:
    """A record for each sequence, as agent loops put them into a batch."""
    return nested(records_of(PackedPolicy.of(policy), data["responses"].offsets().diff().tolist()))


def same(got: SparsePolicy, wanted: SparsePolicy) -> bool:
    names = ("token_ids", "log_probs", "tail_log_prob", "slot")
    return all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in names)


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6).filter(
    lambda pairs: sum(response for _, response in pairs) > 0
)


@given(lengths)
@settings(deadline=None, max_examples=60)
def test_places_are_those_from_which_verl_takes_the_responses(pairs: list[tuple[int, int]]) -> None:
    data = batch_of(*pairs)
    places = response_places(data)
    responses = [response for _, response in pairs]
    # verl's own way from positions to responses, of the places themselves.
    padded = no_padding_2_padding(torch.nested.nested_tensor_from_jagged(places, data["input_ids"].offsets()), data)
    numbers = torch.cat([row[:length] for row, length in zip(padded, responses, strict=True)])
    assert torch.equal(numbers, torch.arange(1, sum(responses) + 1))
    assert int((places > 0).sum()) == sum(responses)
    # What the logits at a place predict is the response token of its number.
    labels = torch.roll(data["input_ids"].values(), -1)
    tokens = ResponseTokens.of(places, sum(responses))
    assert torch.equal(labels[tokens.rows], data["responses"].values()[tokens.numbers])


@given(lengths, st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_processes_that_share_a_pack_have_every_token_once(pairs: list[tuple[int, int]], processes: int) -> None:
    data = batch_of(*pairs)
    places = response_places(data).unsqueeze(0)
    total = data["responses"].values().shape[0]
    padded, _ = pad_packed_inputs(places, None, -places.shape[-1] % processes)
    parts = [ResponseTokens.of(part, total) for part in padded[0].chunk(processes)]
    assert torch.equal(torch.cat([part.numbers for part in parts]).sort().values, torch.arange(total))
    for part in parts:
        values = torch.rand(len(part.rows))
        spread = part.on_all_positions(values, padded.shape[-1] // processes)
        assert torch.equal(spread[part.rows], values) and int((spread != 0).sum()) == int((values != 0).sum())


@given(lengths, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_captured_policies_are_found_in_any_order(pairs: list[tuple[int, int]], random: Random) -> None:
    data = batch_of(*pairs)
    policy, kept, edges = captured(data), Captured(), data["responses"].offsets().tolist()
    parts, by_number = list(range(len(pairs))), [policy[start:end] for start, end in pairwise(edges)]
    random.shuffle(parts)
    for some in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):  # in micro-batches
        if some:
            kept.keep(SparsePolicy.cat([by_number[n] for n in some]), tu.index_select_tensor_dict(data, some))
    order = random.sample(parts, len(parts))
    found = kept.of(tu.index_select_tensor_dict(data, order)).unpack()
    # Equal sequences have one policy, of whichever was captured last.
    last = {sequence_of(data, number): number for number in parts}
    assert same(found, SparsePolicy.cat([by_number[last[sequence_of(data, number)]] for number in order]))


def sequence_of(data: TensorDict, number: int) -> tuple[str, str]:
    return str(data["prompts"].unbind()[number].tolist()), str(data["responses"].unbind()[number].tolist())


def test_the_same_tokens_after_another_prompt_are_another_sequence() -> None:
    """Prompts may differ in images, which their tokens do not show, or in where they end."""
    data = batch_of((2, 3), (2, 3))
    first = tu.index_select_tensor_dict(data, [0, 0])
    tu.assign_non_tensor_stack(first, "uid", ["a", "b"])
    policy, kept = captured(first), Captured()
    assert not torch.equal(policy[:3].log_probs, policy[3:].log_probs)
    kept.keep(policy, first)
    found = kept.of(tu.index_select_tensor_dict(first, [1, 0])).unpack()
    assert same(found, SparsePolicy.cat([policy[3:], policy[:3]]))
    ids = first["input_ids"].unbind()[0]
    first["prompts"], first["responses"] = nested([ids[:1], ids[:2]]), nested([ids[1:], ids[2:]])
    with pytest.raises(ValueError, match="1 of 2 sequences"):
        kept.of(first)


@given(lengths)
@settings(deadline=None, max_examples=40)
def test_a_field_gives_back_the_policy(pairs: list[tuple[int, int]]) -> None:
    data = batch_of(*pairs)
    policy = captured(data)
    data["old_policies"] = as_field(policy, data)
    assert same(reported_policies(data, 1).unpack(), policy)


def with_field(n: int = 12) -> tuple[TensorDict, list[SparsePolicy]]:
    """A batch, all tokens of which count, and the policy of each of its sequences."""
    data = as_batch(rollout(n))
    data["response_mask"] = torch.ones_like(data["response_mask"])
    policy = captured(data)
    data["old_policies"] = as_field(policy, data)
    return data, [policy[start:end] for start, end in pairwise(data["responses"].offsets().tolist())]


def check_aligned(data: TensorDict, order: list[int], policies: list[SparsePolicy]) -> None:
    """Asserts that the batch's records are those of its sequences, the original numbers of which are given."""
    assert same(reported_policies(data, 1).unpack(), SparsePolicy.cat([policies[number] for number in order]))


def test_records_follow_their_sequences_through_verls_batches() -> None:
    data, policies = with_field()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2)).tolist()
    selected = tu.index_select_tensor_dict(data, order)
    check_aligned(selected, order, policies)
    chunks = tu.chunk_tensordict(selected, 4)
    for number, chunk in enumerate(chunks):
        check_aligned(chunk, order[3 * number : 3 * number + 3], policies)
    check_aligned(tu.concat_tensordict(chunks[::-1]), order[9:] + order[6:9] + order[3:6] + order[:3], policies)
    micro_batches, indices = rearrange_micro_batches(data, max_token_len=20, same_micro_num_in_dp=False)
    assert len(micro_batches) > 1
    for micro_batch, index in zip(micro_batches, indices, strict=True):
        check_aligned(micro_batch, index, policies)
    restored = data.copy()
    outputs = [record for micro_batch in micro_batches for record in micro_batch["old_policies"].unbind()]
    restored["old_policies"] = restore_dynamic_batch(nested(outputs), indices)
    check_aligned(restored, list(range(12)), policies)
    for mini_batch, at in zip(
        tu.make_iterator(data, 4, epochs=1, dataloader_kwargs={"shuffle": False}), (0, 4, 8), strict=True
    ):
        check_aligned(mini_batch, list(range(at, at + 4)), policies)


def extra_fields(data: TensorDict, fields: list[dict[str, Tensor]]) -> TensorDict:
    """As a rollout reports them where no agent loop of this package takes them."""
    data = data.copy()
    del data["old_policies"]
    tu.assign_non_tensor_stack(data, "extra_fields", fields)
    return data


def test_reported_policies_are_read_of_the_rollouts_fields() -> None:
    data, policies = with_field(3)
    by_fields = extra_fields(data, [{"old_policies": record} for record in data["old_policies"].unbind()])
    for batch in (data, by_fields):
        assert same(reported_policies(batch, 1).unpack(), SparsePolicy.cat(policies))


def test_a_batch_that_nobody_reported_of_is_refused() -> None:
    data, _ = with_field(3)
    first, *_ = data["old_policies"].unbind()
    with pytest.raises(ValueError, match=r"2 of the batch's sequences came without .*anchor=rollout"):
        reported_policies(extra_fields(data, [{"old_policies": first}, {}, {}]), 1)
    del data["old_policies"]
    with pytest.raises(ValueError, match="3 of the batch's sequences"):
        reported_policies(data, 1)


def test_policies_of_another_kind_than_the_rollouts_are_refused() -> None:
    data, _ = with_field(3)
    with pytest.raises(ValueError, match="old policies are whole, and those of the rollout's top_p and top_k are t"):
        reported_policies(data, 1, truncated=True)


def with_mask(data: TensorDict, masks: Sequence[Tensor]) -> TensorDict:
    data = data.copy()
    data["response_mask"] = nested(masks)
    return data


def test_a_truncated_batch_in_which_no_token_counts_needs_no_report() -> None:
    data, _ = with_field(3)
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    data["old_policies"] = nested(map(without_policies, data["responses"].offsets().diff().tolist()))
    found = reported_policies(data, VOCABULARY, truncated=True).unpack()
    step = trust_region_step(torch.randn(len(data["responses"].values()), VOCABULARY), found)
    assert step.log_ratio.isfinite().all() and step.kept_log_mass is not None


@pytest.mark.parametrize("real", [True, False])
def test_sequences_without_a_token_that_counts_need_no_report(real: bool) -> None:
    """verl fills batches up with copies of a sample, records included, whose response is one masked token."""
    data, policies = with_field(3)
    first, _, third = data["old_policies"].unbind()
    masks = [mask.clone() for mask in data["response_mask"].unbind()]
    for mask in masks if not real else masks[1:]:
        mask.zero_()
    data = with_mask(data, masks)
    data["old_policies"] = nested([first, third, without_policies(1)])
    found = reported_policies(data, VOCABULARY).unpack()
    tokens = data["responses"].values()
    counted = policies[0].shape[0] if real else 0
    if real:
        assert same(found[:counted], policies[0])
    assert found.log_prob[counted:].eq(0).all()
    assert found.vocab_size == VOCABULARY
    step = trust_region_step(torch.randn(len(tokens), VOCABULARY), found)
    assert step.log_ratio[counted:].isfinite().all()


def with_gaps() -> tuple[TensorDict, SparsePolicy, Tensor, Tensor]:
    """A batch of whose tokens every third is a tool's, every fourth unreported, and one sequence altogether."""
    data, policies = with_field(5)
    whole = SparsePolicy.cat(policies)
    number = torch.arange(whole.shape[0])
    lengths = data["responses"].offsets().diff().tolist()
    of_tool, unreported = number % 3 == 0, number % 4 == 0
    unreported |= torch.arange(5).repeat_interleave(torch.tensor(lengths)) == 2
    packed, gaps = PackedPolicy.of(whole), (of_tool | unreported).tolist()
    parts = from_records(
        [without_policies(1) if gap else to_record(packed[at : at + 1]) for at, gap in enumerate(gaps)]
    )
    records = records_of(parts, lengths)
    records[2] = without_policies(lengths[2])
    data = with_mask(data, [part.long() for part in (~of_tool).split(lengths)])
    data["old_policies"] = nested(records)
    return data, whole, of_tool, unreported & ~of_tool


def test_tokens_that_an_engine_did_not_sample_need_no_report() -> None:
    data, whole, of_tool, unreported = with_gaps()
    found = reported_policies(data, 1).unpack()
    known = ~of_tool & ~unreported
    assert of_tool.any() and unreported.any() and known.any()
    assert same(found[known], whole[known])
    assert found.used[of_tool].sum(-1).eq(1).all() and found.log_prob[of_tool].eq(0).all()
    assert torch.equal(found.token_ids[of_tool, 0], data["responses"].values()[of_tool])
    assert not found.used[unreported].any()


@pytest.mark.parametrize("top_k", [3, 6, 12], ids=["narrower", "as wide", "wider"])
def test_unreported_tokens_that_count_get_the_networks_own_policy(top_k: int) -> None:
    data, whole, of_tool, unreported = with_gaps()
    tokens = data["responses"].values()
    logits = torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(5), requires_grad=True)
    own = capture(logits, tokens, top_k=top_k)
    old = fill_unreported(reported_policies(data, 1).unpack(), own)
    step = trust_region_step(logits, old, kl_bound=1e-3)
    # The trust region is around the network itself: nothing is projected, and the gradient is the plain one.
    assert not step.projected[unreported].any() and step.log_ratio[unreported].abs().max() < 1e-5
    (gradient,) = torch.autograd.grad(step.log_ratio[unreported].sum(), logits, retain_graph=True)
    plain = torch.nn.functional.one_hot(tokens, VOCABULARY) - logits.softmax(-1)
    torch.testing.assert_close(gradient[unreported], plain[unreported], rtol=1e-4, atol=1e-5)
    # And around what was reported, where it was.
    known = ~of_tool & ~unreported
    only = trust_region_step(logits[known], whole[known], kl_bound=1e-3)
    torch.testing.assert_close(step.log_ratio[known], only.log_ratio)
    assert step.projected[known].any()


def test_a_micro_batch_without_any_record_is_all_the_networks_own() -> None:
    data, _ = with_field(2)
    data["old_policies"] = nested(map(without_policies, data["responses"].offsets().diff().tolist()))
    own = captured(data, seed=3)
    found = reported_policies(data, VOCABULARY).unpack()
    assert same(fill_unreported(found, own), own)
