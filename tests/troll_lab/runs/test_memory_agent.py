"""What the agent of the recipe `memory-agent` is asked, and what it may know."""

from types import SimpleNamespace
from typing import Any

import pytest

from troll_lab.runs import memory_agent
from troll_lab.runs.toy_model import character_tokenizer

SUMS = ["9 + 4 - 2 =", "0 - 7 =", "5 - 8 + 0 ="]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The prompts of each round, which are answered rightly: an empty memory counts as 0."""
    rounds: list[list[str]] = []

    def complete(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], None]:
        texts = [trainer.processing_class.decode(ids) for ids in prompts]
        rounds.append(texts)
        return trainer.processing_class([str(eval(text.removesuffix("=").strip() or "0")) for text in texts])[
            "input_ids"
        ], None

    monkeypatch.setattr(memory_agent, "complete", complete)
    return rounds


def texts(ids: list[list[int]]) -> list[str]:
    return character_tokenizer().batch_decode(ids)


TRAINER = SimpleNamespace(processing_class=character_tokenizer())


def test_rollout_reads_a_term_at_a_time_and_last_the_memory(asked) -> None:
    found = memory_agent.rollout(SUMS, TRAINER)
    assert asked[:2] == [["9 =", "0 =", "5 ="], ["9 + 4 =", "0 - 7 =", "5 - 8 ="]]
    assert (asked[2][0], asked[2][2]) == ("13 - 2 =", "-3 + 0 =")
    assert texts(found["prompt_ids"]) == asked[3] == ["11 =", "-7 =", "-3 ="]
    assert texts(found["completion_ids"]) == ["11", "-7", "-3"] and found["logprobs"] is None
    earlier = [
        [(*texts([one["prompt_ids"]]), *texts([one["completion_ids"]])) for one in each] for each in found["earlier"]
    ]
    assert earlier[0] == [("9 =", "9"), ("9 + 4 =", "13"), ("13 - 2 =", "11")]
    assert earlier[1] == [("0 =", "0"), ("0 - 7 =", "-7")]  # a shorter sum has fewer


def test_rollout_gives_log_probabilities_to_all_conversations(monkeypatch) -> None:
    monkeypatch.setattr(
        memory_agent, "complete", lambda trainer, prompts: ([[7]] * len(prompts), [[-0.5]] * len(prompts))
    )
    found = memory_agent.rollout(SUMS[:1], TRAINER)
    assert [one["logprobs"] for one in found["earlier"][0]] == [[-0.5]] * 3 and found["logprobs"] == [[-0.5]]
