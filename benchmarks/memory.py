"""The memory that each recipe for a GPU needs, by phase, computed without a GPU and without the models' weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import AutoConfig
from trl import get_peft_config

from benchmarks.memory_without_data import Batch, Network, generation, parameters, score, update
from troll_lab import recipes
from troll_lab.recipes import Recipe
from troll_lab.runs.text import markdown_table
from troll_lab.runs.toy_model import character_tokenizer
from troll_lab.runs.toy_network import TOY_MODELS, model_config
from troll_lab.trl import LabConfig

GIB = 1 << 30

#: The phases of a run: completions are generated, then scored by the reward model and the policy, then trained on.
PHASES = ("generate", "score", "update")

#: The configurations of the recipes' models.
SHAPES = Path(__file__).with_name("shapes")


class Machine(NamedTuple):
    """The bytes of each GPU, or of the RAM; and the number of GPUs, which share the model by FSDP2 or ZeRO-3."""

    memory: float
    on_gpu: bool = True
    gpus: int = 1


#: The recipes for a GPU, and the machine that each is for.
RECIPES = {
    "smollm2-gsm8k": Machine(24 * GIB),
    "gsm8k-qwen3-24gb": Machine(24 * GIB),
    "gsm8k-qwen3-80gb": Machine(80 * GIB),
    "math-qwen3": Machine(80 * GIB),
    "mbpp-qwen3": Machine(80 * GIB),
    "reward-model": Machine(80 * GIB),
    "qwen2.5-vl": Machine(80 * GIB),
    "qwen3-moe": Machine(80 * GIB, gpus=8),
}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints the table of docs/performance.md, and returns it with the bytes of every part; nothing is repeated."""
    rows, lines = [], []
    for name, machine in RECIPES.items():
        # transformers refuses bf16 without a GPU; on the recipe's machine vLLM generates.
        recipe = recipes.load(name, [] if device == "cuda" else ["--use_cpu", "true"], vllm=True)
        found = Estimate(recipe, machine)
        size = f"{machine.memory / GIB:g} GiB"
        lines.append(
            [
                *(
                    f"`{name}`",
                    str(recipe.model.model_name_or_path),
                    size if machine.gpus == 1 else f"{machine.gpus} x {size}",
                ),
                *(str(found.prompt), str(recipe.training.max_completion_length)),
                *(f"{total / GIB:.1f}" for total in found.totals),
            ]
        )
        rows.append({"recipe": name, "phases": PHASES, "bytes": found.table})
    head = ["recipe", "model", "GPU", "tokens of a prompt", "of a completion", *PHASES]
    Console().print(markdown_table(head, lines), soft_wrap=True, markup=False, highlight=False)
    return rows


@dataclass(frozen=True)
class Estimate:
    """A recipe's memory on a machine: an upper bound, with completions and prompts of full length.

    Attributes:
        recipe: The recipe from `troll_lab.recipes.load`.
        machine: The machine.
        longest_prompt: The number of tokens of the longest prompt. Default: `vllm_max_model_length` minus the longest
            completion, or 512.
    """

    recipe: Recipe
    machine: Machine
    longest_prompt: int | None = None

    @cached_property
    def policy(self) -> Network:
        """The model that is trained."""
        args, model = self.recipe.training, self.recipe.model
        config = model_shape(str(model.model_name_or_path))
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
        """The bytes on one GPU, by what they hold and by phase."""
        args, task, policy, prompt = self.recipe.training, self.recipe.task, self.policy, self.prompt
        shards = self.machine.gpus
        half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        batch = Batch(args.per_device_train_batch_size, prompt, args.max_completion_length or 0, half)
        reads = args.reads_policies and not args.always_on_policy
        held = parameters(policy, str(getattr(args.optim, "value", args.optim)))
        # FSDP gathers layers in the dtype of their products: two ahead, the weights in no layer, and their gradients.
        computing = policy if shards == 1 else replace(policy, dtype=half or policy.dtype)
        gathered = held.gathered * computing.dtype.itemsize if shards > 1 else 0
        generating = (0, 0) if args.use_vllm else generation(computing, batch._replace(rows=_at_once(args)))
        top_k, accumulates = args.support_top_k if reads else 1, shards > 1 or args.gradient_accumulation_steps > 1
        scoring, updating = score(computing, batch, top_k), update(computing, batch, top_k, accumulates)
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
            critic = parameters(replace(policy, dtype=torch.float32, bits=None))
            kept = (critic.weights + critic.optimiser) / shards
            table["critic"] = (kept, kept, kept + critic.gradients / shards)
        if args.beta > 0:  # TRL's own head reads the reference: tiles of 4096 x 32,768, and float32 copies on a CPU
            table["reference model"] = (0, 0, 0) if policy.peft else table["weights"]
            copies = 0 if self.machine.on_gpu else 16 * min(policy.config.get_text_config().vocab_size, 32768)
            tile = min(batch.rows * (prompt + batch.completion), 4096) * (
                32768 * (half or policy.dtype).itemsize + copies
            )
            scoring = max(scoring, score(computing, batch, None) + tile)
        if task.reward_model is not None:  # it reads the whole rollout in one call
            config = model_shape(task.reward_model)
            reward = Network(config, config.dtype or torch.float32)
            table["reward model"] = (parameters(reward).weights / shards,) * 3
            scoring = max(scoring, score(reward, batch._replace(rows=rollout, autocast=None), None))
        return {**table, "activations": (generating[1], scoring, updating)}

    @property
    def totals(self) -> tuple[float, ...]:
        """The bytes on one GPU by phase."""
        return tuple(map(sum, zip(*self.table.values(), strict=True)))


def _at_once(args: LabConfig) -> int:
    """The completions that transformers generates in one call, at most."""
    rollout = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    most = max(rollout, args.per_device_eval_batch_size if args.eval_strategy != "no" else 1)
    return min(most, args.generation_chunk_size or most)


def _vllm_share(args: LabConfig) -> float:
    """The part of each GPU that vLLM takes."""
    return float(args.vllm_gpu_memory_utilization) if args.use_vllm and args.vllm_mode == "colocate" else 0.0


def model_shape(name: str) -> Any:
    """The configuration of a model: of a folder, or of those in `shapes`."""
    if name in TOY_MODELS:
        return model_config(character_tokenizer(), name)
    return AutoConfig.from_pretrained(name if Path(name).is_dir() else SHAPES / f"{name.replace('/', '--')}.json")
