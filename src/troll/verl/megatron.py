"""TROLL on verl's Megatron engine: tensor, context and pipeline parallelism, packed or padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from troll import LMHead
from troll.huggingface.forward import replaced_forward
from troll.verl.engine import DEVICES, TrustRegionEngine
from troll.verl.hooks import Hook, Update
from troll.verl.kl_target import KLTargetScheduler
from troll.verl.old_policies import ResponseTokens, response_places
from troll.verl.seam import tu
from troll.verl.seam.training import (
    EngineRegistry,
    MegatronEngineWithLMHead,
    preprocess_bshd_engine,
    preprocess_thd_engine,
    unwrap_model,
)
from troll.verl.settings import BACKEND_PREFIX


class MegatronKLTargetScheduler(KLTargetScheduler):
    """The scheduler that sets the rate of every update, around Megatron's."""

    kind = OptimizerParamScheduler

    @property
    def peak(self) -> float:
        """See the parent: that of a group without a rate of its own, since stages have different groups."""
        return float(self.scheduler.max_lr)

    @property
    def scheduled(self) -> float:
        """See the parent."""
        return float(self.scheduler.get_lr({}))

    def rates(self) -> list[float]:
        """See the parent."""
        return [float(self.scheduler.get_lr(group)) for group in self.scheduler.optimizer.param_groups]


@EngineRegistry.register(model_type="language_model", backend=f"{BACKEND_PREFIX}megatron", device=list(DEVICES))
class TrollMegatronEngine(TrustRegionEngine, MegatronEngineWithLMHead):
    """verl's Megatron engine, whose last pipeline stage reads this process's slice of the LM head."""

    scheduler_class = MegatronKLTargetScheduler

    def processes(self) -> ProcessGroup:
        """The processes with the same slice of the model, among which batches and sequences are divided."""
        return mpu.get_data_parallel_group(with_context_parallel=True)

    def check_head(self) -> None:
        """See the parent."""
        if self.model_config.mtp.enable:
            raise ValueError("multi-token prediction goes through the LM head as well")
        if getattr(self.engine_config, "use_megatron_fsdp", False):
            raise ValueError("Megatron-FSDP gathers the LM head for its own call only")
        head: Any = getattr(language_model(self.module[-1]), "output_layer", None)
        if not (head is None or type(head) is ColumnParallelLinear):
            raise ValueError(f"the LM head is not Megatron's own column-parallel layer, but {type(head).__name__}")

    def from_last_stage(self, numbers: dict[str, float]) -> dict[str, float]:
        """See the parent."""
        if mpu.get_pipeline_model_parallel_world_size() == 1:
            return numbers
        sent, last = [numbers], mpu.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast_object_list(sent, src=last, group=mpu.get_pipeline_model_parallel_group())
        return sent[0]

    def lr_scheduler_step(self) -> float:
        """Overrides the parent, which returns the optimiser's rate: with a KL target, that is the next update's."""
        rate = super().lr_scheduler_step()
        return rate if self.kl_target is None else self.kl_target.get_last_lr()[0]

    def forward_step(self, batch_iter: Any, model: Any, logits_processor_func: Any, **options: Any) -> Any:
        """Overrides the parent: the model returns hidden states if its head is read."""
        if not (self.from_head and isinstance(logits_processor_func, Hook)):
            return super().forward_step(batch_iter, model, logits_processor_func=logits_processor_func, **options)
        with hidden_states_for_logits(language_model(model)) as self._weight:
            return super().forward_step(batch_iter, model, logits_processor_func=logits_processor_func, **options)

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
        """The results of the hook, from the head or from the logits, in the parent's form."""
        hook = logits_processor_func
        if isinstance(hook, Hook):
            spread = mpu.get_tensor_model_parallel_world_size() > 1
            group = mpu.get_tensor_model_parallel_group() if spread else None
            hook.begin(label.flatten(), self._response_tokens(batch, data_format), group)
            if self.from_head:
                (weight,) = self._weight
                # Megatron casts its outputs to float32: the numbers are still bf16.
                hidden = logits.flatten(0, -2).to(weight.dtype)
                head = LMHead(
                    hidden, weight, temperature=float(batch["temperature"]), rows=hook.tokens.rows, vocab_group=group
                )
                return {name: x.view(label.shape) for name, x in hook.everywhere(hook.read(head, batch)).items()}
            # The hook gives the entropy, and may overwrite the logits.
            options |= {"distillation_use_topk": True, "distillation_only": True, "calculate_entropy": False}
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
        """Overrides the parent: a hook that only reads makes the pass one without a loss."""
        if isinstance(loss_function, Hook) and not isinstance(loss_function, Update):
            loss_function = None
        return super().postprocess_micro_batch_func(output, data, forward_only, loss_function, **options)


def language_model(model: Any) -> GPTModel:
    """The `GPTModel` within a model of Megatron's, or within its wrappers.

    Raises:
        ValueError: If there is none.
    """
    model = unwrap_model(model)
    model = getattr(model, "language_model", model)
    if not isinstance(model, GPTModel):
        raise ValueError(f"the model is not a GPTModel of Megatron, but {type(model).__name__}")
    return model


@contextmanager
def hidden_states_for_logits(model: GPTModel) -> Iterator[list[Tensor]]:
    """A context in which a model returns its last hidden states, (B, L, H), instead of logits.

    Its head is still called, so that hooks that wait for its weight run, but it returns its input. A multiplier of the
    logits then multiplies hidden states, in which logits are linear. Sequence-parallel hidden states are gathered
    without adding up their gradient, since a head that is read adds it up itself. (The `output_processor` of
    megatron-core 0.18 would skip the head, and with it the wait for its weight under `overlap_param_gather`.)

    Yields:
        A list, which after the forward has the weight of the head, (V/n, H); it is empty on a stage without a head.
    """
    found: list[Tensor] = []
    head: Any = getattr(model, "output_layer", None)
    if head is None:
        yield found
        return

    def forward(input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        found[:] = [head.weight if weight is None else weight]
        if head.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        return input_, None

    with replaced_forward(head, forward):
        yield found
