"""TROLL on verl's Megatron engine: tensor, context and pipeline parallelism, packed or padded batches."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from troll.verl.engine import TrustRegionEngine
from troll.verl.hooks import Capture, Hook
from troll.verl.old_policies import OLD_POLICIES, ResponseTokens, response_places
from troll.verl.settings import BACKEND_PREFIX


@EngineRegistry.register(model_type="language_model", backend=f"{BACKEND_PREFIX}megatron", device=["cuda", "cpu"])
class TrollMegatronEngine(TrustRegionEngine, MegatronEngineWithLMHead):
    """verl's Megatron engine, whose last pipeline stage hands its slices of the logits to the trust region."""

    def processes(self) -> ProcessGroup:
        """Those that hold the same slice of the model, among which batches and sequences are divided."""
        return mpu.get_data_parallel_group(with_context_parallel=True)

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        logits_processor_func: Any,
        batch: TensorDict,
        data_format: str,
        **options: bool,
    ) -> dict[str, Tensor]:
        """The parent's; the hook gives the log-probabilities, since both its passes know them already."""
        if isinstance(logits_processor_func, Hook):
            spread = mpu.get_tensor_model_parallel_world_size() > 1
            logits_processor_func.begin(
                label.flatten(),
                self._response_tokens(batch, data_format),
                mpu.get_tensor_model_parallel_group() if spread else None,
            )
            options |= {"distillation_use_topk": True, "distillation_only": True}
        return super()._lm_head_logits_processor(
            logits,
            label,
            temperature,
            logits_processor_func=logits_processor_func,
            batch=batch,
            data_format=data_format,
            **options,
        )

    def _response_tokens(self, batch: TensorDict, data_format: str) -> ResponseTokens:
        places = torch.nested.nested_tensor_from_jagged(response_places(batch), batch["input_ids"].offsets())
        model = unwrap_model(self.module[0])
        fp8 = model.config.fp8 in ("e4m3", "hybrid")
        # As verl's forward lays out the labels.
        if data_format == "thd":
            settings = self.engine_config
            bucket = settings.pad_to_length_bucket if settings.pad_to_length else None
            layout = self._get_context_parallel_layout(model)
            places, *_ = preprocess_thd_engine(
                places, use_fp8_padding=fp8, pad_to_length_bucket=bucket, cp_layout=layout
            )
        else:
            longest = tu.get_non_tensor_data(batch, key="forced_max_seqlen", default=None)
            places, *_ = preprocess_bshd_engine(places, use_fp8_padding=fp8, forced_max_seqlen=longest)
        divided = mpu.get_context_parallel_world_size() > 1
        total = batch["responses"].values().shape[0]
        return ResponseTokens.of(places.flatten(), total, mpu.get_context_parallel_group() if divided else None)

    def postprocess_micro_batch_func(
        self, output: dict[str, Any], data: TensorDict, forward_only: bool, loss_function: Any, **options: Any
    ) -> Any:
        """The parent's, to which a capture is a pass without a loss."""
        if isinstance(loss_function, Capture):
            output[OLD_POLICIES] = loss_function.field
            loss_function = None
        return super().postprocess_micro_batch_func(output, data, forward_only, loss_function, **options)
