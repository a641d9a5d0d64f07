"""TROLL on verl's FSDP engine: packed or padded batches, dynamic batch sizes, Ulysses sequence parallelism, LoRA."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import pad_packed_inputs

from troll.verl.engine import TrustRegionEngine
from troll.verl.hooks import Capture, Hook
from troll.verl.old_policies import OLD_POLICIES, ResponseTokens, response_places
from troll.verl.settings import BACKEND_PREFIX


@EngineRegistry.register(
    model_type="language_model",
    backend=[f"{BACKEND_PREFIX}fsdp", f"{BACKEND_PREFIX}fsdp2"],
    device=["cuda", "cpu"],
)
class TrollFSDPEngine(TrustRegionEngine, FSDPEngineWithLMHead):
    """verl's FSDP engine, which hands its logits to the trust region where it would to a distillation loss."""

    def processes(self) -> torch.distributed.ProcessGroup | None:
        """All: FSDP divides batches among data-parallel processes, and Ulysses sequences among the rest."""
        return torch.distributed.group.WORLD

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """The parent's; the hook gives the log-probabilities, since both its passes know them already."""
        hook = logits_processor_func
        if not isinstance(hook, Hook):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        hook.begin(output_args["input_ids_rmpad_rolled"], self._response_tokens(micro_batch, output_args))
        # Only now: with these set earlier the parent would refuse to pad packs.
        tu.assign_non_tensor(micro_batch, distillation_use_topk=True, distillation_only=True)
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, hook)
        if isinstance(hook, Capture):
            outputs[OLD_POLICIES] = hook.field
        return outputs

    def _response_tokens(self, micro_batch: TensorDict, output_args: dict[str, Any]) -> ResponseTokens:
        places: Tensor = response_places(micro_batch).unsqueeze(0)
        total = micro_batch["responses"].values().shape[0]
        if not tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True):
            return ResponseTokens.of(places[0], total)
        # As the parent pads and slices its inputs.
        places, _ = pad_packed_inputs(places, None, self._get_packed_pad_size(places.shape[-1]))
        if not self.use_ulysses_sp:
            return ResponseTokens.of(places[0], total)
        places, _, _ = ulysses_pad_and_slice_inputs(places, sp_size=self.ulysses_sequence_parallel_size)
        return ResponseTokens.of(places[0], total, get_ulysses_sequence_parallel_group())
