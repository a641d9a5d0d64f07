from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tests.runs.conftest import tiny_model  # noqa: F401  a fixture
from tests.trl.vision import make_processor
from troll.runs.toy_model import character_tokenizer
from troll.tasks import Task, TaskError
from troll.tasks.chat_template import longest_prompt, prompt_texts

TEMPLATE = (
    "{% if shout is defined %}LOUD {% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_conversations_go_through_the_chat_template(tiny_model: Path) -> None:  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    conversation = [{"role": "user", "content": "1 + 1?"}]
    assert prompt_texts(tokenizer, [conversation], "sums", {}) == ["<user>1 + 1?<assistant>"]
    assert prompt_texts(tokenizer, [conversation], "sums", {"shout": True}) == ["LOUD <user>1 + 1?<assistant>"]
    assert prompt_texts(tokenizer, ["1 + 1?"], "sums", {}) == ["1 + 1?"]
    with pytest.raises(TaskError, match=r"not take the prompts of sums: .*check --chat_template_kwargs"):
        prompt_texts(tokenizer, [conversation], "sums", {"conversation": 1})
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(TaskError, match=r"prompts of sums: System role not supported; .* option system_prompt"):
        prompt_texts(tokenizer, [conversation], "sums", {})


def test_longest_prompt_counts_tokens() -> None:
    rows = Dataset.from_dict({"prompt": ["1 + 2 =", "1 + 22 ="]})
    task = Task(name="t", train_dataset=rows, eval_dataset=rows, reward_funcs=[])
    assert longest_prompt([task], character_tokenizer(), {}) == 8
    assert longest_prompt([task], make_processor("qwen2_5_vl"), {}) == 8  # texts for a model that could also see
    pictures = replace(task, train_dataset=rows.add_column("images", [[], []]))
    assert longest_prompt([pictures], character_tokenizer(), {}) is None
