"""The memory of a recipe by phase, and its work, computed before anything is downloaded or loaded."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from trl import get_peft_config

from troll import recipes
from troll.recipes import Recipe, RecipeError
from troll.runs import memory
from troll.runs.memory import Batch, Network
from troll.runs.toy_model import character_tokenizer
from troll.runs.toy_network import TOY_MODELS, model_config
from troll.runs.toy_text_model import TextWarmUp
from troll.tasks import free_text
from troll.terminal import say
from troll.trl import TrollConfig

GIB = 1 << 30

#: The phases of a run: completions are generated, then scored by the reward model and the policy, then trained on.
PHASES = ("generate", "score", "update")


class Machine(NamedTuple):
    """The bytes of each GPU, or of the RAM; and the processes, which may share the model by FSDP2 or ZeRO-3."""

    memory: float
    name: str
    on_gpu: bool
    gpus: int
    sharded: bool


@dataclass(frozen=True)
class Plan:
    """A recipe's memory on a machine, and its work.

    Attributes:
        recipe: The recipe from `troll.recipes.load`.
        machine: The machine, from `this_machine`.
        model: The name or the folder of the model; by default the recipe's.
        longest_prompt: The number of tokens of the longest prompt. Default: `vllm_max_model_length` minus the longest
            completion, or 512.
        changes: The fields in which the recipe differs from the user's.
    """

    recipe: Recipe
    machine: Machine
    model: str | None = None
    longest_prompt: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Network:
        """The model that is trained; RecipeError if its configuration cannot be read, or the recipe names no model."""
        args, model = self.recipe.training, self.recipe.model
        name = self.model or model.model_name_or_path
        if name is None:
            raise RecipeError("no model: name one with --model_name_or_path")
        config = model_shape(name, self.recipe, model.model_revision)
        dtype = dict(args.model_init_kwargs or {}).get("dtype", model.dtype)  # type: ignore[arg-type]  # was parsed
        if not isinstance(dtype, torch.dtype):
            dtype = (config.dtype or torch.float32) if dtype in (None, "auto") else getattr(torch, dtype)
        bits = 4 if model.load_in_4bit else 8 if model.load_in_8bit else None
        return Network(config, dtype, get_peft_config(model), bits, bool(args.gradient_checkpointing))

    @property
    def prompt(self) -> int:
        """The tokens of a prompt, which are assumed if no setting gives their number."""
        args = self.recipe.training
        left = (args.vllm_max_model_length or 0) - (args.max_completion_length or 0)
        return self.longest_prompt or (left if left > 0 else 512)

    @cached_property
    def table(self) -> dict[str, tuple[float, ...]]:
        """The bytes on one GPU by row and phase; UnknownMemory if a model does not run on tensors without data."""
        args, task, policy, prompt = self.recipe.training, self.recipe.task, self.policy, self.prompt
        shards = self.machine.gpus if self.machine.sharded else 1
        half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        batch = Batch(args.per_device_train_batch_size, prompt, args.max_completion_length or 0, half)
        reads = args.reads_policies and not args.always_on_policy
        held = memory.parameters(policy, str(getattr(args.optim, "value", args.optim)))
        # FSDP gathers layers in the dtype of their products: two ahead, the weights in no layer, and their gradients.
        computing = policy if shards == 1 else replace(policy, dtype=half or policy.dtype)
        gathered = held.gathered * computing.dtype.itemsize if shards > 1 else 0
        generating = (0, 0) if args.use_vllm else memory.generation(computing, batch._replace(rows=_at_once(args)))
        top_k, accumulates = args.support_top_k if reads else 1, shards > 1 or args.gradient_accumulation_steps > 1
        scoring, updating = memory.score(computing, batch, top_k), memory.update(computing, batch, top_k, accumulates)
        share, rollout = _vllm_share(args) * self.machine.memory, batch.rows * (args.steps_per_generation or 1)
        # Ids, masks and log-probabilities, and the packed old policies, as if every token kept all K.
        waiting = rollout * (16 * prompt + (28 + (12 + 8 * top_k) * reads) * batch.completion)
        table: dict[str, tuple[float, ...]] = {
            "weights": (held.weights / shards,) * 3,
            "gradients": (0, 0, held.gradients / shards),
            "optimiser": (held.optimiser / shards,) * 3,
            "rollout and old policies": (waiting,) * 3,
            "gathered layers": (gathered, gathered, 2 * gathered),
            "keys and values": (generating[0], 0, 0),
            "vLLM's share": (share, 0, 0) if args.vllm_enable_sleep_mode else (share,) * 3,
        }
        if args.advantage_estimator == "gae":  # a critic of another model counts as one of the policy's size
            critic = memory.parameters(replace(policy, dtype=torch.float32, bits=None))
            kept = (critic.weights + critic.optimiser) / shards
            table["critic"] = (kept, kept, kept + critic.gradients / shards)
        if args.beta > 0:  # TRL's own head reads the reference: tiles of 4096 x 32,768, and float32 copies on a CPU
            table["reference model"] = (0, 0, 0) if policy.peft else table["weights"]
            copies = 0 if self.machine.on_gpu else 16 * min(policy.config.get_text_config().vocab_size, 32768)
            tile = min(batch.rows * (prompt + batch.completion), 4096) * (
                32768 * (half or policy.dtype).itemsize + copies
            )
            scoring = max(scoring, memory.score(computing, batch, None) + tile)
        if task.reward_model is not None:  # it reads the whole rollout in one call
            config = model_shape(task.reward_model, self.recipe)
            reward = Network(config, config.dtype or torch.float32)
            table["reward model"] = (memory.parameters(reward).weights / shards,) * 3
            scoring = max(scoring, memory.score(reward, batch._replace(rows=rollout, autocast=None), None))
        return {**table, "activations": (generating[1], scoring, updating)}

    @property
    def totals(self) -> tuple[float, ...]:
        """The bytes on one GPU by phase."""
        return tuple(map(sum, zip(*self.table.values(), strict=True)))

    @property
    def fits(self) -> bool:
        """Whether the largest phase fits into the memory."""
        return max(self.totals) <= self.machine.memory

    def lines(self) -> list[str]:
        """The lines to print below the table: the largest phase, and the work over all GPUs."""
        args, gpus, phase = self.recipe.training, self.machine.gpus, PHASES[self.totals.index(max(self.totals))]
        length = args.max_completion_length or 0
        assumed = "" if self.longest_prompt or args.vllm_max_model_length else " (assumed: --prompt_tokens)"
        updates, rows = args.rollout_steps / args.gradient_accumulation_steps, args.per_device_train_batch_size * gpus
        completions, batch = rows * (args.steps_per_generation or 1), rows * args.gradient_accumulation_steps
        rollouts = math.ceil(args.max_steps / updates) if args.max_steps > 0 else "as many as the data set fills"
        largest = f"{_gib(max(self.totals))} GiB" + (f" on each of {gpus} GPUs" if gpus > 1 else "")
        lines = [
            f"memory      at most {largest} ({phase}), of {self.machine.name}; with completions of {length} tokens and "
            f"prompts of {self.prompt}{assumed}",
            f"rollouts    {rollouts}: {completions // (args.num_generations or 1)} prompts, {completions} completions, "
            f"{updates:g} updates of {batch} completions each",
        ]
        if isinstance(rollouts, int):
            generated, trained = rollouts * completions * length, args.max_steps * batch * length
            lines.append(f"tokens      at most {generated:,} generated and {trained:,} trained on")
        return lines

    def remedy(self) -> str:
        """One line with the message that the run does not fit, and the change that makes it fit."""
        line = f"{self.recipe.name} takes up to {_gib(max(self.totals))} GiB, and {self.machine.name} is all there is"
        found = self
        while not found.fits and (lower := found._lower()):
            found = lower
        how = " ".join(f"--{name} {recipes.as_argument(value)}" for name, value in found.changes.items())
        if found.fits:
            return f"{line}: add {how} (then {_gib(max(found.totals))} GiB)"
        line += f" even with {how} ({_gib(max(found.totals))} GiB)" if how else ""
        return f"{line}: take a smaller model, shorter completions (--max_completion_length), or more GPUs"

    def _lower(self) -> Plan | None:
        """The plan with the least harmful change of settings that lowers the largest phase."""
        phase = self.totals.index(max(self.totals))
        for fields in self._changes(PHASES[phase]):
            other = self._changed(fields)
            with contextlib.suppress(memory.UnknownMemory):  # peft knows no layers to adapt in some models
                if other.totals[phase] < self.totals[phase]:
                    return other
        return None

    def _changes(self, phase: str) -> Iterator[dict[str, Any]]:
        args, share = self.recipe.training, _vllm_share(self.recipe.training)
        if phase == "generate" and not args.use_vllm:
            yield {"generation_chunk_size": max(1, _at_once(args) // 2)}
        if share and phase != "generate":
            yield {"vllm_enable_sleep_mode": True}
        # vLLM needs its own weights, in half precision, and some keys and values.
        if (share - 0.05) * self.machine.memory > 2.5 * memory.parameters(self.policy).numbers:
            yield {"vllm_gpu_memory_utilization": round(share - 0.05, 2)}
        if phase == "update":
            yield {"gradient_checkpointing": True}
        if phase != "generate" and args.per_device_train_batch_size % 2 == 0:  # and as many completions a rollout
            halves = {"per_device_train_batch_size": args.per_device_train_batch_size // 2}
            doubles = ("gradient_accumulation_steps", "steps_per_generation")
            yield halves | {name: 2 * getattr(args, name) for name in doubles}
        yield {"use_peft": True}
        # A reward model reads the whole rollout. Two updates of it are left at least: with one, every ratio is 1.
        updates, half = args.updates_per_rollout or 1, (args.steps_per_generation or 1) // 2
        completions = args.per_device_train_batch_size * self.machine.gpus * half
        if phase == "score" and updates % 4 == 0 and completions % (args.num_generations or 1) == 0:
            yield {"updates_per_rollout": updates // 2, "steps_per_generation": half}

    def _changed(self, fields: dict[str, Any]) -> Plan:
        training, model = copy.copy(self.recipe.training), copy.copy(self.recipe.model)
        for name, value in fields.items():
            setattr(training if hasattr(training, name) else model, name, value)
        if "steps_per_generation" not in self.recipe.settings:  # it follows from the others
            fields.pop("steps_per_generation", None)
        changes = {**self.changes, **fields}
        return replace(self, recipe=replace(self.recipe, training=training, model=model), changes=changes)


def _at_once(args: TrollConfig) -> int:
    """The completions that transformers generates in one call, at most."""
    rollout = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    most = max(rollout, args.per_device_eval_batch_size if args.eval_strategy != "no" else 1)
    return min(most, args.generation_chunk_size or most)


def _vllm_share(args: TrollConfig) -> float:
    """The part of each GPU that vLLM takes."""
    return float(args.vllm_gpu_memory_utilization) if args.use_vllm and args.vllm_mode == "colocate" else 0.0


def model_shape(name: str, recipe: Recipe, revision: str | None = None) -> Any:
    """The configuration of a model: the one that ships with the recipes, or else that of a folder or of the hub."""
    if name in TOY_MODELS:
        config = model_config(character_tokenizer(), name)
        config.vocab_size = TextWarmUp().vocab_size if recipe.task.task == free_text.NAME else config.vocab_size
        return config
    shipped = recipes.FOLDER / "shapes" / f"{name.replace('/', '--')}.json"
    source = shipped if shipped.is_file() and not Path(name).exists() else name
    try:
        return AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=recipe.training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"no configuration of {name!r} in a folder or on the hub: check name and network") from error


def this_machine(args: TrollConfig, gpu_memory: float | None = None, gpus: int | None = None) -> Machine:
    """This machine with the processes of a run; or `gpus` that share the model, with `gpu_memory` GiB each."""
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true" or getattr(args.deepspeed_plugin, "zero_stage", 0) == 3
    processes = (gpus or args.world_size, (gpus or args.world_size) > 1 and (sharded or gpus is not None))
    if gpu_memory is not None:
        return Machine(gpu_memory * GIB, f"a GPU of {gpu_memory:g} GiB", True, *processes)
    if torch.cuda.is_available() and not args.use_cpu:
        size = torch.cuda.get_device_properties(0).total_memory
        return Machine(size, f"the {_gib(size)} GiB of {torch.cuda.get_device_name(0)}", True, *processes)
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(size, f"the {_gib(size)} GiB of RAM here", False, *processes)


def show(found: Plan, console: Console) -> None:
    """Prints the table and the last lines."""
    model = found.model or found.recipe.model.model_name_or_path
    table = Table("", *PHASES, title=f"{found.recipe.name}: {model}, GiB of one GPU")
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
