"""Memory agents: docs/study/memory-agent.md has what was measured, and its controls are what they say."""

from collections import Counter
from types import SimpleNamespace

import pytest

from experiments import memory_agent as controls
from experiments.rows import read_rows
from troll_lab.runs import memory_agent
from troll_lab.runs.toy_model import character_tokenizer

TRAINER = SimpleNamespace(processing_class=character_tokenizer())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The prompts of each round, all answered "7"."""
    rounds: list[list[str]] = []

    def complete(trainer, prompts):
        rounds.append(TRAINER.processing_class.batch_decode(prompts))
        return TRAINER.processing_class(["7"] * len(prompts))["input_ids"], None

    monkeypatch.setattr(memory_agent, "complete", complete)
    return rounds


def test_last_only_asks_the_same_and_hands_over_last_conversations(asked) -> None:
    whole, last = memory_agent.rollout(["9 + 4 ="], TRAINER), controls.last_only(["9 + 4 ="], TRAINER)
    assert asked == [["9 ="], ["7 + 4 ="], ["7 ="]] * 2
    assert "earlier" not in last and last == {name: value for name, value in whole.items() if name != "earlier"}


def test_forgetful_agent_has_an_empty_memory(asked) -> None:
    found = controls.forgetful(["9 + 4 ="], TRAINER)
    assert asked == [["9 ="], ["+ 4 ="], [" ="]]
    assert len(found["earlier"][0]) == 2


def test_page_has_the_tables_and_every_run_counts() -> None:
    rows, page = read_rows(controls.RESULT), (controls.RESULT.parents[1] / "study" / "memory-agent.md").read_text()
    assert controls.conversations_table(rows) in page
    assert controls.updates_table(rows) in page
    seeds = Counter(row["method"] for row in rows)
    updates = [f"{surrogate}, {rate}" for surrogate in controls.SURROGATES for rate in controls.RATES]
    trained = [*controls.CONVERSATIONS, *map(controls.longer, controls.CONVERSATIONS)]
    once = {controls.CONTROL, controls.longer(controls.CONTROL)}
    assert seeds == {method: 1 if method in once else 5 for method in [*trained, *updates]}
