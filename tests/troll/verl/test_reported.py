"""Records of what an engine reported: the core's policies, and one record of several turns."""

from typing import Any

import pytest
import torch
from torch import Tensor

from troll import PackedPolicy, SparsePolicy, Truncation, capture, capture_top, trust_region_step
from troll.verl import old_policy_record
from troll.verl.records import from_records, to_record
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


def read(ids: Tensor, log_probs: Tensor, **settings: Any) -> SparsePolicy:
    return from_records([old_policy_record(ids, log_probs, **SETTINGS | settings)]).unpack()


def check_equals_the_core(got: SparsePolicy, ids: Tensor, log_probs: Tensor, **settings: Any) -> None:
    # Of an engine that says more than K, the core also drops what is beyond.
    top = slice(1, 1 + K)
    wanted = capture_top(ids[:, top], log_probs[:, top], ids[:, 0], log_probs[:, 0], **SETTINGS | settings)
    assert torch.equal(got.token_ids, wanted.token_ids) and torch.equal(got.slot, wanted.slot)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got.tail_log_prob.exp(), wanted.tail_log_prob.exp(), rtol=1e-4, atol=1e-11)
    assert (got.vocab_size, got.top_k, got.mass_threshold) == (wanted.vocab_size, wanted.top_k, wanted.mass_threshold)


@pytest.mark.parametrize(
    ("scale", "mass_threshold", "number"),
    [
        *((0.5, 0.0, K), (0.5, 1e-2, 5), (3, 0.0, 3 * K), (3, 1e-5, 5), (3, 1e-2, K)),
        *((8, 1e-5, K), (8, 1e-2, 3 * K), (30, 0.0, 5), (30, 1e-5, K)),
    ],
)
def test_record_equals_capture_top(scale: float, mass_threshold: float, number: int) -> None:
    ids, log_probs = engine_rows(200, number, scale=scale)
    got = read(ids, log_probs, mass_threshold=mass_threshold)
    check_equals_the_core(got, ids, log_probs, mass_threshold=mass_threshold)
    assert torch.equal(got.token_ids.gather(-1, got.slot[:, None])[:, 0], ids[:, 0].long())
    assert len(set(got.used.sum(-1).tolist())) > 1 or scale < 8 or mass_threshold == 0


@pytest.mark.parametrize("others", [V, V - 1])
def test_whole_vocabulary_leaves_no_tail(others: int) -> None:
    """The sampled token is the least likely one, which is among V others, and not among V − 1."""
    ids, log_probs = (x[:, [-1, *range(1, 1 + others)]] for x in engine_rows(4, V))
    got = read(ids, log_probs, top_k=V + 1, mass_threshold=0.0)
    assert got.top_k == V and got.tail_log_prob.eq(-torch.inf).all()
    assert torch.equal(got.token_ids.gather(-1, got.slot[:, None]), ids[:, :1].long())


def test_rounding_that_exceeds_one_is_renormalised() -> None:
    ids, log_probs = torch.tensor([[7, 7, 9]]), torch.tensor([[0.6001, 0.6001, 0.4]]).log()
    got = read(ids, log_probs)
    check_equals_the_core(got, ids, log_probs)
    torch.testing.assert_close(got.outcomes.exp().sum(), torch.tensor(1.0))


def test_equal_log_probs_are_in_the_order_of_their_ids() -> None:
    """As an engine in bf16 reports them; the sampled token outside the K largest keeps the last slot."""
    ids, log_probs = torch.tensor([[4, 50, 30, 20, 10]]), torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.1]]).log()
    got = read(ids, log_probs, top_k=4, mass_threshold=0.0)
    assert got.token_ids.tolist() == [[50, 20, 30, 4]] and got.slot.tolist() == [3]
    both = read(ids.repeat(2, 1), log_probs.repeat(2, 1), top_k=8, mass_threshold=0.0)
    assert both.token_ids[:, :5].tolist() == [[50, 20, 30, 10, 4]] * 2


def truncated_rows(truncation: Truncation, *, scale: float = 8) -> tuple[Tensor, Tensor, Tensor]:
    """As `engine_rows`, of an engine that samples after truncation, and the logits of the whole policies."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(200, V, generator=generator)
    whole = capture(logits, logits.argmax(-1), top_k=V, mass_threshold=0.0)
    kept = torch.full_like(logits, -torch.inf)
    kept.scatter_(-1, whole.token_ids, whole.log_probs.masked_fill(~truncation.kept(whole), -torch.inf))
    return *rows_of(torch.log_softmax(kept, -1), K, generator), logits


@pytest.mark.parametrize("truncation", [Truncation(top_k=5), Truncation(top_k=9, top_p=0.95)])
def test_truncated_record_is_on_the_kept_tokens(truncation: Truncation) -> None:
    ids, log_probs, logits = truncated_rows(truncation)
    got = read(ids, log_probs, truncated=True)
    assert got.truncated and got.tail_log_prob.eq(-torch.inf).all()
    assert len(set(got.used.sum(-1).tolist())) > 1 or truncation.top_p == 1
    check_equals_the_core(got, ids, log_probs, truncated=True)
    step = trust_region_step(logits, got, 0.01)
    assert step.log_ratio.abs().max() < 1e-5 and not step.projected.any()


def test_kept_tokens_that_are_not_all_reported_are_refused() -> None:
    ids, log_probs, _ = truncated_rows(Truncation(top_k=K), scale=0.5)
    assert read(ids, log_probs, truncated=True).used.all()
    with pytest.raises(ValueError, match=r"at most top_k=12, .* add up to 0\."):
        read(ids, log_probs, top_k=12, truncated=True)
    # All of the mass, and one token too many: the sampled one.
    ids, log_probs = torch.tensor([[4, 50, 30]]), torch.tensor([[0.004, 0.6, 0.396]]).log()
    with pytest.raises(ValueError, match="at most top_k=2, got up to 3 tokens"):
        read(ids, log_probs, top_k=2, truncated=True)
    log_probs = torch.tensor([[0.0, 0.6, 0.4]]).log()  # which the sampler could not draw
    with pytest.raises(ValueError, match="at most top_k=2, got up to 3 tokens"):
        read(ids, log_probs, top_k=2, truncated=True)


@pytest.mark.parametrize(
    ("ids", "probs", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"\(2, 3\) and \(2, 4\)"),
        (torch.ones(3), torch.ones(3), r"\(T, 1 \+ M\)"),
        (torch.ones(2, 1), torch.ones(2, 1), r"\(T, 1 \+ M\)"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.2, 0.2, 0.3]]), "descending order"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.9, 0.9, 0.8]]), "add up to 1.7"),
        (torch.tensor([[1, 1, 2]]), torch.tensor([[0.9, torch.nan, 0.1]]), "add up to nan"),
        (torch.tensor([[1, V, 2]]), torch.tensor([[0.1, 0.8, 0.1]]), rf"in \[0, {V}\), got {V}"),
    ],
)
def test_what_is_no_report_is_refused(ids: Tensor, probs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(ids, probs.log())


def test_empty_completion_has_an_empty_record() -> None:
    assert read(torch.empty(0, 1 + K), torch.empty(0, 1 + K)).shape == (0,)


PROMPT, TOOL = [1, 2, 3], [7, 8]


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


FIRST, OF_FIRST = turn(PROMPT, 6, seed=1)
A = FIRST.token_ids
SECOND, OF_SECOND = turn([*PROMPT, *A, *TOOL], 4, seed=2)
B = SECOND.token_ids
NEXT = Turn([*PROMPT, *A], B, SECOND.record)
LATE = Turn([*PROMPT, *TOOL], A, FIRST.record)
ELSEWHERE = Turn([5, 5, 5], A, FIRST.record)
BRANCH = Turn(PROMPT, [*A[:2], V + 1], old_policy_record(*engine_rows(3), **SETTINGS))
#: The first turn's tokens, of which one was tokenised anew.
CHANGED = [*A[:4], V + 1, A[5]]

#: A response, the engine's turns, and what the record has.
RESPONSES: dict[str, tuple[list[int], list[Turn], list[PackedPolicy | int]]] = {
    "one turn": (A, [FIRST], [OF_FIRST]),
    "a tool between turns": ([*A, *TOOL, *B], [FIRST, SECOND], [OF_FIRST, 2, OF_SECOND]),
    "another order": ([*A, *TOOL, *B], [SECOND, FIRST], [OF_FIRST, 2, OF_SECOND]),
    "interrupted": ([*A, *B], [FIRST, NEXT], [OF_FIRST, OF_SECOND]),
    "more than the turns": ([*A, *TOOL, *B, 9], [FIRST, SECOND], [OF_FIRST, 2, OF_SECOND, 1]),
    "cut off": ([*A, *TOOL, B[0]], [FIRST, SECOND], [OF_FIRST, 2, OF_SECOND[:1]]),
    # The turn's record has as many positions as the response, and is still not that of its tokens.
    "a changed token": (CHANGED, [FIRST], [OF_FIRST[:4], 2]),
    "a turn after a changed token": ([*CHANGED, *B], [FIRST, NEXT], [OF_FIRST[:4], 6]),
    "late": ([*TOOL, *A[:4]], [LATE], [2, OF_FIRST[:4]]),
    "a call for something else": (A, [ELSEWHERE], [6]),
    "no turn": (TOOL, [], [2]),
    "two answers to one prompt": ([*A, 9], [BRANCH, FIRST], [OF_FIRST, 1]),
}


@pytest.mark.parametrize(("response", "turns", "expected"), RESPONSES.values(), ids=RESPONSES)
def test_response_record_has_the_turns_of_its_tokens(
    response: list[int], turns: list[Turn], expected: list[PackedPolicy | int]
) -> None:
    check_slots(response_record(PROMPT, response, turns), expected)
