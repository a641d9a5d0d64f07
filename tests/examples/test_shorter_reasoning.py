"""The example with a judge model: what it calls redundant, and a run with a tiny judge."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("math_verify")

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.troll.trl import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "shorter_reasoning.py"


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(EXAMPLE))


class Words:
    """A tokenizer of which each character is a token."""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def test_reward_is_less_for_passages_after_the_answer(example) -> None:
    asked: list[tuple[str, str]] = []

    def judge(passages, answers):
        asked.extend(zip(passages, answers, strict=True))
        return [answer in passage for passage, answer in asked]

    reward = example["ShortSolution"](None, judge, penalty=0.5)
    texts = ["try\n\nit is 7\n\nsurely 7\n\n<7>\n", "it is 8\n\n<8>", "<7>", "hm\n\n<7>"]
    ids = [list(map(ord, text)) for text in texts]
    rewards = [1.0, 0.0, 1.0, 1.0]
    answers = ["7", "7", "7", "7"]
    found = reward.of_tokens(completion_ids=ids, rewards=rewards, answer=answers, tokenizer=Words(), prompts=[])
    needed, redundant, last = len("try\n\nit is 7\n\n"), len("surely 7\n\n"), len("<7>\n")
    assert found[0] == needed * [1.0] + redundant * [0.5] + last * [1.0]
    assert found[1:] == [None, None, None], "wrong, in one passage, and not stated before the last one"
    assert asked == [("try", "7"), ("it is 7", "7"), ("surely 7", "7"), ("hm", "7")], "no passage of a wrong completion"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}?"
    tokenizer.save_pretrained(folder)
    tiny.make_model("llama", max_position_embeddings=1024).save_pretrained(folder)
    return folder


def test_judge_reads_each_passage_as_it_does_alone(example, chat_model) -> None:
    passages, answers = ["it is 7", "then we add 3 and get 12", "x"], ["7", "12", "4"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_model), AutoTokenizer.from_pretrained(chat_model)
    alone = []
    for passage, answer in zip(passages, answers, strict=True):
        ids = tokenizer(example["QUESTION"].format(passage=passage, answer=answer) + "?", return_tensors="pt").input_ids
        logits = model(ids).logits[0, -1]
        yes, no = (logits[tokenizer.encode(word, add_special_tokens=False)[0]] for word in ("yes", "no"))
        assert (yes - no).abs() > 100 * tiny.LOG_PROB_ERROR, "too close to tell them apart"
        alone.append(bool(yes > no))
    assert example["Judge"](str(chat_model), batch_size=2)(passages, answers) == alone


def test_example_trains(example, chat_model, tmp_path, monkeypatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n} + {n}", "answer": "so #### {2 * n}"}}\n' for n in range(16)))
    arguments = ["--model", chat_model, "--judge", chat_model, "--dataset_path", rows, "--max_steps", 1]
    arguments += ["--max_completion_length", 8, "--output_dir", tmp_path / "run", "--use_cpu", "--bf16", False]
    monkeypatch.setattr(sys, "argv", ["shorter_reasoning.py", *map(str, arguments)])
    example["main"]()
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").is_file()
