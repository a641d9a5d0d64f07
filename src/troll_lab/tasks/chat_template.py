"""The texts of prompts that a model reads, after its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from troll_lab.tasks.registry import TaskError
from troll_lab.terminal import one_line


def prompt_texts(tokenizer: Any, prompts: Sequence[Any], task: str, variables: Mapping[str, Any]) -> list[str]:
    """The texts that the model reads: conversations through the chat template, plain prompts unchanged.

    Args:
        tokenizer: The model's tokenizer or processor, with a chat template if there are conversations.
        prompts: Strings, or lists of messages.
        task: The name of the task, for errors.
        variables: More variables of the chat template.

    Raises:
        TaskError: If the template refuses a conversation or a variable.
    """
    try:
        return [
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **variables)
            for prompt in prompts
        ]
    except (TemplateError, TypeError) as error:
        raise TaskError(
            f"the model's chat template does not take the prompts of {task}: {one_line(error)}; check "
            "--chat_template_kwargs, and the task option system_prompt"
        ) from error
