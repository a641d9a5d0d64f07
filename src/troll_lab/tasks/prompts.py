"""Prompts without answers: a reward model scores the completions."""

from troll_lab.tasks.dataset_task import DatasetOptions, Example, PromptStyle, dataset_task
from troll_lab.tasks.registry import Task, TaskConfig, TaskError, register_task
from troll_lab.tasks.rows import Column
from troll_lab.tasks.splits import Source


@register_task("prompts[:<hub data set>]", about="Prompts without answers, for a reward model.")
def load(config: TaskConfig, hub_name: str) -> Task:
    """Loads prompts without answers, for the reward model in `config.reward_model`.

    Rows have the field `prompt`: a text, or a conversation with one message by the user, whose system message is left
    out. They come from the hub, e.g. from `trl-lib/ultrafeedback-prompt`, or without a name from `config.dataset_path`.

    Raises:
        TaskError: If the reward model is missing, the data cannot be read, or a row has no such prompt.
    """
    if config.reward_model is None:
        raise TaskError(f"task {config.task!r} has no reward of its own: name a reward model with --reward_model")
    if not hub_name and config.dataset_path is None:
        raise TaskError("task 'prompts' has no data: name a hub data set, prompts:<hub data set>, or --dataset_path")
    return dataset_task(
        config,
        Source(hub_name, {"prompt": Column(("prompt",))}),
        config.read_options(DatasetOptions),
        read=lambda row: Example(row.text("prompt"), {}),
        style=PromptStyle("{question}"),
        rewards=[],
    )
