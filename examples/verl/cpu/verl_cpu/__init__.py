"""Additions to verl that let it run on a CPU, for trials and tests, not for real training.

`import verl` imports this package, which registers everything below, in every process whose environment has

    VERL_PLATFORM=cpu
    VERL_USE_EXTERNAL_MODULES=verl_cpu
    PYTHONPATH=examples/verl/cpu        the folder that this package lies in
    OMP_NUM_THREADS=1                   where workers are as many as cores

Ray's workers inherit this environment. The package registers the platform `cpu`, with gloo between processes; verl's
own FSDP engines for that platform (`strategy: fsdp2`); and the rollout `transformers`. `toy.yaml` in the folder above
has matching settings. If vLLM's CPU build is installed too, the rollout `vllm` works (docs/verl.md has its settings).

All but the platform and vLLM's version waits for the module of verl that it changes: of a dozen processes, most need
neither an engine nor a rollout, and imports are most of what a start takes.
"""

from functools import partial
from types import ModuleType
from typing import Any

from wrapt import when_imported

import verl_cpu.platform
import verl_cpu.vllm_build  # noqa: F401

ROLLOUT = "transformers"


@when_imported("verl.utils.distributed")
def _connect(distributed: Any) -> None:
    # verl names one backend for the CPU and one for its device, here `cpu:gloo,cpu:gloo`, and torch refuses a device
    # that is named twice. This is the one function of verl's that is exchanged, before anyone binds it.
    function = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(function, backend="cpu:gloo")


@when_imported("verl.workers.engine.fsdp.transformer_impl")
def _add_engines(engines: ModuleType) -> None:
    register = engines.EngineRegistry.register
    register(model_type="language_model", backend="fsdp2", device="cpu")(engines.FSDPEngineWithLMHead)
    register(model_type="value_model", backend="fsdp2", device="cpu")(engines.FSDPEngineWithValueHead)


@when_imported("verl.workers.rollout.base")
def _add_rollout(rollouts: ModuleType) -> None:
    rollouts._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "verl_cpu.rollout.TransformersRollout"


@when_imported("verl.workers.rollout.replica")
def _add_replica(replicas: ModuleType) -> None:
    def load() -> type:
        from verl_cpu.rollout import TransformersReplica

        return TransformersReplica

    replicas.RolloutReplicaRegistry.register(ROLLOUT, load)
