from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.troll_lab.evaluation.conftest import register
from troll.grading import Verdict
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.problems import Problems, load_problems
from troll_lab.tasks import TaskConfig

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Callable[..., Problems]:
    """The problems of a task with these rewards and columns; `template` is the chat template."""

    def load(*rewards: Any, template: str | None = None, **columns: list[Any]) -> Problems:
        tokenizer.chat_template = template
        config = register(monkeypatch, "made_up", list(rewards), **{"prompt": ["p", "q"], **columns})
        return load_problems(config, tokenizer, {})

    return load


def success(**columns: Any) -> list[float]:
    return []


def test_grader_says_why(letters: TaskConfig, tokenizer: Any) -> None:
    problems = load_problems(letters, tokenizer, {})
    assert len(problems) == 4
    assert problems.texts[2] == "letter 2:"
    assert problems.ids[2] == tokenizer("letter 2:")["input_ids"]
    assert problems.judge([2, 0], ["C", ""]) == [Verdict(1.0, "C", "correct"), Verdict(0.0, None, "no answer")]
    assert problems.same_answer is not None and problems.same_answer("C", "c")


@pytest.mark.parametrize("chat", [True, False])
def test_plain_reward_is_called_as_trl_calls_it(loaded: Callable[..., Problems], chat: bool) -> None:
    seen: dict[str, Any] = {}

    def success(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [1.0, 0.0, None]

    problems = loaded(success, template=TEMPLATE if chat else None, answer=["1", "2"])
    assert problems.same_answer is None
    verdicts = problems.judge([1, 1, 0], ["a", "b", "c"])
    assert verdicts[:2] == [Verdict(1.0, None, "correct"), Verdict(0.0, None, "wrong")]
    assert verdicts[2].score is None and verdicts[2].reason.startswith("unscored: ")
    assert problems.texts[1] == ("<user>q" if chat else "q")
    asked = [[{"role": "user", "content": text}] for text in "qqp"]
    said = [[{"role": "assistant", "content": text}] for text in "abc"]
    assert seen["prompts"] == (asked if chat else list("qqp"))
    assert seen["completions"] == (said if chat else list("abc"))
    assert seen["answer"] == ["2", "2", "1"]


@pytest.mark.parametrize("template", ["<|eos|>{{ messages[0].content }}", None])
def test_special_tokens_are_written_once(loaded: Callable[..., Problems], tokenizer: Any, template: str | None) -> None:
    special = ("<|eos|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|eos|> $A", special_tokens=[special])
    (ids,) = loaded(success, template=template, prompt=["1"]).ids
    assert ids == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("1")]


def test_fingerprint_changes_with_prompts_and_answers(loaded: Callable[..., Problems]) -> None:
    prints = [loaded(success, answer=answers).fingerprint for answers in (["1", "2"], ["1", "3"], ["1", "2"])]
    prints.append(loaded(success, template=TEMPLATE, answer=["1", "2"]).fingerprint)
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3


def test_fingerprint_changes_with_a_reward_of_the_users(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n{"q": "2?", "a": "2"}\n')
    own = tmp_path / "own.yaml"
    own.write_text("{dataset: rows.jsonl, eval_dataset: rows.jsonl, columns: {prompt: q}, reward: 'own.py:success'}")
    prints = []
    for score in ("1.0", "0.0", "0.0"):
        (tmp_path / "own.py").write_text(f"def success(prompts, **columns):\n    return [{score}] * len(prompts)\n")
        prints.append(load_problems(TaskConfig(str(own)), tokenizer, {}).fingerprint)
    assert prints[0] != prints[1] == prints[2]


def reward(**columns: Any) -> list[float]:
    return []


def needy() -> Any:
    def success(completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        return []

    return success


@pytest.mark.parametrize(
    ("rewards", "template", "columns", "message"),
    [
        ([], None, {}, "'made_up' cannot tell success from failure"),
        ([reward], None, {}, "'made_up' cannot tell success from failure"),
        ([object()], None, {}, "'made_up' cannot tell success from failure"),
        ([success], TEMPLATE, {"images": ["a", "b"]}, "has images"),
        ([success], "{{ '' }}", {}, "the prompt of problem 0 has no token"),
        (
            [needy()],
            None,
            {"answer": ["1", "2"]},
            "missing a required argument: 'completion_ids'.*columns answer: give",
        ),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused(
    loaded: Callable[..., Problems], rewards: list[Any], template: str | None, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        loaded(*rewards, template=template, **columns)
