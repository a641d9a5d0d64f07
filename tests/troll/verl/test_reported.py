"""Records of what an engine reported: the core's policies, and one record of several turns."""

from typing import Any

import pytest
import torch
from torch import Tensor

from troll import PackedPolicy, SparsePolicy, Truncation, capture, capture_top, trust_region_step
from troll.verl import old_policy_record
from troll.verl.records import from_records, to_record, without_policies
from troll.verl.reported import Turn, response_record

V, K = 200, 16
SETTINGS: dict[str, Any] = {"vocab_size": V, "top_k": K, "mass_threshold": 1e-5}


def engine_rows(count: int, number: int = K, *, scale: float = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return rows_of(torch.log_softmax(scale * torch.randn(count, V, generator=generator), -1), number, generator)


def rows_of(log_probs: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    sampled = torch.multinomial(log_probs.exp(), 1, generator=generator)
    top = log_probs.topk(number)
    ids = torch.cat([sampled, top.indices], -1)
    return ids.int(), torch.cat([log_probs.gather(-1, sampled), top.values], -1)


def read(record: Tensor) -> SparsePolicy:
    return from_records([record]).unpack()


def check_same(got: SparsePolicy, wanted: SparsePolicy) -> None:
    assert torch.equal(got.token_ids, wanted.token_ids) and torch.equal(got.slot, wanted.slot)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got.tail_log_prob.exp(), wanted.tail_log_prob.exp(), rtol=1e-4, atol=1e-11)
    assert (got.vocab_size, got.top_k, got.mass_threshold) == (wanted.vocab_size, wanted.top_k, wanted.mass_threshold)


@pytest.mark.parametrize("scale", [0.5, 3, 8, 30])
@pytest.mark.parametrize("mass_threshold", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("number", [5, K, 3 * K])
def test_the_record_is_the_cores_policy(scale: float, mass_threshold: float, number: int) -> None:
    ids, log_probs = engine_rows(200, number, scale=scale)
    settings = SETTINGS | {"mass_threshold": mass_threshold}
    # Of an engine that says more than K, the core also drops what is beyond.
    expected = capture_top(ids[:, 1 : K + 1], log_probs[:, 1 : K + 1], ids[:, 0], log_probs[:, 0], **settings)
    got = read(old_policy_record(ids, log_probs, **settings))
    check_same(got, expected)
    assert torch.equal(got.token_ids.gather(-1, got.slot[:, None])[:, 0], ids[:, 0].long())
    assert len(set(got.used.sum(-1).tolist())) > 1 or scale < 8 or mass_threshold == 0


def test_the_whole_vocabulary_leaves_no_tail() -> None:
    ids, log_probs = engine_rows(4, V)
    got = read(old_policy_record(ids, log_probs, vocab_size=V, top_k=V + 1, mass_threshold=0.0))
    assert got.top_k == V and got.tail_log_prob.eq(-torch.inf).all()
    assert torch.equal(got.token_ids.gather(-1, got.slot[:, None]), ids[:, :1].long())


def test_rounding_that_exceeds_one_is_renormalised() -> None:
    values = torch.tensor([[0.6001, 0.6001, 0.4]]).log()
    got = read(old_policy_record(torch.tensor([[7, 7, 9]]), values, **SETTINGS))
    expected = capture_top(torch.tensor([[7, 9]]), values[:, 1:], torch.tensor([7]), values[:, 0], **SETTINGS)
    check_same(got, expected)
    torch.testing.assert_close(got.outcomes.exp().sum(), torch.tensor(1.0))


def test_equal_log_probs_are_in_the_order_of_their_ids() -> None:
    """As an engine in bf16 reports them; the sampled token outside the K largest keeps the last slot."""
    values = torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.1]]).log()
    ids = torch.tensor([[4, 50, 30, 20, 10]])
    got = read(old_policy_record(ids, values, vocab_size=V, top_k=4, mass_threshold=0.0))
    assert got.token_ids.tolist() == [[50, 20, 30, 4]] and got.slot.tolist() == [3]
    both = old_policy_record(ids.repeat(2, 1), values.repeat(2, 1), vocab_size=V, top_k=8, mass_threshold=0.0)
    assert read(both).token_ids[:, :5].tolist() == [[50, 20, 30, 10, 4]] * 2


def truncated_rows(truncation: Truncation, *, scale: float = 8) -> tuple[Tensor, Tensor, Tensor]:
    """As `engine_rows`, of an engine that samples after truncation, and the logits of the whole policies."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(200, V, generator=generator)
    whole = capture(logits, logits.argmax(-1), top_k=V, mass_threshold=0.0)
    kept = torch.full_like(logits, -torch.inf)
    kept.scatter_(-1, whole.token_ids, whole.log_probs.masked_fill(~truncation.kept(whole), -torch.inf))
    return *rows_of(torch.log_softmax(kept, -1), K, generator), logits


@pytest.mark.parametrize("truncation", [Truncation(top_p=0.8), Truncation(top_k=5), Truncation(top_k=9, top_p=0.95)])
def test_the_record_of_a_truncated_rollout_is_the_policy_on_what_it_kept(truncation: Truncation) -> None:
    ids, log_probs, logits = truncated_rows(truncation)
    got = read(old_policy_record(ids, log_probs, **SETTINGS, truncated=True))
    assert got.truncated and got.tail_log_prob.eq(-torch.inf).all()
    assert len(set(got.used.sum(-1).tolist())) > 1 or truncation.top_p == 1
    wanted = capture_top(ids[:, 1:], log_probs[:, 1:], ids[:, 0], log_probs[:, 0], **SETTINGS, truncated=True)
    check_same(got, wanted)
    of_logits = capture(logits, ids[:, 0].long(), truncation=truncation)
    at = of_logits.top_k
    assert torch.equal(got.token_ids[:, :at], of_logits.token_ids) and (got.token_ids[:, at:] == -1).all()
    torch.testing.assert_close(got.log_probs[:, :at], of_logits.log_probs, rtol=1e-5, atol=1e-5)
    step = trust_region_step(logits, got, 0.01)
    assert step.log_ratio.abs().max() < 1e-5 and not step.projected.any()


def test_a_kept_set_that_was_not_reported_whole_is_refused() -> None:
    ids, log_probs, _ = truncated_rows(Truncation(top_k=K), scale=0.5)
    assert read(old_policy_record(ids, log_probs, **SETTINGS, truncated=True)).used.all()
    with pytest.raises(ValueError, match=r"at most top_k=12, got up to 1[23] tokens, and some that add up to 0\."):
        old_policy_record(ids, log_probs, **SETTINGS | {"top_k": 12}, truncated=True)
    # All of the mass, and one token too many: the sampled one.
    ids, log_probs = torch.tensor([[4, 50, 30]]), torch.tensor([[0.004, 0.6, 0.396]]).log()
    with pytest.raises(ValueError, match="at most top_k=2, got up to 3 tokens, and some that add up to 1"):
        old_policy_record(ids, log_probs, **SETTINGS | {"top_k": 2}, truncated=True)


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"\(T, 1 \+ M\).*\(2, 3\) and \(2, 4\)"),
        (torch.ones(3), torch.ones(3), r"\(T, 1 \+ M\)"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.2, 0.2, 0.3]]).log(), "descending order"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.9, 0.9, 0.8]]).log(), "add up to 1.7"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.9, torch.nan, 0.1]]).log(), "add up to nan"),
        (torch.tensor([[1, V, 2]]), torch.tensor([[0.1, 0.8, 0.1]]).log(), rf"in \[0, {V}\), got {V}"),
    ],
)
def test_what_is_no_report_is_refused(ids: Tensor, log_probs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        old_policy_record(ids, log_probs, **SETTINGS)


def test_an_empty_completion_has_an_empty_record() -> None:
    record = old_policy_record(torch.empty(0, 1 + K), torch.empty(0, 1 + K), **SETTINGS)
    assert from_records([record]).shape == (0,)


PROMPT = [1, 2, 3]


def turn(prompt_ids: list[int], count: int, seed: int) -> tuple[Turn, PackedPolicy]:
    ids, log_probs = engine_rows(count, seed=seed)
    record = old_policy_record(ids, log_probs, **SETTINGS)
    return Turn(prompt_ids, ids[:, 0].tolist(), record), from_records([record])


def check_slots(record: Tensor, expected: list[PackedPolicy | int]) -> None:
    """The record is these policies one after the other; a number stands for so many positions without slots."""
    at, policy = 0, from_records([record])
    for part in expected:
        length = part if isinstance(part, int) else part.shape[0]
        got = policy[at : at + length]
        if isinstance(part, int):
            assert got.counts.eq(0).all()
        else:
            assert torch.equal(to_record(got), to_record(part))
        at += length
    assert at == policy.shape[0]


@pytest.mark.parametrize("tool", [[7, 8], []], ids=["a tool's answer", "interrupted"])
def test_turns_and_what_tools_wrote_between_them(tool: list[int]) -> None:
    first, policies = turn(PROMPT, 6, seed=1)
    assert response_record(PROMPT, first.token_ids, [first]) is first.record
    second, more = turn([*PROMPT, *first.token_ids, *tool], 4, seed=2)
    response, gap = [*first.token_ids, *tool, *second.token_ids], len(tool)
    for turns in ([first, second], [second, first]):
        check_slots(response_record(PROMPT, response, turns), [policies, gap, more])
    check_slots(response_record(PROMPT, [*response, 9], [first, second]), [policies, gap, more, 1])
    check_slots(response_record(PROMPT, response[:-3], [first, second]), [policies, gap, more[:1]])


def test_tokens_that_were_tokenised_anew_have_no_policy() -> None:
    first, policies = turn(PROMPT, 6, seed=1)
    second, _ = turn([*PROMPT, *first.token_ids], 4, seed=2)
    changed = [*first.token_ids[:4], V + 1, first.token_ids[5]]
    # What came after was sampled in another context.
    check_slots(response_record(PROMPT, changed + second.token_ids, [first, second]), [policies[:4], 6])


def test_response_record_keeps_no_policy_of_changed_tokens_in_a_response_of_one_turn() -> None:
    """The turn's whole record has as many positions as the response, and is still not that of its tokens."""
    only, policies = turn(PROMPT, 6, seed=1)
    changed = [*only.token_ids[:4], V + 1, only.token_ids[5]]
    check_slots(response_record(PROMPT, changed, [only]), [policies[:4], 2])
    late = Turn([*PROMPT, 7, 8], only.token_ids, only.record)
    check_slots(response_record(PROMPT, [7, 8, *only.token_ids[:4]], [late]), [2, policies[:4]])


def test_calls_for_something_else_do_not_count() -> None:
    other, _ = turn([5, 5, 5], 6, seed=1)
    assert torch.equal(response_record(PROMPT, other.token_ids, [other]), without_policies(6))
    assert torch.equal(response_record(PROMPT, [1, 2], []), without_policies(2))
    chosen, policies = turn(PROMPT, 6, seed=2)
    branch = Turn(PROMPT, [*chosen.token_ids[:2], V + 1], old_policy_record(*engine_rows(3), **SETTINGS))
    check_slots(response_record(PROMPT, chosen.token_ids, [branch, chosen]), [policies])
