"""What test_megatron runs in four processes: verl's whole Megatron engine, in one layout after the other."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from megatron.core import parallel_state as mpu
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss

from tests.verl import worker
from tests.verl.actor import (
    ACTOR,
    SMALL,
    Step,
    as_batch,
    captured,
    free_port,
    nested,
    place,
    policy_loss,
    rollout,
    save_model,
    with_scores,
)
from tests.verl.megatron_cpu import on_cpu
from troll.verl.hooks import Hook

CASES = worker.CASES | {"entropy": {"entropy_coeff": 0.1, "temperature": 0.7}}

PLUG_IN = ("hydra.searchpath=[pkg://troll.verl.config]", "model_engine=megatron", "+troll=megatron")


def save_divisible_model(folder: Path) -> Path:
    """The model of the other tests, with a vocabulary that four processes can hold slices of."""
    model = AutoModelForCausalLM.from_pretrained(save_model(folder))
    model.resize_token_embeddings(100)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Layout:
    """How the model and its tokens are spread over four processes; what is left is data parallelism.

    Attributes:
        name: Of the layout.
        tensor: Processes over which tensors are spread, the vocabulary too.
        context: Processes over which every sequence is spread.
        pipeline: Stages.
        packed: Whether batches are packed.
        cases: Of :data:`CASES`.
        heads: Whether the LM head is read, one after the other; else its logits.
        settings: Further ones of ``actor_rollout_ref.actor.megatron``.
        per_token: Whether Megatron divides by tokens, as Megatron-Bridge has it under context parallelism.
    """

    name: str
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    packed: bool = True
    cases: tuple[str, ...] = ("token",)
    heads: tuple[bool, ...] = (True, False)
    settings: tuple[str, ...] = ()
    per_token: bool = False

    @property
    def data(self) -> int:
        """Processes over which batches are divided."""
        return 4 // (self.tensor * self.context * self.pipeline)

    def overrides(self) -> list[str]:
        """On the command line."""
        sizes = {"tensor_model": self.tensor, "pipeline_model": self.pipeline, "context": self.context}
        return [
            f"actor_rollout_ref.model.use_remove_padding={self.packed}",
            *(f"{ACTOR}.megatron.{name}_parallel_size={size}" for name, size in sizes.items()),
            *(f"{ACTOR}.megatron.{setting}" for setting in self.settings),
            f"+{ACTOR}.megatron.override_transformer_config.calculate_per_token_loss={self.per_token}",
        ]


LAYOUTS = (
    Layout("tensor and data", tensor=2, cases=tuple(CASES)),
    Layout("tensor and data, padded", tensor=2, packed=False, cases=("sequence",)),
    Layout("tensor alone", tensor=4),
    Layout("context and data", context=2, cases=("token", "batch")),
    Layout("tensor and context", tensor=2, context=2, cases=tuple(CASES)),
    Layout("tensor and context, padded", tensor=2, context=2, packed=False, cases=("sequence",)),
    Layout("static packs", tensor=2, context=2, settings=("pad_to_length=true", "pad_to_length_bucket=64")),
    Layout("per-token loss", tensor=2, context=2, per_token=True),
    Layout("pipeline and tensor", tensor=2, pipeline=2, cases=("token", "batch")),
    Layout("pipeline and data, padded", pipeline=2, packed=False),
)


def configuration(model: Path, *overrides: str) -> DictConfig:
    """verl's own, of its Hydra files, for Megatron."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                *PLUG_IN,
                "algorithm.adv_estimator=grpo",
                "trainer.device=cpu",
                "trainer.n_gpus_per_node=4",
                "data.train_batch_size=16",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
                f"{ACTOR}.megatron.vanilla_mbridge=true",
                # Transformer Engine alone has norms for sequence parallelism. Clipping and this optimizer ask for CUDA.
                f"{ACTOR}.megatron.sequence_parallel=false",
                f"+{ACTOR}.megatron.override_transformer_config.sequence_parallel=false",
                f"{ACTOR}.megatron.use_distributed_optimizer=false",
                f"{ACTOR}.optim.clip_grad=0",
                f"{ACTOR}.optim.lr=3e-3",
                f"{ACTOR}.optim.total_training_steps=10",
                f"{ACTOR}.ppo_mini_batch_size=4",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.n=1",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                *policy_loss(*SMALL),
                *overrides,
            ],
        )


@dataclass
class MegatronActor:
    """What verl's `ActorRolloutRefWorker` makes of an actor on Megatron, in float32.

    Attributes:
        config: verl's.
        steps: The updates so far, under transformers' names.
    """

    config: DictConfig
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        actor.model_config = model
        # verl's configuration takes half precision alone, in which nothing could be compared.
        object.__setattr__(actor.engine, "dtype", "float32")
        settings = TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
        engine = settings.engine_config
        engine.use_dynamic_bsz = actor.use_dynamic_bsz
        engine.infer_micro_batch_size_per_gpu = 2
        engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        engine.use_remove_padding = model.use_remove_padding
        self.actor = actor
        self.worker = TrainingWorker(config=settings)
        self.worker.reset()
        self.worker.set_loss_fn(partial(ppo_loss, config=actor))
        self.engine = self.worker.engine
        self._optimizer_step = self.engine.optimizer_step
        self.engine.optimizer_step = self._recorded_step
        self._initial = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.engine.module for p in chunk.parameters()]

    def reset(self, loss_agg_mode: str = "token-mean", entropy_coeff: float = 0.0, **changes: Any) -> MegatronActor:
        """The network as it was built, and other settings of its loss."""
        for parameter, value in zip(self._parameters(), self._initial, strict=True):
            parameter.data.copy_(value)
        optimizer = self.engine.optimizer
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            each.optimizer.state.clear()  # so that no case depends on those before it
        self.steps.clear()
        settings = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor.policy_loss)
        for name, value in changes.items():
            object.__setattr__(settings, name, value)
        object.__setattr__(self.actor, "policy_loss", settings)
        object.__setattr__(self.actor, "loss_agg_mode", loss_agg_mode)
        object.__setattr__(self.actor, "entropy_coeff", entropy_coeff)
        self.engine.trust_region = settings
        return self

    def exported(self) -> dict[str, Tensor]:
        """The whole parameters, under transformers' names, on every process."""
        return {name: value.detach().clone() for name, value in self.engine.bridge.export_weights(self.engine.module)}

    def _recorded_step(self) -> float:
        before, own = self.exported(), [p.detach().clone() for p in self._parameters()]
        for parameter in self._parameters():
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        gradients = self.exported()
        for parameter, value in zip(self._parameters(), own, strict=True):
            parameter.data.copy_(value)
        self.steps.append(Step(before, gradients))
        return self._optimizer_step()

    def score(self, batch: TensorDict) -> TensorDict:
        """The batch with what a capture returned of it, as verl's dispatch hands it to all processes of a replica."""
        batch = batch.copy()
        lengths = batch["input_ids"].offsets().diff().tolist()
        tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=True, global_token_num=lengths)
        scores = self.worker.infer_batch(batch)
        answer = None if scores is None else list(scores["log_probs"].unbind())
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (mpu.get_data_parallel_rank(), answer))
        own = next(a for replica, a in answers if replica == mpu.get_data_parallel_rank() and a is not None)
        return with_scores(batch, TensorDict({"log_probs": nested(own)}, [len(batch)]))

    def update(self, batch: TensorDict) -> dict[str, Any]:
        """The updates of one rollout; verl's metrics, a list each, from the first process that has any."""
        batch = batch.copy()
        tu.assign_non_tensor(
            batch,
            global_batch_size=4,
            mini_batch_size=4,
            epochs=1,
            seed=3,
            calculate_entropy=self.actor.entropy_coeff != 0,
            dataloader_kwargs={"shuffle": False},
        )
        output = self.worker.train_mini_batch(batch)
        metrics: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(metrics, None if output is None else dict(tu.get(output, "metrics")))
        return next(m for m in metrics if m)


def left_out(actor: MegatronActor) -> dict[str, Any]:
    """An update of which the last stage's last process computes NaN; and the next one."""
    actor.reset()
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    scored = actor.score(as_batch(rollout()[replica::replicas]))
    before = [p.detach().clone() for p in actor._parameters()]
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        norm = unwrap_model(actor.engine.module[0]).decoder.final_layernorm
        hook = norm.register_forward_hook(lambda _, __, hidden: hidden * torch.nan)
    metrics = actor.update(scored)
    if last:
        hook.remove()
    unchanged = all(bool((p == old).all()) for p, old in zip(actor._parameters(), before, strict=True))
    later = actor.update(scored)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, unchanged)
    return {"metrics": metrics, "unchanged": everywhere, "later": later}


def trained(actor: MegatronActor, samples: list[Any], temperature: float = 1.0, **settings: Any) -> dict[str, Any]:
    """The old policies of a rollout, by sample; its updates; and by process, if it is a last stage and saw logits."""
    actor.reset(**settings)
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    with mock.patch.object(Hook, "begin", autospec=True, side_effect=Hook.begin) as begin:
        scored = actor.score(as_batch(samples[replica::replicas], temperature))
        metrics = actor.update(scored)
    asked: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(asked, (mpu.is_pipeline_last_stage(), begin.call_count))
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, (replica, captured(actor.engine, scored) if mpu.is_pipeline_last_stage() else None))
    by_replica = dict(record for record in records if record[1] is not None)
    return {
        "old_policies": [by_replica[i % replicas][i // replicas] for i in range(len(samples))],
        "steps": list(actor.steps),
        "metrics": metrics,
        "asked": asked,
    }


def main(rank: int, world: int, port: int, model: Path, out: Path, layouts: tuple[Layout, ...]) -> None:
    """Every case of every layout; what rank 0 found goes into a file."""
    os.environ.update(place(rank, world, port))
    torch.set_num_threads(1)
    found: dict[str, dict[Any, Any]] = {}
    with on_cpu():
        for layout in layouts:
            actor = MegatronActor(configuration(model, *layout.overrides()))
            found[layout.name] = {}
            for head in layout.heads:
                assert actor.engine.reads_head
                with mock.patch.dict(vars(actor.engine), reads_head=head):
                    for case in layout.cases:
                        found[layout.name][case, head] = trained(actor, rollout(), **CASES[case])
            if layout.pipeline > 1:
                found[layout.name]["left out"] = left_out(actor)
            mpu.destroy_model_parallel()
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def run(model: Path, out: Path, layouts: tuple[Layout, ...]) -> dict[str, dict[Any, Any]]:
    """Starts four processes that share one import of verl and Megatron, which takes longer than what they do."""
    multiprocessing.set_forkserver_preload([__name__])
    arguments = (4, free_port(), model, out, layouts)
    torch.multiprocessing.start_processes(main, arguments, nprocs=4, start_method="forkserver")
    return torch.load(out, weights_only=False)
