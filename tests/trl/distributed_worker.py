"""One process of test_distributed: ``accelerate launch -m tests.trl.distributed_worker MODE FOLDER MODEL=PATH...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tests.trl import heads, tiny
from troll.rewards.grading import Grader, Verdict
from troll.trl import TrollTrainer
from troll.trl.trainer import OLD_POLICY

#: Sequence means and fixed lengths average over processes; so does DAPO, which divides by the tokens of all of them.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "tail": "floor", "support_top_k": 8},
    "dapo": {"loss_type": "dapo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "sequences share": {"loss_type": "grpo", "constraint": "sequence"},
    "the batch shares": {"loss_type": "grpo", "constraint": "batch", "advantage_estimator": "rloo"},
    "REINFORCE++": {"loss_type": "grpo", "advantage_estimator": "reinforce_plus_plus"},
    "REINFORCE++ baseline": {"loss_type": "grpo", "advantage_estimator": "reinforce_plus_plus_baseline"},
    "PPO": {"loss_type": "grpo", "advantage_estimator": "gae", "critic_learning_rate": 1e-2, "gae_lambda": 0.9},
    "adaptive bounds": {
        "loss_type": "grpo",
        "kl_bound_schedule": "hold_kl",
        "kl_bound_schedule_kwargs": {"target": 1e-3, "rate": 1.0, "smoothing": 0.0},
        "kl_bound_entropy_exponent": 1.0,
        "kl_bound_negative_ratio": 0.5,
    },
}

#: FSDP: a case and a model. Gemma 2 ties its head to its embeddings.
SHARDED = {
    "own head": ("gspo", "llama"),
    "own head, reference": ("dapo", "llama"),
    "tied head": ("grpo", "gemma2"),
}


class SameRollouts(TrollTrainer):
    """Draws the same completions for the same prompts, in however many processes."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        assert self.max_completion_length is not None
        seen: dict[tuple[int, ...], int] = {}
        completions = []
        for ids in prompt_ids:
            number = seen[tuple(ids)] = seen.get(tuple(ids), 0) + 1
            length = 2 + (sum(ids) + 3 * number) % (self.max_completion_length - 1)
            completions.append([7 + (sum(ids) + 5 * number * i + i * i) % 40 for i in range(length)])
        return completions, None


class KeepGradients(TrainerCallback):
    """What every update was made of."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = tiny.gradients(getattr(model, "module", model))
        self.gradients.append({name: whole(gradient) for name, gradient in gradients.items()})


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def in_order_of_processes(batch: dict[str, Any], processes: int = 2) -> dict[str, Any]:
    """One process's rollout, so that its micro-batches hold what those of two processes hold together."""
    steps, size = 2 if len(batch["advantages"]) == 8 else 4, len(batch["advantages"])
    order = torch.arange(size).view(processes, steps, -1).transpose(0, 1).flatten()
    return {name: _in_order(value, order) for name, value in batch.items()}


def _in_order(value: Any, order: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order]
    return value[order] if isinstance(value, torch.Tensor) and value.ndim else value


def train(make: tiny.Maker, name: str, processes: int, model: str = "llama") -> dict[str, Any]:
    """Gradients and logged metrics of the two updates of a rollout: the first on-policy, the second not."""
    keep = KeepGradients()
    trainer = make(
        SameRollouts,
        model,
        callbacks=[keep],
        per_device_train_batch_size=4 // processes,
        optim="sgd",
        learning_rate=1e-2,
        max_steps=2,
        max_grad_norm=0.0,
        kl_bound=0.01,
        **({"ddp_backend": "gloo"} if processes > 1 else {}),
        **CASES[name],
    )
    assert trainer.accelerator.num_processes == processes
    # TRL shuffles the rollout of each process by itself.
    shuffle = in_order_of_processes if processes == 1 else dict
    with mock.patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", shuffle):
        trainer.train()
    return {"gradients": keep.gradients, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}


class NumberIsAnswer(Grader):
    """The answer is the problem's number, and right from 5 on."""

    votes = True

    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        return [Verdict(float(number >= 5), str(number), "") for number in columns["number"]]


#: Problems and, of each process, completions in a batch: some left over, or none for a process.
EVALUATIONS = [(7, 4), (5, 6), (1, 2), (9, 2), (3, 8)]


def evaluate(make: tiny.Maker, problems: int, batch: int) -> dict[str, float]:
    """The metrics of an evaluation."""
    trainer = make(
        SameRollouts,
        reward_funcs=NumberIsAnswer(),
        eval_dataset=tiny.make_dataset(problems).add_column("number", list(range(problems))),
        num_generations_eval=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=batch,
        ddp_backend="gloo",
    )
    trainer.evaluate()
    return dict(trainer.state.log_history[-1])


class PoisonOneProcess(TrainerCallback):
    """After the first step, the second process alone computes NaN."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 1:
            getattr(model, "module", model).get_output_embeddings().weight.data.fill_(torch.nan)


def fail(make: tiny.Maker) -> str:
    trainer = make(SameRollouts, callbacks=[PoisonOneProcess()], per_device_train_batch_size=2, ddp_backend="gloo")
    try:
        trainer.train()
    except FloatingPointError as error:
        return str(error)
    return "trained on"


def fsdp_on_cpu() -> None:
    """accelerate takes FSDP on devices alone, and nothing in it or in torch needs one: calls the CPU a device."""
    original = PartialState.__init__

    def init(self: PartialState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def mixed_precision(make: tiny.Maker) -> dict[str, Any]:
    trainer = make(SameRollouts, bf16=True, per_device_train_batch_size=2, max_steps=2, kl_bound=0.01)
    trainer.train()
    (dtype,) = {policy.log_probs.dtype for inputs in trainer._buffered_inputs for policy in inputs[OLD_POLICY]}
    return {"dtype": dtype, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}


def gradients_through(name: str, *, sharded: bool) -> dict[str, torch.Tensor]:
    """With a head that is a unit of FSDP by itself: its weights are still shards when the forward needs them."""
    model, inputs = heads.with_heads(heads.MODELS[name]()), heads.batch()
    if sharded:
        fully_shard(model.get_output_embeddings())
        fully_shard(model)
    heads.pull(model(**inputs, old_token_ids=heads.captured_ids(model, inputs))).backward()
    return {name: whole(gradient) for name, gradient in tiny.gradients(model).items()}


def main() -> None:
    torch.set_num_threads(1)
    mode, folder, *models = sys.argv[1:]
    paths = dict(model.split("=", 1) for model in models)
    make = tiny.Maker(lambda architecture: Path(paths[architecture]), Path(folder, "out"))
    results: dict[str, Any]
    if mode == "ddp":
        results = {name: train(make, name, processes=2) for name in CASES} | {"error": fail(make)}
        results["evaluations"] = [evaluate(make, *sizes) for sizes in EVALUATIONS]
    else:
        fsdp_on_cpu()
        results = {name: train(make, case, 2, model) for name, (case, model) in SHARDED.items()}
        results["mixed precision"] = mixed_precision(make)
        results["plain"], results["biased"] = (gradients_through(name, sharded=True) for name in ("plain", "biased"))
    torch.save(results, Path(folder, f"{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
