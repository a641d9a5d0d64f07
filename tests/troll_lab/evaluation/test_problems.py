from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.troll_lab.evaluation.conftest import register
from troll.grading import Verdict
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.problems import load_problems
from troll_lab.tasks import TaskConfig, TaskError

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def task(monkeypatch: pytest.MonkeyPatch, rewards: list[Any], **columns: list[Any]) -> TaskConfig:
    return register(monkeypatch, "made_up", rewards, prompt=["p", "q"], **columns)


def success(**columns: Any) -> list[float]:
    return []


def test_a_grader_says_why(letters: TaskConfig, tokenizer: Any) -> None:
    problems = load_problems(letters, tokenizer, {})
    assert len(problems) == 4
    assert problems.texts[2] == "letter 2:"
    assert problems.ids[2] == tokenizer("letter 2:")["input_ids"]
    assert problems.judge([2, 0], ["C", ""]) == [Verdict(1.0, "C", "correct"), Verdict(0.0, None, "no answer")]
    assert problems.same_answer is not None
    assert problems.same_answer("C", "c")


@pytest.mark.parametrize("chat", [True, False])
def test_a_plain_reward_is_called_as_trl_calls_it(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, chat: bool) -> None:
    seen: dict[str, Any] = {}

    def success(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [1.0, 0.0]

    tokenizer.chat_template = TEMPLATE if chat else None
    problems = load_problems(task(monkeypatch, [success], answer=["1", "2"]), tokenizer, {})
    assert problems.same_answer is None
    assert problems.judge([1, 1], ["a", "b"]) == [Verdict(1.0, None, "correct"), Verdict(0.0, None, "wrong")]
    if chat:
        assert problems.texts[1] == "<user>q"
        assert seen["prompts"] == [[{"role": "user", "content": "q"}]] * 2
        assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "ab"]
    else:
        assert (seen["prompts"], seen["completions"]) == (["q", "q"], ["a", "b"])
    assert seen["answer"] == ["2", "2"]


@pytest.mark.parametrize("conversational", [True, False])
def test_special_tokens_are_written_once(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, conversational: bool) -> None:
    special = ("<|eos|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|eos|> $A", special_tokens=[special])
    tokenizer.chat_template = "<|eos|>{{ messages[0].content }}" if conversational else None
    (ids,) = load_problems(register(monkeypatch, "one", [success], prompt=["1"]), tokenizer, {}).ids
    assert ids == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("1")]


def test_a_function_may_leave_a_completion_without_a_score(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    def success(prompts: list[Any], **columns: Any) -> list[float | None]:
        return [None, 0.0, 1][: len(prompts)]

    problems = load_problems(task(monkeypatch, [success], answer=["1", "2"]), tokenizer, {})
    verdicts = problems.judge([0, 1, 0], ["a", "b", "c"])
    found = [(verdict.score, verdict.reason.partition(":")[0]) for verdict in verdicts]
    assert found == [(None, "unscored"), (0.0, "wrong"), (1.0, "correct")]


def test_the_fingerprint_changes_with_prompts_and_answers(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    prints = []
    for answers in (["1", "2"], ["1", "3"], ["1", "2"]):
        prints.append(load_problems(task(monkeypatch, [success], answer=answers), tokenizer, {}).fingerprint)
    tokenizer.chat_template = TEMPLATE
    prints.append(load_problems(task(monkeypatch, [success], answer=["1", "2"]), tokenizer, {}).fingerprint)
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3


def test_the_fingerprint_changes_with_a_reward_of_the_users(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n{"q": "2?", "a": "2"}\n')
    own = tmp_path / "own.yaml"
    own.write_text(
        "{dataset: rows.jsonl, eval_dataset: rows.jsonl, columns: {prompt: q}, reward: 'rewards.py:success'}"
    )
    prints = []
    for score in ("1.0", "0.0", "0.0"):
        (tmp_path / "rewards.py").write_text(f"def success(prompts, **columns):\n    return [{score}] * len(prompts)\n")
        prints.append(load_problems(TaskConfig(str(own)), tokenizer, {}).fingerprint)
    assert prints[0] != prints[1] == prints[2]


def test_tasks_that_cannot_be_evaluated(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    def reward(**columns: Any) -> list[float]:
        return []

    for rewards in ([], [reward], [object()]):
        with pytest.raises(EvaluationError, match="'made_up' cannot tell success from failure"):
            load_problems(task(monkeypatch, rewards), tokenizer, {})
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(EvaluationError, match="has images"):
        load_problems(task(monkeypatch, [success], images=["a", "b"]), tokenizer, {})
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(EvaluationError, match="the prompt of problem 0 has no token"):
        load_problems(task(monkeypatch, [success]), tokenizer, {})
    with pytest.raises(TaskError, match="unknown task"):
        load_problems(TaskConfig(task="nonsense"), tokenizer, {})


def test_a_reward_that_needs_more_than_texts_is_refused(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    def success(completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        return []

    with pytest.raises(EvaluationError, match=r"missing a required argument: 'completion_ids'.*columns answer: give"):
        load_problems(task(monkeypatch, [success], answer=["1", "2"]), tokenizer, {})
