"""Prompts without answers: a reward model scores the completions."""

from troll.tasks.dataset_task import Example, PromptStyle, dataset_task
from troll.tasks.options import Options
from troll.tasks.registry import Task, TaskConfig, TaskError, register_task
from troll.tasks.row import Column
from troll.tasks.splits import Source


@register_task("prompts[:<hub data set>]")
def load(config: TaskConfig, hub_name: str) -> Task:
    """Loads prompts without answers, for the reward model in `config.reward_model`.

    Rows have the field `prompt`: a text, or a conversation with one message by the user, whose system message is left
    out. They come from the hub, or from `config.dataset_path` without a name (see `troll.tasks.splits.read_splits`).
    Training rows with a held-out prompt are dropped.

    Args:
        config: The task's configuration: path, sizes and the reward model.
        hub_name: The name of the hub's data set, e.g. `trl-lib/ultrafeedback-prompt`; empty for local files.

    Returns:
        The task. Its data sets have the column `prompt`; its rewards are left to the reward model.

    Raises:
        TaskError: If there is no reward model, the data cannot be read, or a row has no such prompt.
    """
    if config.reward_model is None:
        raise TaskError(f"task {config.task!r} has no reward of its own: name a reward model with --reward_model")
    if not hub_name and config.dataset_path is None:
        raise TaskError("task 'prompts' has no data: name a hub data set, prompts:<hub data set>, or --dataset_path")
    return dataset_task(
        config,
        Source(hub_name),
        Options(config),
        columns={"prompt": Column(("prompt",))},
        read=lambda row: Example(row.text("prompt"), {}),
        style=PromptStyle("{question}", "{question}", ""),
        rewards=[],
    )
