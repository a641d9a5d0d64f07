from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.troll_lab.runs.conftest import tiny_model  # noqa: F401  a fixture
from troll_lab.tasks import TaskError
from troll_lab.tasks.chat_template import prompt_texts

TEMPLATE = (
    "{% if shout is defined %}LOUD {% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_prompt_texts_apply_the_chat_template(tiny_model: Path) -> None:  # noqa: F811
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
