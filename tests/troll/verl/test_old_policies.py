"""Old policies as a field of verl's batches: where tokens stand, and what the batch's ways leave of the records."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.engine.utils import pad_packed_inputs
from verl.workers.utils.padding import no_padding_2_padding

from tests.troll.verl.actor import as_batch, nested, rollout
from tests.troll.verl.records import joined, records_of
from troll import PackedPolicy, SparsePolicy, capture, trust_region_step
from troll.verl.old_policies import OldPolicyStore, ResponseTokens, fill_unreported, reported_policies, response_places
from troll.verl.records import from_records, to_record, without_policies

VOCABULARY = 99


def batch_of(*lengths: tuple[int, int]) -> TensorDict:
    """Of the lengths of prompts and responses."""
    generator = torch.Generator().manual_seed(0)
    own, answers = (
        [torch.randint(0, VOCABULARY, (pair[part],), generator=generator) for pair in lengths] for part in (0, 1)
    )
    tensors = {
        "input_ids": nested(torch.cat(pair) for pair in zip(own, answers, strict=True)),
        "prompts": nested(own),
        "responses": nested(answers),
        "response_mask": nested(torch.ones_like(answer) for answer in answers),
    }
    return tu.get_tensordict(tensors, {"temperature": 1.0})


def captured(data: TensorDict, seed: int = 0, top_k: int = 6) -> SparsePolicy:
    tokens = data["responses"].values()
    logits = 3 * torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return capture(logits, tokens, top_k=top_k, mass_threshold=1e-2)


def lengths_of(data: TensorDict) -> list[int]:
    return data["responses"].offsets().diff().tolist()


def same(got: SparsePolicy, wanted: SparsePolicy) -> bool:
    names = ("token_ids", "log_probs", "tail_log_prob", "slot")
    return all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in names)


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6).filter(
    lambda pairs: sum(response for _, response in pairs) > 0
)


@given(lengths)
@settings(deadline=None, max_examples=40)
def test_places_are_those_of_verls_responses(pairs: list[tuple[int, int]]) -> None:
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


def test_padded_batches_are_refused() -> None:
    """Those of verl's legacy trainer."""
    data = as_batch(rollout(3))
    for name in ("prompts", "responses"):
        data[name] = data[name].to_padded_tensor(0)
    with pytest.raises(ValueError, match="nested tensors, as verl's v1 trainer"):
        response_places(data)


@given(lengths, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_captured_policies_are_found_in_any_order(pairs: list[tuple[int, int]], random: Random) -> None:
    data = batch_of(*pairs)
    policy, kept, edges = captured(data), OldPolicyStore(), data["responses"].offsets().tolist()
    parts, by_number = list(range(len(pairs))), [policy[start:end] for start, end in pairwise(edges)]
    random.shuffle(parts)
    for some in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):  # in micro-batches
        if some:
            kept.keep(joined([by_number[n] for n in some]), tu.index_select_tensor_dict(data, some))
    order = random.sample(parts, len(parts))
    found = kept.of(tu.index_select_tensor_dict(data, order)).unpack()
    # Equal sequences have one policy, of whichever was captured last.
    last = {sequence_of(data, number): number for number in parts}
    assert same(found, joined([by_number[last[sequence_of(data, number)]] for number in order]))


def sequence_of(data: TensorDict, number: int) -> tuple[str, str]:
    return str(data["prompts"].unbind()[number].tolist()), str(data["responses"].unbind()[number].tolist())


def test_same_tokens_after_another_prompt_are_another_sequence() -> None:
    """Prompts may differ in images, which their tokens do not show, or in where they end."""
    data = batch_of((2, 3), (2, 3))
    first = tu.index_select_tensor_dict(data, [0, 0])
    tu.assign_non_tensor_stack(first, "uid", ["a", "b"])
    policy, kept = captured(first), OldPolicyStore()
    assert not torch.equal(policy[:3].log_probs, policy[3:].log_probs)
    kept.keep(policy, first)
    found = kept.of(tu.index_select_tensor_dict(first, [1, 0])).unpack()
    assert same(found, joined([policy[3:], policy[:3]]))
    ids = first["input_ids"].unbind()[0]
    first["prompts"], first["responses"] = nested([ids[:1], ids[:2]]), nested([ids[1:], ids[2:]])
    with pytest.raises(ValueError, match=r"1 of 2 sequences .* no old policy in this process"):
        kept.of(first)


def reported(n: int = 3) -> tuple[TensorDict, list[SparsePolicy]]:
    """A batch with a record for each sequence, all tokens of which count, and the policies of each."""
    data = as_batch(rollout(n))
    data["response_mask"] = torch.ones_like(data["response_mask"])
    policy = captured(data)
    data["old_policies"] = nested(records_of(PackedPolicy.of(policy), lengths_of(data)))
    return data, [policy[start:end] for start, end in pairwise(data["responses"].offsets().tolist())]


def test_records_follow_their_sequences_through_verls_batches() -> None:
    data, policies = reported(12)

    def check(batch: TensorDict, order: list[int]) -> None:
        assert same(reported_policies(batch, 1).unpack(), joined([policies[number] for number in order]))

    order = torch.randperm(12, generator=torch.Generator().manual_seed(2)).tolist()
    chunks = tu.chunk_tensordict(tu.index_select_tensor_dict(data, order), 4)
    check(tu.concat_tensordict(chunks[::-1]), order[9:] + order[6:9] + order[3:6] + order[:3])
    micro_batches, indices = rearrange_micro_batches(data, max_token_len=20, same_micro_num_in_dp=False)
    assert len(micro_batches) > 1
    for micro_batch, index in zip(micro_batches, indices, strict=True):
        check(micro_batch, index)
    mini_batches = tu.make_iterator(data, 4, epochs=1, dataloader_kwargs={"shuffle": False})
    for mini_batch, at in zip(mini_batches, (0, 4, 8), strict=True):
        check(mini_batch, list(range(at, at + 4)))


def by_extra_fields(data: TensorDict, fields: list[dict[str, Tensor]]) -> TensorDict:
    """As a rollout reports them where no agent loop of this package takes them."""
    data = data.copy()
    del data["old_policies"]
    tu.assign_non_tensor_stack(data, "extra_fields", fields)
    return data


def test_reported_policies_are_read_from_extra_fields() -> None:
    data, policies = reported()
    data = by_extra_fields(data, [{"old_policies": record} for record in data["old_policies"].unbind()])
    assert same(reported_policies(data, 1).unpack(), joined(policies))


def with_records(data: TensorDict, records: list[Tensor]) -> TensorDict:
    data["old_policies"] = nested(records)
    return data


def sampled_at(temperature: float, record: Tensor) -> Tensor:
    return to_record(dataclasses.replace(from_records([record]), temperature=temperature))


#: What is wrong with a batch's records, and what is said of it.
WRONG: list[tuple[Callable[[TensorDict, list[Tensor]], TensorDict], str]] = [
    (
        lambda data, of: by_extra_fields(data, [{"old_policies": of[0]}, {}, {}]),
        "2 of .* came without .*anchor=rollout",
    ),
    (lambda data, of: data.exclude("old_policies"), "3 of the batch's sequences"),
    (lambda data, of: with_records(data, [of[0][:-3], *of[1:]]), r"record 0 .* damaged"),
    # Both together have as many tokens as before.
    (lambda data, of: with_records(data, [of[1], of[0], of[2]]), "not of the same rollout"),
    (lambda data, of: with_records(data, [of[0], of[1], of[1]]), "not of the same rollout"),
    (
        lambda data, of: with_records(data, [sampled_at(0.5, record) for record in of]),
        "sampled at temperature 0.5, and",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_records_of_another_batch_are_refused(
    change: Callable[[TensorDict, list[Tensor]], TensorDict], message: str
) -> None:
    data, _ = reported()
    with pytest.raises(ValueError, match=message):
        reported_policies(change(data, list(data["old_policies"].unbind())), 1)


def test_policies_of_another_kind_than_the_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="policies are whole, and those of the rollout's top_p and top_k are t"):
        reported_policies(reported()[0], 1, truncated=True)


def without_any(data: TensorDict) -> TensorDict:
    return with_records(data, [without_policies(length) for length in lengths_of(data)])


def test_truncated_batch_in_which_no_token_counts_needs_no_report() -> None:
    data, _ = reported()
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    found = reported_policies(without_any(data), VOCABULARY, truncated=True).unpack()
    step = trust_region_step(torch.randn(len(data["responses"].values()), VOCABULARY), found)
    assert step.log_ratio.isfinite().all() and step.kept_log_mass is not None


@pytest.mark.parametrize("real", [True, False])
def test_sequences_without_a_token_that_counts_need_no_report(real: bool) -> None:
    """verl fills batches up with copies of a sample, records included, whose response is one masked token."""
    data, policies = reported()
    first, _, third = data["old_policies"].unbind()
    masks = [mask * (real and number == 0) for number, mask in enumerate(data["response_mask"].unbind())]
    data["response_mask"] = nested(masks)
    found = reported_policies(with_records(data, [first, third, without_policies(1)]), VOCABULARY).unpack()
    counted = policies[0].shape[0] if real else 0
    assert not real or same(found[:counted], policies[0])
    assert found.log_prob[counted:].eq(0).all()
    assert found.vocab_size == VOCABULARY
    step = trust_region_step(torch.randn(len(data["responses"].values()), VOCABULARY), found)
    assert step.log_ratio[counted:].isfinite().all()


def with_gaps() -> tuple[TensorDict, SparsePolicy, Tensor, Tensor]:
    """A batch of whose tokens every third is a tool's, every fourth unreported, and one sequence altogether."""
    data, policies = reported(5)
    whole = joined(policies)
    number, lengths = torch.arange(whole.shape[0]), lengths_of(data)
    of_tool, unreported = number % 3 == 0, number % 4 == 0
    unreported |= torch.arange(5).repeat_interleave(torch.tensor(lengths)) == 2
    packed, gaps = PackedPolicy.of(whole), (of_tool | unreported).tolist()
    parts = from_records(
        [without_policies(1) if gap else to_record(packed[at : at + 1]) for at, gap in enumerate(gaps)]
    )
    records = records_of(parts, lengths)
    records[2] = without_policies(lengths[2])
    data["response_mask"] = nested(part.long() for part in (~of_tool).split(lengths))
    return with_records(data, records), whole, of_tool, unreported & ~of_tool


def test_tokens_that_an_engine_did_not_sample_need_no_report() -> None:
    data, whole, of_tool, unreported = with_gaps()
    found = reported_policies(data, 1).unpack()
    known = ~of_tool & ~unreported
    assert of_tool.any() and unreported.any() and known.any()
    assert same(found[known], whole[known])
    assert found.used[of_tool].sum(-1).eq(1).all() and found.log_prob[of_tool].eq(0).all()
    assert torch.equal(found.token_ids[of_tool, 0], data["responses"].values()[of_tool])
    assert not found.used[unreported].any()


@pytest.mark.parametrize("top_k", [3, 12], ids=["narrower", "wider"])
def test_unreported_tokens_that_count_get_the_networks_policy(top_k: int) -> None:
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


def test_batch_without_any_record_gets_the_networks_policies() -> None:
    data, _ = reported(2)
    own = captured(data, seed=3)
    found = reported_policies(without_any(data), VOCABULARY).unpack()
    assert same(fill_unreported(found, own), own)
