"""Publishes logs by back ends of transformers, the model card, and the model on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from trl import GRPOConfig

from troll_lab.evaluation.estimators import wilson_interval
from troll_lab.evaluation.training_task import TASK_FILE, TrainingTask
from troll_lab.recipes import Recipe, as_argument
from troll_lab.runs.text import duration, markdown_table, percent
from troll_lab.runs.toy_network import TOY_MODELS
from troll_lab.tasks import Task
from troll_lab.terminal import one_line

CARD_FILE = "README.md"

_TROLL = "https://arxiv.org/abs/2510.03817"
_METHODS = {
    "troll": f"[TROLL]({_TROLL}): a trust region around the policy that wrote the completions, instead of a clip",
    "clip": "the clipped ratio of GRPO",
    "none": "neither a trust region nor a clip",
}
# The settings of every run; the surrogate's own follow.
_SETTINGS = (
    "advantage_estimator",
    "loss_type",
    "learning_rate",
    "beta",
    "num_generations",
    "temperature",
    "max_completion_length",
    "seed",
)
_CITATIONS = {
    "TROLL": """@inproceedings{becker2026troll,
  title     = {{TROLL}: Trust Regions improve Reinforcement Learning for Large Language Models},
  author    = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and Neumann, Gerhard},
  booktitle = {International Conference on Learning Representations},
  year      = {2026},
  note      = {arXiv:2510.03817}
}""",
    "TRL": """@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
             Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}""",
}
# transformers can log to it, but cannot tell whether it is installed.
_WITHOUT_A_CHECK = ("flyte",)


def check_back_ends(report_to: Sequence[str]) -> None:
    """Checks, before a model is loaded, that transformers can log to these back ends, such as `tensorboard`.

    Raises:
        ValueError: If transformers does not know a back end, or its package is missing; in one line.
    """
    available = get_available_reporting_integrations()
    for name in report_to:
        get_reporting_integration_callbacks([name])  # raises for a name that it does not know
        if name not in (*available, *_WITHOUT_A_CHECK):
            raise ValueError(f"report_to: {name} is not installed or not set up: pip install {name}, or leave it out")


def check_hub(training: GRPOConfig) -> None:
    """Checks, before a model is loaded, that it can be pushed to the hub, if `push_to_hub` is set.

    Raises:
        ValueError: If nobody is logged in, or the hub cannot be reached; in one line.
    """
    if not training.push_to_hub:
        return
    try:
        HfApi(token=training.hub_token).whoami()
    except Exception as error:  # the hub's own errors, and those of its HTTP library
        raise ValueError(
            f"push_to_hub: {one_line(error, 200)}; log in with hf auth login, or leave push_to_hub out"
        ) from error


def push(model_folder: Path, repository: str, training: GRPOConfig) -> str:
    """Uploads a model with its card and its task to the repository `owner/name`.

    Returns:
        A line to print: where the model is now, or why it is not there and what to do.
    """
    try:
        HfApi(token=training.hub_token).upload_folder(
            repo_id=repository, folder_path=model_folder, revision=training.hub_revision, commit_message="Trained model"
        )
    except Exception as error:  # a run that is finished must not fail here
        return f"not pushed: {one_line(error, 200)}; push it with: hf upload {repository} {model_folder} ."
    return f"pushed  https://huggingface.co/{repository}"


def model_card(recipe: Recipe, task: Task, trained_on: TrainingTask, summary: Mapping[str, Any], model: str) -> str:
    """Writes the card of a run with this `summary.json`, with the hub's metadata on top.

    Its quick start loads `model`, a name on the hub or a folder.
    """
    training, surrogate = recipe.training, summary["surrogate"]
    base, base_on_hub = _base(str(recipe.model.model_name_or_path))
    metadata = ModelCardData(
        base_model=base_on_hub,
        datasets=None if task.hub_dataset is None else [task.hub_dataset],
        library_name="peft" if recipe.model.use_peft else "transformers",
        pipeline_tag="image-text-to-text" if _has_images(task) else "text-generation",
        tags=["trl", "reinforcement-learning", *(["troll"] if surrogate == "troll" else [])],
    )
    adapter = "a LoRA adapter of " if recipe.model.use_peft else ""
    method = _METHODS.get(surrogate, f"the surrogate `{surrogate}`")
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {Path(training.hub_model_id or str(training.output_dir)).name}",
        f"This is {adapter}{base}, trained by reinforcement learning on the task `{task.short_name}`"
        f"{_data(recipe, task)} with {method}.",
        "## Held-out results",
        _results(recipe, summary),
        *([] if _has_images(task) else ["## Quick start", _quick_start(recipe, task, trained_on, model)]),
        "## Training",
        _training(recipe, trained_on, summary),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in summary["versions"].items()),
        "## Citation",
        *(f"```bibtex\n{text}\n```" for name, text in _CITATIONS.items() if name != "TROLL" or surrogate == "troll"),
    ]
    return "\n\n".join(parts) + "\n"


def _base(name: str) -> tuple[str, str | None]:
    """The base model in words, and its name if it is on the hub."""
    if name in TOY_MODELS:
        return "the small language model that `troll train` makes itself", None
    if Path(name).expanduser().is_dir():
        return f"the model of a local folder, `{Path(name).expanduser().resolve().name}`", None
    return _on_hub("", name), name


def _data(recipe: Recipe, task: Task) -> str:
    if task.hub_dataset is not None:
        return f" ({_on_hub('datasets/', task.hub_dataset)})"
    path = recipe.task.dataset_path
    return "" if path is None else f" (local data, `{Path(path).name}`)"


def _on_hub(kind: str, name: str) -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})"


def _has_images(task: Task) -> bool:
    return "images" in task.eval_dataset.column_names


def _results(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    training = recipe.training
    size, after = summary["eval_size"], f"after step {summary['success_after_step']}"
    temperature = training.temperature if training.eval_temperature is None else training.eval_temperature
    samples = training.num_generations_eval or training.num_generations
    each = "one completion" if samples == 1 else f"{samples} completions"
    how = f"{size} held-out problems, {each} of each, at temperature {temperature:g}."
    successes = [("before training", summary["success_before"]), (after, summary["success_after"])]
    questions = summary["eval_questions"]
    if rows := [(when, *_with_interval(share, questions)) for when, share in successes if share is not None]:
        table = markdown_table(("", "success", "95 % interval"), rows)
        return f"{table}\n\nMeans over {how} Wilson's intervals over {questions} different problems."
    rewards = [("before training", summary["reward_before"]), (after, summary["reward_after"])]
    if means := [(when, f"{reward:.3f}") for when, reward in rewards if reward is not None]:
        return f"{markdown_table(('', 'mean reward'), means)}\n\nMeans over {how}"
    return "Not measured."


def _with_interval(share: float, size: int) -> tuple[str, str]:
    low, high = wilson_interval(share, size)
    return percent(share), f"{percent(low)} to {percent(high)}"


def _quick_start(recipe: Recipe, task: Task, trained_on: TrainingTask, model: str) -> str:
    prompt = task.eval_dataset.select_columns("prompt")[0]["prompt"]
    if isinstance(prompt, str):
        inputs = f'tokenizer({prompt!r}, return_tensors="pt")'
    else:
        variables = "".join(f", {name}={value!r}" for name, value in trained_on.chat_template_kwargs.items())
        inputs = (
            f"tokenizer.apply_chat_template(\n    {prompt!r},\n    add_generation_prompt=True, return_dict=True, "
            f'return_tensors="pt"{variables}\n)'
        )
    example = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model!r})
model = AutoModelForCausalLM.from_pretrained({model!r})
inputs = {inputs}
output = model.generate(**inputs, max_new_tokens={recipe.training.max_completion_length})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```"""
    if recipe.task.rollout_func is not None or not task.has_success:
        return example
    return f"{example}\n\n`troll eval {model}` evaluates it on its task, prompted as in training (`{TASK_FILE}`)."


def _training(recipe: Recipe, trained_on: TrainingTask, summary: Mapping[str, Any]) -> str:
    values = {name: getattr(recipe.training, name) for name in _SETTINGS}
    settings = {"task_options": trained_on.task_options, "reward_model": recipe.task.reward_model}
    settings |= {"surrogate": summary["surrogate"], **summary["surrogate_settings"], **values}
    rows = [(f"`{name}`", f"`{as_argument(value)}`") for name, value in settings.items() if value not in (None, {})]
    went = f"{summary['steps']} optimiser steps, {summary['updates_per_rollout']} for each rollout, "
    went += f"in {duration(summary['training_seconds'])} on {summary['machine']}"
    ended = "" if summary["status"] == "finished" else f" ({summary['status']})"
    return f"Recipe `{summary['recipe']}`: {went}{ended}.\n\n{markdown_table(('setting', 'value'), rows)}"
