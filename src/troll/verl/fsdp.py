"""TROLL on verl's FSDP engine: packed or padded batches, dynamic batch sizes, Ulysses sequence parallelism, LoRA."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from troll.huggingface.adapters import refuse_merging
from troll.huggingface.forward import REQUEST, ReadingRequest, accept_requests, causal_lm, checked_output, unwrapped
from troll.huggingface.head import refuse_head
from troll.verl.engine import DEVICES, TrustRegionEngine
from troll.verl.hooks import Hook
from troll.verl.old_policies import ResponseTokens, response_places
from troll.verl.seam import tu
from troll.verl.seam.training import (
    EngineRegistry,
    FSDPEngineWithLMHead,
    get_ulysses_sequence_parallel_group,
    gives_logits,
    pad_packed_inputs,
    ulysses_pad_and_slice_inputs,
)
from troll.verl.settings import BACKEND_PREFIX


@EngineRegistry.register(
    model_type="language_model",
    backend=[f"{BACKEND_PREFIX}fsdp", f"{BACKEND_PREFIX}fsdp2"],
    device=list(DEVICES),
)
class TrollFSDPEngine(TrustRegionEngine, FSDPEngineWithLMHead):
    """verl's FSDP engine, which reads the LM head in the model's forward, while FSDP has gathered it.

    If the head cannot be read, the logits are read through verl's hook for distillation losses.
    """

    def processes(self) -> torch.distributed.ProcessGroup | None:
        """All processes: FSDP divides batches among data-parallel ones, and Ulysses sequences among the rest."""
        return torch.distributed.group.WORLD

    def _build_lora_module(self, module: Any) -> Any:
        """Overrides the parent: refuses an adapter of shared weights that would be merged for the rollout.

        Raises:
            ValueError: If `lora.merge` would change more than the adapter does.
        """
        adapted = super()._build_lora_module(module)
        if self.model_config.lora.get("merge", False):
            refuse_merging(adapted, "actor_rollout_ref.model.lora.merge=True")
        return adapted

    def check_head(self) -> None:
        """See the parent."""
        accept_requests(self.module)
        refuse_head(causal_lm(self.module).get_output_embeddings())

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Overrides the parent: adds the request to read the head.

        Raises:
            ValueError: If neither the head nor its logits can be read.
        """
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.hook is not None:
            labels = output_args["input_ids_rmpad_rolled"]
            self.hook.begin(labels, self._response_tokens(micro_batch, output_args))
            if self.from_head:
                inputs[REQUEST] = self._request(self.hook, micro_batch, inputs["input_ids"])
            elif not gives_logits(unwrapped(self.module)):
                raise ValueError(
                    "TROLL needs logits here, and the fused kernels of another engine in this process have replaced "
                    "them: set actor_rollout_ref.model.use_fused_kernels=False"
                )
        return inputs, output_args

    def _request(self, hook: Hook, micro_batch: TensorDict, input_ids: Tensor) -> ReadingRequest:
        rows = hook.tokens.rows
        if _is_packed(micro_batch):
            at, length = (torch.zeros_like(rows), rows), len(hook.labels)
        else:  # labels are packed, and hidden states (B, L)
            starts = micro_batch["input_ids"].offsets()
            sequence = torch.bucketize(rows, starts[1:], right=True)
            at, length = (sequence, rows - starts[sequence]), input_ids.shape[1]
        return ReadingRequest(
            hook.sampled, at, length, lambda head, _: hook.read(head, micro_batch), float(micro_batch["temperature"])
        )

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """The results at the response tokens, and 0 elsewhere, in the parent's form."""
        hook = self.hook
        if hook is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if not self.from_head:
            # Set only now, since the parent would refuse to pad packs with them. The hook gives the entropy, and may
            # overwrite the logits.
            tu.assign_non_tensor(
                micro_batch, distillation_use_topk=True, distillation_only=True, calculate_entropy=False
            )
            return super().prepare_model_outputs(output, output_args, micro_batch, hook)
        read = hook.everywhere(checked_output(self.module, output).tensors)
        if _is_packed(micro_batch):
            read = {name: self._gather_and_unpad_packed(x, output_args["pad_size"]) for name, x in read.items()}
        starts = micro_batch["input_ids"].offsets()
        return {name: torch.nested.nested_tensor_from_jagged(x, starts) for name, x in read.items()}

    def _response_tokens(self, micro_batch: TensorDict, output_args: dict[str, Any]) -> ResponseTokens:
        places: Tensor = response_places(micro_batch).unsqueeze(0)
        total = micro_batch["responses"].values().shape[0]
        if not _is_packed(micro_batch):
            return ResponseTokens.of(places[0], total)
        # As the parent pads and slices its inputs.
        places, _ = pad_packed_inputs(places, None, self._get_packed_pad_size(places.shape[-1]))
        if not self.use_ulysses_sp:
            return ResponseTokens.of(places[0], total)
        places, _, _ = ulysses_pad_and_slice_inputs(places, sp_size=self.ulysses_sequence_parallel_size)
        return ResponseTokens.of(places[0], total, get_ulysses_sequence_parallel_group())


def _is_packed(micro_batch: TensorDict) -> bool:
    """Whether the model gets the sequences one after the other, instead of in padded rows."""
    return bool(tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True))
