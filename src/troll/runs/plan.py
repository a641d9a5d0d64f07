"""What a recipe takes, computed before anything is downloaded or loaded: memory by phase, and work."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import get_peft_config

from troll import recipes
from troll.recipes import Recipe, RecipeError
from troll.runs.budget import PHASES, Fields, Settings, changes, phases, rows_of, totals_of
from troll.runs.shapes import model_shape
from troll.runs.without_data import Network
from troll.tasks import Task
from troll.terminal import say
from troll.trl import TrollConfig
from troll.trl.surrogates import SURROGATES

GIB = 1 << 30

#: Tokens of a prompt, if no setting gives their number: it is not known before they are downloaded.
ASSUMED_PROMPT = 512

#: Numbers of GPUs that are tried if a run does not fit on one.
_GPUS = (2, 4, 8, 16, 32, 64)

#: Tokens are counted for this many prompts, the longest in characters.
_LONGEST = 16


class Machine(NamedTuple):
    """The machine for which a plan is made."""

    memory: float
    """The bytes of each GPU, or of the RAM."""
    name: str
    on_gpu: bool
    gpus: int
    """The processes of the run."""
    sharded: bool
    """Whether they share the model, by FSDP2 or ZeRO-3."""


class Work(NamedTuple):
    """The work of a run, over all GPUs."""

    updates: int | None
    """The updates in all; None if the size of the data set decides."""
    updates_per_rollout: float
    prompts: int
    """The prompts of a rollout."""
    completions: int
    """The completions of a rollout."""
    completion: int
    """The tokens of a completion at most."""
    batch: int
    """The completions of an update."""
    evaluations: int | None
    """The evaluations in all; None if the size of the data set decides."""
    eval_tasks: int
    eval_problems: int | None
    """The held-out problems of each task at most; None for the whole test set."""
    eval_samples: int
    """The completions of each problem."""
    eval_batch: int
    """The completions of one call of `generate`."""

    def lines(self) -> list[str]:
        """The lines to print."""
        per_update = f"{self.updates_per_rollout:g} updates of {self.batch} completions each"
        rollout = f"{self.prompts} prompts, {self.completions} completions, {per_update}"
        if self.updates is None:
            work = [f"rollouts    as many as the data set fills: {rollout}"]
        else:
            rollouts = math.ceil(self.updates / self.updates_per_rollout)
            generated = rollouts * self.completions * self.completion
            trained = self.updates * self.batch * self.completion
            work = [
                f"rollouts    {rollouts}: {rollout}; {self.updates} updates in all",
                f"tokens      at most {_short(generated)} generated and {_short(trained)} trained on "
                f"({self.completion} a completion)",
            ]
        return [*work, f"evaluation  {self._evaluation()}"]

    def _evaluation(self) -> str:
        if self.evaluations == 0:
            return "none"
        times = "after every epoch" if self.evaluations is None else f"{self.evaluations} times"
        of = "" if self.eval_tasks == 1 else f" of each of {self.eval_tasks} tasks"
        if self.eval_problems is None:
            return (
                f"{times}: the whole test set{of}, {self.eval_samples} completions a problem, {self.eval_batch} a call"
            )
        completions = self.eval_tasks * self.eval_problems * self.eval_samples
        calls = self.eval_tasks * math.ceil(self.eval_problems * self.eval_samples / self.eval_batch)
        return (
            f"{times}: {self.eval_problems} problems{of}, {completions} completions, {calls} generate calls of at most "
            f"{self.eval_batch}"
        )


@dataclass(frozen=True)
class Plan:
    """A recipe's memory and work, on a machine."""

    recipe: Recipe
    settings: Settings
    work: Work
    machine: Machine
    prompt_known: bool

    @cached_property
    def table(self) -> dict[str, tuple[float, ...]]:
        """The bytes on one GPU by row and phase."""
        return rows_of(self.settings, self.machine.memory)

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """The bytes on one GPU by phase."""
        return totals_of(self.table)

    @property
    def fits(self) -> bool:
        """Whether the largest phase fits into the memory."""
        return max(self.totals) <= self.machine.memory

    def lines(self) -> list[str]:
        """The lines to print below the table: the largest phase, and the work."""
        largest = PHASES[self.totals.index(max(self.totals))]
        assumed = "" if self.prompt_known else " (assumed: --prompt_tokens)"
        each = f" on each of {self.machine.gpus} GPUs" if self.machine.gpus > 1 else ""
        memory = (
            f"memory      at most {_gib(max(self.totals))} GiB{each} ({largest}), of {self.machine.name}; with "
            f"completions of {self.settings.completion} tokens and prompts of {self.settings.prompt}{assumed}"
        )
        return [memory, *self.work.lines()]

    def remedy(self) -> str:
        """One line that says that the run does not fit, and what to change."""
        limit = self.machine.memory
        fields, changed = changes(self.settings, limit)
        needed = max(self.totals)
        line = f"{self.recipe.name} takes up to {_gib(needed)} GiB, and {self.machine.name} is all there is"
        after = max(phases(changed, limit))
        how = self._as_arguments(fields)
        if fields and after <= limit:
            return f"{line}: add {how} (then {_gib(after)} GiB)"
        with_them = f" even with {how} ({_gib(after)} GiB)" if fields else ""
        return f"{line}{with_them}: {self._more_gpus()}"

    def _as_arguments(self, fields: Fields) -> str:
        fields, given = dict(fields), self.recipe.settings
        if "per_device_train_batch_size" in fields and given.get("steps_per_generation") is not None:
            fields["steps_per_generation"] = round(self.settings.rollout / fields["per_device_train_batch_size"])
        return " ".join(f"--{name} {recipes.as_argument(value)}" for name, value in fields.items())

    def _more_gpus(self) -> str:
        for gpus in (gpus for gpus in _GPUS if gpus > self.machine.gpus and self.settings.policy.bits is None):
            if max(phases(replace(self.settings, sharded_over=gpus), self.machine.memory)) <= self.machine.memory:
                return f"share the model over {gpus} such GPUs with FSDP2 or ZeRO-3 (see --gpus {gpus})"
        return "take a smaller model, or shorter completions (--max_completion_length)"


def plan(recipe: Recipe, machine: Machine, model: str | None = None, prompt_tokens: int | None = None) -> Plan:
    """Plans a recipe's memory and work on a machine.

    Args:
        recipe: The recipe from `troll.recipes.load`.
        machine: The machine, from `this_machine` or another one.
        model: The name or the folder of the model; by default the recipe's.
        prompt_tokens: The tokens of the longest prompt. Default: what `vllm_max_model_length` leaves, or 512.

    Raises:
        RecipeError: If the configuration of a model cannot be read, or the recipe names no model.
    """
    settings = settings_of(recipe, machine, model, prompt_tokens)
    known = prompt_tokens is not None or recipe.training.vllm_max_model_length is not None
    return Plan(recipe, settings, work_of(recipe, machine.gpus), machine, known)


def settings_of(recipe: Recipe, machine: Machine, model: str | None, prompt_tokens: int | None) -> Settings:
    """The settings of a recipe on which memory depends, for one GPU; see `plan`."""
    args, of_model = recipe.training, recipe.model
    name = model or of_model.model_name_or_path
    if name is None:
        raise RecipeError("no model: name one with --model_name_or_path")
    config = model_shape(name, recipe.task, of_model.model_revision, args.trust_remote_code)
    given = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]  # a string was parsed
    peft = get_peft_config(of_model)
    policy = Network(
        config,
        _dtype(given.get("dtype", of_model.dtype), config),
        peft,
        4 if of_model.load_in_4bit else 8 if of_model.load_in_8bit else None,
        bool(args.gradient_checkpointing),
        args.trust_remote_code,
    )
    assert args.steps_per_generation is not None and args.max_completion_length is not None  # set by the parent
    rollout = args.per_device_train_batch_size * args.steps_per_generation
    at_once = max(rollout, args.per_device_eval_batch_size if args.eval_strategy != "no" else 1)
    chunk: int | None = args.generation_chunk_size
    reads = SURROGATES[args.surrogate].reads_policies(args) and not args.always_on_policy
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return Settings(
        policy=policy,
        critic=_critic(recipe, policy) if args.advantage_estimator == "gae" else None,
        reference=args.beta > 0 and peft is None,
        kl=args.beta > 0,
        reward_model=_reward_model(recipe),
        autocast=half,
        optimiser=str(getattr(args.optim, "value", args.optim)),
        rows=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        rollout=rollout,
        updates=max(1, args.rollout_steps // args.gradient_accumulation_steps),
        prompt=_prompt_tokens(args, config, prompt_tokens),
        completion=args.max_completion_length,
        at_once=min(at_once, chunk or at_once),
        top_k=args.support_top_k if reads else 0,
        vllm=_vllm_share(args),
        sleeps=args.vllm_enable_sleep_mode,
        sharded_over=machine.gpus if machine.sharded else 1,
        on_gpu=machine.on_gpu,
    )


def _dtype(name: Any, config: Any) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    return (config.dtype or torch.float32) if name in (None, "auto") else getattr(torch, name)


def _critic(recipe: Recipe, policy: Network) -> Network:
    name = recipe.training.critic_model_name_or_path
    trusted = recipe.training.trust_remote_code
    config = policy.config if name is None else model_shape(name, recipe.task, trust_remote_code=trusted)
    return Network(config, torch.float32, policy.peft, None, policy.checkpointing, trusted)


def _reward_model(recipe: Recipe) -> Network | None:
    if recipe.task.reward_model is None:
        return None
    config = model_shape(recipe.task.reward_model, recipe.task)
    return Network(config, _dtype("auto", config))


def _prompt_tokens(args: TrollConfig, config: Any, longest: int | None) -> int:
    assert args.max_completion_length is not None
    context = args.vllm_max_model_length or getattr(config.get_text_config(), "max_position_embeddings", None)
    left = max(1, context - args.max_completion_length) if context else ASSUMED_PROMPT
    if longest is not None:
        return longest
    return left if args.vllm_max_model_length else min(left, ASSUMED_PROMPT)


def _vllm_share(args: TrollConfig) -> float | None:
    if not args.use_vllm:
        return None
    return args.vllm_gpu_memory_utilization if args.vllm_mode == "colocate" else 0.0


def work_of(recipe: Recipe, gpus: int) -> Work:
    """The work of a recipe.

    Args:
        recipe: The recipe from `troll.recipes.load`.
        gpus: The number of GPUs, each with the recipe's batches.
    """
    args, task = recipe.training, recipe.task
    assert args.steps_per_generation is not None and args.max_completion_length is not None  # set by the parent
    assert args.num_generations is not None
    completions = args.per_device_train_batch_size * args.steps_per_generation * gpus
    return Work(
        updates=args.max_steps if args.max_steps > 0 else None,
        updates_per_rollout=args.rollout_steps / args.gradient_accumulation_steps,
        prompts=completions // args.num_generations,
        completions=completions,
        completion=args.max_completion_length,
        batch=args.per_device_train_batch_size * args.gradient_accumulation_steps * gpus,
        evaluations=_evaluations(args),
        eval_tasks=1 + len(task.eval_tasks or []),
        eval_problems=task.eval_size,
        eval_samples=args.num_generations_eval or args.num_generations,
        eval_batch=args.per_device_eval_batch_size * gpus,
    )


def _evaluations(args: TrollConfig) -> int | None:
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy == "no":
        return int(args.eval_on_start)
    if strategy == "epoch" or args.max_steps <= 0:
        return None
    every = args.eval_steps or args.logging_steps
    every = every if every >= 1 else math.ceil(every * args.max_steps)
    return int(args.eval_on_start) + int(args.max_steps // every)


def this_machine(
    gpu_memory: float | None = None, gpus: int = 1, sharded: bool = False, use_cpu: bool = False
) -> Machine:
    """This machine, by its GPU, or else its RAM.

    Args:
        gpu_memory: The GiB of each GPU; None for what this machine has.
        gpus: The processes of the run.
        sharded: Whether they share the model.
        use_cpu: Whether a GPU of this machine is not used.
    """
    if gpu_memory is not None:
        return Machine(gpu_memory * GIB, f"a GPU of {gpu_memory:g} GiB", True, gpus, sharded)
    if torch.cuda.is_available() and not use_cpu:
        size = torch.cuda.get_device_properties(0).total_memory
        return Machine(size, f"the {_gib(size)} GiB of {torch.cuda.get_device_name(0)}", True, gpus, sharded)
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(size, f"the {_gib(size)} GiB of RAM here", False, gpus, sharded)


def machine_of_run(args: TrollConfig) -> Machine:
    """This machine for a run that has been started, with the number of its processes."""
    deepspeed = args.deepspeed_plugin
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true" or (deepspeed is not None and deepspeed.zero_stage == 3)
    return this_machine(None, args.world_size, sharded and args.world_size > 1, args.use_cpu)


def longest_prompt(
    tasks: Sequence[Task], processor: PreTrainedTokenizerBase | ProcessorMixin, variables: dict[str, Any]
) -> int | None:
    """The tokens of the longest prompt of some tasks; None if prompts have images.

    Args:
        tasks: The tasks to train and evaluate on.
        processor: The policy's tokenizer or processor.
        variables: The variables of the chat template.
    """
    found = 0
    for data in (data for task in tasks for data in (task.train_dataset, task.eval_dataset) if len(data)):
        if {"image", "images"} & set(data.column_names):
            return None
        prompts = sorted(data["prompt"], key=lambda prompt: len(str(prompt)))[-_LONGEST:]
        for prompt in prompts:
            if isinstance(prompt, str):
                text = prompt
            else:
                text = str(
                    processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **variables)
                )
            found = max(found, len(processor(text=text)["input_ids"]))
    return found or None


def show(found: Plan, console: Console) -> None:
    """Prints the table and the last lines."""
    table = Table(title=f"{found.recipe.name}: {found.recipe.model.model_name_or_path}, GiB of one GPU")
    for column in ("", *PHASES):
        table.add_column(column, justify="right" if column else "left")
    for name, sizes in found.table.items():
        if any(sizes):
            table.add_row(name, *(_gib(size) if size else "–" for size in sizes))
    table.add_section()
    table.add_row("total", *map(_gib, found.totals))
    console.print(table)
    for line in found.lines():
        say(console, line)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2f}"


def _short(count: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:,.0f}"
