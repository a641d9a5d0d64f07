"""A recipe with a command's overrides: read, parsed, checked against the machine, and saved."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig, TrlParser

from troll.files import write_atomically
from troll.settings import did_you_mean
from troll.trl.sampling import POLICY
from troll.trl.surrogates import SURROGATES
from troll_lab import plugins
from troll_lab.evaluation.vllm import vllm_is_usable
from troll_lab.recipes.fields import (
    CONFIGS,
    DICTIONARIES,
    FIELDS,
    FLAGS,
    LISTS,
    OPTIONAL,
    OWN_FIELDS,
    PLUGINS,
    READERS,
    ROLLOUT_LENGTH,
    TEXTS,
    RecipeError,
    dictionary,
    field_of,
)
from troll_lab.recipes.layers import Overrides, find, layered, name_of, set_by_users
from troll_lab.tasks import TaskConfig
from troll_lab.terminal import first_sentence, one_line
from troll_lab.trl import LabConfig
from troll_lab.values import NEGATIVE, yaml_text


@dataclass
class Recipe:
    """A recipe with its overrides, parsed.

    Attributes:
        given: The name or path that the user gave.
        name: The name from `name_of`.
        settings: The fields that the recipe and the command line set, in the form that `save` writes.
        task: The data set, its prompts and its rewards.
        training: The trainer's configuration.
        model: The model to train, and whether by LoRA.
        note: Lines for the user about what this machine lacks for the recipe; None if it lacks nothing.
    """

    given: str
    name: str
    settings: dict[str, Any]
    task: TaskConfig
    training: LabConfig
    model: ModelConfig
    note: str | None = None


def load(name_or_path: str, overrides: Sequence[str] = (), vllm: bool | None = None) -> Recipe:
    """Reads a recipe and applies `--field value` pairs on top.

    Args:
        name_or_path: The recipe's name, or the path of its file.
        overrides: The pairs, as on the command line.
        vllm: Whether vLLM can run where the recipe will be used; by default, whether it can on this machine.

    Returns:
        The recipe, with `use_vllm` off where vLLM cannot run.

    Raises:
        RecipeError: If the recipe or a field is unknown, a value does not fit its field, the overrides do not pick one
            point of a grid, or they ask for vLLM where it is not installed.
    """
    path = find(name_or_path)
    settings, grid, above, loaded = layered(path, overrides)
    here = vllm is None
    if here:
        _refuse_half_precision(path, settings, above)
    task, training, model = _parse(settings, above.words)
    _check_surrogate(path, training, loaded)
    _refuse_open_grid(name_or_path, path, grid, training, above)
    notes = [
        _fit_to_rollouts(training, {*above.given} | set_by_users(path)),
        _slow_here(path, training) if here else None,
        _without_vllm(training, above, vllm_is_usable() and not training.use_cpu if here else bool(vllm)),
    ]
    resolved = _resolved(task, training, model, settings, above)
    if loaded:
        resolved[PLUGINS] = loaded
    note = "\n".join(filter(None, notes)) or None
    return Recipe(name_or_path, name_of(path), resolved, task, training, model, note)


def _refuse_half_precision(path: Path, settings: Mapping[str, Any], above: Overrides) -> None:
    """Refuses a recipe for a GPU, which computes in 16 bits, where there is none and nobody asked for the CPU."""
    if torch.accelerator.is_available() or "use_cpu" in above.fields or settings.get("use_cpu"):
        return
    for name in ("bf16", "fp16"):
        if settings.get(name) is True and name not in above.fields:
            raise RecipeError(
                f"{name_of(path)} is for a GPU ({name}: true), and torch finds none here; to train on the CPU all the "
                f"same, slowly, add --use_cpu --{name} false (recipes for a CPU: quickstart, open-text, smollm2-sums)"
            )


def _parse(settings: Mapping[str, Any], words: Sequence[str]) -> tuple[TaskConfig, LabConfig, ModelConfig]:
    """Makes the configurations of a run.

    Args:
        settings: Fields and their values, as YAML reads them.
        words: `--field value` pairs, which come first.

    Raises:
        RecipeError: If a field is unknown, a value does not fit its field, or values do not go together.
    """
    parser = _Parser(list(CONFIGS), allow_abbrev=False)
    parser.set_defaults_with_config(**parser.fitting(settings))
    try:
        task, training, model, unknown = parser.parse_args_into_dataclasses(
            args=list(words), return_remaining_strings=True
        )
    except (ValueError, TypeError, OverflowError) as error:  # the configurations' own validation
        raise RecipeError(one_line(error)) from error
    if unknown:
        field = unknown[0].removeprefix("--").split("=")[0]
        raise RecipeError(f"unknown argument {unknown[0]!r}{did_you_mean(field, FIELDS, prefix='--')}")
    return task, training, model


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() in ("none", "null") else read(text)


class _Parser(TrlParser):
    """TRL's parser, whose numbers are read as those of recipes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = NEGATIVE
        for action in self._actions:
            if action.dest in READERS:
                read = READERS[action.dest]
                action.type = _or_none(read) if action.dest in OPTIONAL else read

    def fitting(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a recipe in the types of their fields; texts are read by the parser itself."""
        fitted = dict(settings)
        for name, value in settings.items():
            if isinstance(value, str):
                if name in DICTIONARIES and value.startswith("{"):
                    fitted[name] = dictionary(name, value)
            elif value is None:
                continue
            elif name in TEXTS:
                kind = "true or false" if isinstance(value, bool) else "a number"
                if isinstance(value, dict | list):
                    raise RecipeError(f"{name} takes a text, got {value!r}")
                raise RecipeError(f"{name} takes a text, and YAML reads {value!r} as {kind}: put it in quotes")
            elif name in FLAGS:
                if value not in (True, False):  # 1 and 0 are equal to these
                    raise RecipeError(f"{name} must be true or false, got {value!r}")
                fitted[name] = bool(value)
            elif name in LISTS and isinstance(value, int | float):
                raise RecipeError(f"{name} takes a list, got {value!r}: write [{json.dumps(value)}]")
            elif name in READERS:
                read = READERS[name]
                try:
                    fitted[name] = [read(each) for each in value] if isinstance(value, list) else read(value)
                except ArgumentTypeError as error:
                    raise RecipeError(f"{name} {error}") from error
        return fitted

    def error(self, message: str) -> Any:
        # argparse would print the usage of several hundred fields.
        raise RecipeError(one_line(message))


def _check_surrogate(path: Path, training: LabConfig, loaded: Collection[str]) -> None:
    plugin = plugins.plugin_of(training.surrogate)
    if plugin is not None and plugin not in loaded:  # of another recipe, and the run's own process will not know it
        raise RecipeError(f"{path}: surrogate {training.surrogate!r} comes from {plugin}: add that to `plugins`")


def _refuse_open_grid(
    given: str, path: Path, grid: Mapping[str, list[Any]], training: LabConfig, above: Overrides
) -> None:
    """Refuses a grid of which the command does not pick one point."""
    # A grid over the own settings of another surrogate is not open: this surrogate does not read them.
    unread = {name for entry in SURROGATES.values() for name in entry.reads} - {*SURROGATES[training.surrogate].reads}
    picked = above.fields | above.inner.keys() | {name for name in unread if field_of(name) == "surrogate_kwargs"}
    if open_axes := [name for name in grid if name not in picked]:
        raise RecipeError(
            f"{name_of(path)} is a grid over {', '.join(open_axes)}: run it with troll compare {given}, or give "
            f"each one value, as in --{open_axes[0]} {grid[open_axes[0]][0]}"
        )


def _fit_to_rollouts(training: LabConfig, users: Collection[str]) -> str | None:
    """Rounds the steps between checkpoints and between logs up to whole rollouts, if they are not among `users`.

    A run resumes exactly from the end of a rollout only. With `load_best_model_at_end` checkpoints stay where they are,
    since transformers needs them at evaluations. Defaults are rounded, and the values of recipes of this
    package, which do not know the length of a rollout that a command sets.

    Returns:
        A line for the user about logs without a reward; None if every log has one.
    """
    updates = training.rollout_steps // math.gcd(training.rollout_steps, training.gradient_accumulation_steps)
    for name in ("save_steps", "logging_steps"):
        steps = getattr(training, name)
        at_evaluations = name == "save_steps" and training.load_best_model_at_end
        if name not in users and not at_evaluations and steps >= 1:  # below, it is a fraction of the run
            setattr(training, name, math.ceil(steps / updates) * updates)
    steps = training.logging_steps
    if training.logging_strategy != "steps" or not 1 <= steps < updates:
        return None
    return (
        f"logging_steps {steps:g}: TRL logs the reward of a rollout once, in the first log after it was sampled, "
        f"so the others of its {updates} updates have none; with logging_steps {updates}, each log has one"
    )


def _slow_here(path: Path, training: LabConfig) -> str | None:
    about = first_sentence(path.read_text())
    if torch.accelerator.is_available() or training.use_cpu or "GPU" not in about:
        return None
    return f"{name_of(path)} is for a GPU, and torch finds none here: expect it to be slow ({about})"


def _without_vllm(training: LabConfig, above: Overrides, usable: bool) -> str | None:
    """Turns `use_vllm` off where vLLM cannot run, unless the command asks for it.

    Raises:
        RecipeError: If the command asks for it, and it is not installed.
    """
    if not training.use_vllm or usable:
        return None
    if "use_vllm" in above.fields:
        if find_spec("vllm") is None:  # its build for CPUs would do
            raise RecipeError("--use_vllm: vLLM is not installed here: install it, or leave the flag out")
        return None
    training.use_vllm = False
    chunk = training.generation_chunk_size or training.generation_batch_size
    return (
        "use_vllm: vLLM is not installed here, or has no GPU, so transformers generates, at most "
        f"{chunk} completions at a time"
    )


def _resolved(
    task: TaskConfig, training: LabConfig, model: ModelConfig, settings: Mapping[str, Any], above: Overrides
) -> dict[str, Any]:
    """The fields that the recipe or the command set, and all of ours, with their values."""
    chosen = above.fields | set(settings)
    own = {field.name for field in fields(TaskConfig)} | OWN_FIELDS
    if ROLLOUT_LENGTH & chosen:
        own -= ROLLOUT_LENGTH  # what is derived would contradict a later change
    if "generation_kwargs" in chosen:
        own |= {*POLICY}  # which a configuration moves out of it, to their own fields
    values = {field.name: getattr(config, field.name) for config in (task, training, model) for field in fields(config)}
    # The checkpoint that a run was resumed from is not one of its settings.
    names_set = sorted((chosen | own) - {"resume_from_checkpoint"})
    given = settings.keys() | above.fields
    return {name: values[name] for name in names_set if values.get(name) is not None or name in given}


def save(recipe: Recipe, path: Path) -> None:
    """Writes the resolved settings as a recipe that `load` reads back."""
    lines = yaml_text(plain(recipe))
    comment = f"# {recipe.name}, resolved; train again with: troll train {path} --output_dir ANOTHER\n"
    write_atomically(path, comment + lines)


def plain(recipe: Recipe) -> dict[str, Any]:
    """The resolved settings, as values that YAML and JSON can hold."""
    return {name: _plain(value) for name, value in recipe.settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if hasattr(value, "to_dict"):  # accelerate's configuration
        return value.to_dict()
    return value.value if isinstance(value, Enum) else value
