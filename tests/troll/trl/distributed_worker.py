"""What either of two processes does for test_distributed; see `tests.troll.trl.worker`."""

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from tests.troll.trl import tiny
from tests.troll.trl.resuming import SHARDS_ALONE, interrupted
from tests.troll.trl.sharding import LORA, KeepGradients, is_sharded, through_heads
from troll.trl import TrollTrainer, monitor
from troll.trl.trainer import OLD_POLICY

#: Sequence means and fixed lengths average over processes; so does DAPO, which divides by the tokens of all of them.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"loss_type": "dapo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "sequences share": {"constraint": "sequence"},
    "REINFORCE++": {"advantage_estimator": "reinforce_plus_plus"},
    # The rate of the second update decides the gradients of the third.
    "KL target": {"surrogate": "clip", "kl_target": 0.3, "learning_rate": 1.0, "max_steps": 4},
}

KL_BOUND = 0.01

#: What needs a look once.
MORE_CASES: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "support_top_k": 8},
    "diagnostics": {"diagnostics_steps": 1},
    "LoRA": {"peft_config": LORA, "learning_rate": 1.0},
}

#: Sharded back ends: a case and a model. Gemma 2 ties its head to its embeddings. The others take longer.
SHARDED = {
    "own head, reference": ("dapo", "llama"),
    "tied head": ("grpo", "gemma2"),
    "KL target": ("KL target", "llama"),
}
OTHERS = {
    "own head": ("gspo", "llama"),
    "accumulation": ("dr_grpo", "llama"),
    "sequences share": ("sequences share", "llama"),
    "diagnostics": ("diagnostics", "llama"),
    "LoRA": ("LoRA", "llama"),
}

#: Models by their heads.
HEADS = ("plain", "tied", "biased")


class SameRollouts(TrollTrainer):
    """Draws the same completions for the same prompts, in however many processes, and keeps what it captured."""

    captured: list[Any] | None = None

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        assert self.max_completion_length is not None
        self.captured = None  # of the rollout before
        seen: dict[tuple[int, ...], int] = {}
        completions = []
        for ids in prompt_ids:
            number = seen[tuple(ids)] = seen.get(tuple(ids), 0) + 1
            length = 2 + (sum(ids) + 3 * number) % (self.max_completion_length - 1)
            completions.append([7 + (sum(ids) + 5 * number * i + i * i) % 40 for i in range(length)])
        return completions, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self.captured is None:
            self.captured = copy.deepcopy(self.policies())
        return super()._compute_loss(model, inputs)

    def policies(self) -> list[Any]:
        """The old policies of the rollout, where there are some."""
        buffer: list[dict[str, Any]] = self._buffered_inputs or []
        return [policy for inputs in buffer for policy in inputs.get(OLD_POLICY, [])]


def in_order_of_processes(batch: dict[str, Any], processes: int = 2) -> dict[str, Any]:
    """One process's rollout, so that its micro-batches hold what those of two processes hold together."""
    steps, size = 2 if len(batch["advantages"]) == 8 else 4, len(batch["advantages"])
    order = torch.arange(size).view(processes, steps, -1).transpose(0, 1).flatten()
    return {name: _in_order(value, order) for name, value in batch.items()}


def _in_order(value: Any, order: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order]
    return value[order] if isinstance(value, torch.Tensor) and value.ndim else value


def train(
    make: tiny.Maker,
    name: str,
    processes: int,
    model: str = "llama",
    kind: type[SameRollouts] = SameRollouts,
    cases: dict[str, dict[str, Any]] = CASES | MORE_CASES,
) -> dict[str, Any]:
    """Gradients and logged metrics of the updates of rollouts, of two each: the first on-policy, the second not."""
    torch.manual_seed(0)  # of the adapters
    keep = KeepGradients()
    settings = {"loss_type": "grpo", "kl_bound": KL_BOUND, "per_device_train_batch_size": 4 // processes}
    settings |= {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 2, "max_grad_norm": 0.0}
    if processes > 1:
        settings["ddp_backend"] = "gloo"
    trainer = make(kind, model, callbacks=[keep], **{**settings, **cases[name]})
    assert trainer.accelerator.num_processes == processes
    # TRL shuffles the rollout of each process by itself.
    shuffle = in_order_of_processes if processes == 1 else dict
    deepspeed = keep.from_deepspeed() if trainer.is_deepspeed_enabled else nullcontext()
    with deepspeed, mock.patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", shuffle):
        trainer.train()
    return {
        "gradients": keep.gradients,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "shards": all(is_sharded(parameter) for parameter in trainer.model.parameters()),
        "old policies survive": tiny.same_policies(trainer.captured, trainer.policies()),
    }


class PoisonOneProcess(TrainerCallback):
    """After the first step, only the second process computes NaN."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 1:
            getattr(model, "module", model).get_output_embeddings().weight.data.fill_(torch.nan)


def fail(make: tiny.Maker) -> str:
    trainer = make(SameRollouts, callbacks=[PoisonOneProcess()], per_device_train_batch_size=2, ddp_backend="gloo")
    return said(FloatingPointError, trainer.train)


def silences(make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """What each process says of runs of which nothing, or nothing good, would come."""
    size: dict[str, Any] = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "output_dir": str(folder)}
    settings = {**size, "max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    found: dict[str, Any] = {
        "few": said(ValueError, make(SameRollouts, train_dataset=tiny.make_dataset(1), **size).train)
    }
    with mock.patch.object(monitor, "IDLE_UPDATES", 2), warnings.catch_warnings(record=True) as idle:
        warnings.simplefilter("always")
        make(SameRollouts, learning_rate=1e-9, **settings).train()
    with warnings.catch_warnings(record=True) as resumed:
        warnings.simplefilter("always")
        trainer = make(SameRollouts, **{**settings, "kl_bound": 1e-3, "learning_rate": 1e-9, "max_steps": 8})
        trainer.train(resume_from_checkpoint=True)
    return found | {"idle": [str(each.message) for each in idle], "resumed": [str(each.message) for each in resumed]}


def mixed_precision(make: tiny.Maker) -> dict[str, Any]:
    # transformers has it on a CPU only where that is not the device.
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True):
        size: dict[str, Any] = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
        trainer = make(SameRollouts, bf16=True, max_steps=2, kl_bound=0.01, **size)
    trainer.train()
    (dtype,) = {policy.log_probs.dtype for inputs in trainer._buffered_inputs for policy in inputs[OLD_POLICY]}
    return {"dtype": dtype, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}


def said(error: type[Exception], action: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The text of an error, or "done"."""
    try:
        action(*arguments, **keywords)
    except error as raised:
        return str(raised)
    return "done"


class ByPath(tiny.Maker):
    """Hands out a model's path, so that the back end may load it in shards."""

    def model(self, architecture: str = "llama") -> Any:
        return str(self.model_path(architecture))


def updates(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """What every back end is tested for."""
    make = make if mode == "ddp" else ByPath(**vars(make))
    # The search begins at the rate of the other runs.
    resumed = {"whole": interrupted(make, folder / "whole", kl_target=0.3, learning_rate=0.3)}
    if mode == "ddp":
        # Each rollout has all prompts.
        epochs: dict[str, Any] = {"train_dataset": tiny.make_dataset(4), "per_device_train_batch_size": 4}
        resumed["after an epoch"] = interrupted(make, folder / "epoch", **epochs)
        results: dict[str, Any] = {name: train(make, name, processes=2) for name in CASES}
        results |= {"error": fail(make), "silences": silences(make, folder / "silences")}
        return results | {"interrupted": resumed}
    results = {name: train(make, case, 2, model) for name, (case, model) in SHARDED.items()}
    results["mixed precision"] = mixed_precision(make)
    return results | {f"{name} LM head": through_heads(name, mode) for name in HEADS} | {"interrupted": resumed}


def the_rest(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """The slow cases: adapters, other losses, and checkpoints of shards only."""
    make = make if mode == "ddp" else ByPath(**vars(make))
    resumed = {"LoRA": interrupted(make, folder / "LoRA", peft_config=LORA, learning_rate=1e-2)}
    if mode in SHARDS_ALONE:
        with mock.patch.dict(os.environ, SHARDS_ALONE[mode]):
            resumed["shards"] = interrupted(make, folder / "shards")
    return {name: train(make, case, 2, model) for name, (case, model) in OTHERS.items()} | {"interrupted": resumed}
