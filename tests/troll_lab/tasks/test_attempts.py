"""Answers in several attempts: what of them is redundant, in characters and in tokens, and what they are worth."""

from typing import Any

import pytest

from troll_lab.runs.toy_model import character_tokenizer
from troll_lab.runs.toy_network import EOS
from troll_lab.tasks import TaskConfig, TaskError, load_task
from troll_lab.tasks.attempts import needed_length, overthought, tokens_until
from troll_lab.tasks.reasoning_gym import questions

OPTIONS: dict[str, Any] = {
    **{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    **{"prompt": "{expression} =", "attempts": " wait "},
}


def load(**options: Any) -> Any:
    config = TaskConfig(task="reasoning_gym:chain_sum", task_options=OPTIONS | options, train_size=4, eval_size=4)
    return load_task(config)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("12", "12"),
        ("11 wait 12 wait 12", "11 wait 12"),
        ("12 wait 11 wait 12", "12"),
        ("11 wait 13", "11 wait 13"),
        ("1 wait 112", "1 wait 112"),
        ("11 wait  12 wait 12", "11 wait  12"),
        ("", ""),
    ],
)
def test_needed_length_ends_with_first_right_attempt(text, needed):
    assert text[: needed_length(text, " wait ", lambda attempt: attempt == "12")] == needed


def test_tokens_until_counts_tokens_across_the_end():
    pieces = ["1", "2 wa", "it ", "12", ""]
    counts = [tokens_until(length, range(5), lambda ids: "".join(pieces[i] for i in ids)) for length in (0, 1, 2, 5, 6)]
    assert counts == [0, 1, 2, 2, 3]


def test_redundant_tokens_of_right_completions_are_worth_less():
    success, redundant, length = load().reward_funcs
    right = questions("chain_sum", OPTIONS, split="train", size=1)[0].answer
    texts = [right, f"99 wait {right} wait {right}", f"{right} wait 99", f"{right} wait {right}"]
    tokenizer = character_tokenizer()
    ends = [EOS, EOS, EOS, ""]  # the last one is cut off
    ids = [tokenizer(text + end)["input_ids"] for text, end in zip(texts, ends, strict=True)]
    asked = {"prompts": [None] * 4, "completions": texts, "completion_ids": ids, "question_id": [0] * 4}
    assert success(**asked) == [1, 1, 0, 1]
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    assert success(**asked | {"completions": chat}) == [1, 1, 0, 1]
    assert redundant(**asked) == [0, 0, 0, 0]
    assert length(**asked) == [-len(each) for each in ids]
    again = len(f" wait {right}")
    assert redundant.of_tokens(**asked, rewards=[0.0] * 4, tokenizer=tokenizer) == [
        [0] * len(ids[0]),
        [0] * (len(ids[1]) - again - 1) + [-1] * again + [0],
        None,
        [0] * len(right) + [-1] * again,
    ]


def test_warm_up_answers_are_overthought():
    drawn = questions("chain_sum", OPTIONS, split="warmup", size=400)
    attempts = [question.formatted_answer.split(" wait ") for question in drawn]
    assert all(each[-1] == question.answer for each, question in zip(attempts, drawn, strict=True))
    wrong = [each[0] != each[-1] for each in attempts]
    counts = {len(each) - first for each, first in zip(attempts, wrong, strict=True)}
    assert counts - {6} == {1, 2, 3, 4, 5}  # 6 where the wrong attempt happens to be right
    assert 0.06 < sum(wrong) / len(wrong) < 0.19
    assert overthought(", ", "a", "b", "seed") == overthought(", ", "a", "b", "seed")


@pytest.mark.parametrize("options", [{"attempts": ""}, {"attempts": 3}, {"answer_format": "<{answer}>"}])
def test_attempts_option_is_refused(options):
    with pytest.raises(TaskError, match=r"attempts .*must be a text.*, got"):
        load(**options)
