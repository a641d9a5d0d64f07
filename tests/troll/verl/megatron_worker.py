"""What test_megatron runs in four processes: verl's whole Megatron engine, in one layout after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import transformer_impl

from tests.troll.verl import worker
from tests.troll.verl.actor import (
    ACTOR,
    SMALL,
    Actor,
    Sample,
    as_batch,
    captured,
    composed,
    nested,
    peaked_model,
    policy_loss,
    rollout,
    saved,
)
from tests.troll.verl.megatron_cpu import on_cpu
from troll.verl.hooks import Hook

CASES = {
    "token": worker.CASES["token"],
    "sequence": worker.CASES["sequence"],
    "entropy": {"entropy_coeff": 0.1, "temperature": 0.7},
}

SAMPLES = rollout()

PLUG_IN = ("model_engine=megatron", "+troll=megatron")


def save_divisible_model(folder: Path) -> Path:
    """The model of the other tests, with a vocabulary that four processes can hold slices of."""
    model = peaked_model()
    model.resize_token_embeddings(100)
    return saved(model, folder)


@dataclass(frozen=True)
class Layout:
    """How the model and its tokens are spread over four processes; what is left is data parallelism."""

    name: str
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    packed: bool = True
    #: Of `CASES`.
    cases: tuple[str, ...] = ("token",)
    #: Further ones of `actor_rollout_ref.actor.megatron`.
    settings: tuple[str, ...] = ()
    #: Whether Megatron divides by tokens, as Megatron-Bridge has it under context parallelism.
    per_token: bool = False

    @property
    def readings(self) -> list[tuple[str, bool]]:
        """The cases, each from the LM head, and the last one from its logits too."""
        return [(case, True) for case in self.cases] + [(self.cases[-1], False)]

    def overrides(self) -> list[str]:
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
    Layout("context and data", context=2, cases=("token", "sequence")),
    Layout("tensor and context", tensor=2, context=2, cases=tuple(CASES)),
    Layout("tensor and context, padded", tensor=2, context=2, packed=False, cases=("sequence",)),
    Layout("static packs", tensor=2, context=2, settings=("pad_to_length=true", "pad_to_length_bucket=64")),
    Layout("per-token loss", tensor=2, context=2, per_token=True),
    Layout("pipeline and tensor", tensor=2, pipeline=2, cases=("token", "sequence")),
    Layout("pipeline and data, padded", pipeline=2, packed=False),
)


def configuration(model: Path, *overrides: str) -> DictConfig:
    return composed(
        model,
        *PLUG_IN,
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.megatron.vanilla_mbridge=true",
        # Transformer Engine alone has norms for sequence parallelism. Clipping and this optimizer ask for CUDA.
        f"{ACTOR}.megatron.sequence_parallel=false",
        f"+{ACTOR}.megatron.override_transformer_config.sequence_parallel=false",
        f"{ACTOR}.megatron.use_distributed_optimizer=false",
        f"{ACTOR}.optim.clip_grad=0",
        f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=true",
        *policy_loss(*SMALL),
        *overrides,
    )


def gathered(value: Any) -> list[Any]:
    """What every process has, on all of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class MegatronActor(Actor):
    """An actor on Megatron, in float32; its parameters have transformers' names, on every process."""

    @property
    def final_norm(self) -> torch.nn.Module:
        return unwrap_model(self.engine.module[-1]).decoder.final_layernorm

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        (chained,) = self.engine.optimizer.chained_optimizers
        return chained.optimizer

    def begin_schedule(self) -> None:
        scheduler = self.engine._build_lr_scheduler()
        self.engine.lr_scheduler = self.engine.checkpoint_mananager.lr_scheduler = scheduler

    def _settings(self) -> Any:
        actor = super()._settings()
        # verl's configuration takes half precision alone, in which nothing could be compared.
        object.__setattr__(actor.engine, "dtype", "float32")
        return actor

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.engine.module for p in chunk.parameters()]

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.engine.bridge.export_weights(self.engine.module)}

    def _gradients(self) -> dict[str, Tensor]:
        own = [p.detach().clone() for p in self._own_parameters()]
        for parameter in self._own_parameters():
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        gradients = self.parameters()
        for parameter, value in zip(self._own_parameters(), own, strict=True):
            parameter.data.copy_(value)
        return gradients

    def infer(self, batch: TensorDict, **options: Any) -> TensorDict:
        """As the parent, on all processes of a replica, to which verl's dispatch hands the answer of one."""
        scores, replica = super().infer(batch, **options), mpu.get_data_parallel_rank()
        answers = gathered((replica, None if scores is None else list(scores["log_probs"].unbind())))
        own = next(answer for other, answer in answers if other == replica and answer is not None)
        return TensorDict({"log_probs": nested(own)}, [len(batch)])

    def update(self, batch: TensorDict, mini_batch: int = 4, **options: Any) -> Mapping[str, Any]:
        """As the parent; the metrics are those of the first process that has any."""
        return next(metrics for metrics in gathered(dict(super().update(batch, mini_batch, **options))) if metrics)


def trained(actor: MegatronActor, samples: list[Any], temperature: float = 1.0, **settings: Any) -> dict[str, Any]:
    """The old policies of a rollout, by sample; its updates; and by process, if it is a last stage and saw logits."""
    actor.reset(**settings)
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    with mock.patch.object(Hook, "begin", autospec=True, side_effect=Hook.begin) as begin:
        scored = actor.score(as_batch(samples[replica::replicas], temperature))
        metrics = actor.update(scored)
    last = mpu.is_pipeline_last_stage()
    records = gathered((replica, captured(actor.engine, scored) if last else None))
    by_replica = dict(record for record in records if record[1] is not None)
    return {
        "old_policies": [by_replica[i % replicas][i // replicas] for i in range(len(samples))],
        "steps": list(actor.steps),
        "metrics": metrics,
        "asked": gathered((last, begin.call_count)),
    }


def interrupted_or_not(actor: MegatronActor, samples: list[Sample], checkpoint: Path) -> tuple[Any, Any]:
    """What the second of two rollouts comes to: of an actor, and after it has loaded the first's checkpoint."""

    def second() -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        return actor.update(actor.score(as_batch(samples[::-1]))), actor.parameters()

    actor.reset(kl_target=0.1).update(actor.score(as_batch(samples)))
    # verl takes a model on a CPU for one that it has offloaded.
    with mock.patch.object(transformer_impl, "load_megatron_model_to_gpu"):
        actor.engine.save_checkpoint(str(checkpoint), global_step=1)
    uninterrupted = second()
    actor.reset(kl_target=0.1).engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
    return uninterrupted, second()


def all_layouts(
    rank: int, world: int, model: Path, checkpoint: Path, layouts: tuple[Layout, ...]
) -> dict[str, dict[Any, Any]]:
    found: dict[str, dict[Any, Any]] = {}
    with on_cpu():
        for layout in layouts:
            actor = MegatronActor(configuration(model, *layout.overrides()))
            found[layout.name] = {}
            assert actor.engine.reads_head
            for case, head in layout.readings:
                with mock.patch.dict(vars(actor.engine), reads_head=head):
                    found[layout.name][case, head] = trained(actor, SAMPLES, **CASES[case])
            replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            own = SAMPLES[replica::replicas]
            if layout.pipeline > 1:
                found[layout.name]["left out"] = worker.left_out(actor.reset(), own)
            found[layout.name]["KL target"] = gathered(worker.rates_of(actor.reset(kl_target=0.1), own))
            if layout.pipeline > 1:
                found[layout.name]["resumed"] = interrupted_or_not(actor, own, checkpoint / layout.name)
            mpu.destroy_model_parallel()
    return found
