"""The parts of verl's engines, losses and configuration that we build on."""
# ruff: noqa: F401 (the rest of the plug-in imports verl's names from here)

from __future__ import annotations

from typing import Any

from troll.needed import Needed
from troll.verl.seam import check, lacking

try:
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
    from verl.utils.config import validate_config
    from verl.utils.torch_functional import masked_mean
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
    from verl.workers.config import FSDPActorConfig, McoreActorConfig, PolicyLossConfig
    from verl.workers.engine import MegatronEngine
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import pad_packed_inputs
    from verl.workers.utils.padding import no_padding_2_padding

    if MegatronEngine is not None:
        from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
        from verl.utils.megatron_utils import unwrap_model
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
except ImportError as error:
    raise lacking(error) from error

NEEDED: tuple[Needed, ...] = (
    Needed(EngineRegistry, "register", "engines by name", ("model_type", "backend", "device")),
    Needed(
        FSDPEngineWithLMHead,
        "forward_backward_batch",
        "a hook in the loss function's place",
        ("data", "loss_function", "forward_only"),
    ),
    Needed(FSDPEngineWithLMHead, "prepare_model_inputs", "the request to read the head", ("micro_batch",)),
    Needed(
        FSDPEngineWithLMHead,
        "prepare_model_outputs",
        "what was read, as outputs",
        ("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
    Needed(FSDPEngineWithLMHead, "_get_packed_pad_size", "packs of static sizes", ("packed_length",)),
    Needed(FSDPEngineWithLMHead, "_gather_and_unpad_packed", "sequence parallelism", ("tensor", "pad_size")),
    Needed(FSDPEngineWithLMHead, "_build_lora_module", "adapters that cannot be merged", ("module",)),
    Needed(FSDPEngineWithLMHead, "optimizer_step", "to leave an update out"),
    Needed(FSDPEngineWithLMHead, "_build_lr_scheduler", "a learning rate that follows the KL", ("optimizer",)),
    Needed(
        FSDPEngineWithLMHead,
        "lr_scheduler_step",
        "a learning rate that follows the KL",
        uses=("lr_scheduler", "step", "get_last_lr"),
    ),
    Needed(pad_packed_inputs, None, "packs of static sizes"),
    Needed(ulysses_pad_and_slice_inputs, None, "sequence parallelism", ("sp_size",)),
    Needed(agg_loss, None, "the loss", ("loss_mat", "loss_mask", "loss_agg_mode")),
    Needed(register_policy_loss, None, "the loss", ("name",)),
    Needed(no_padding_2_padding, None, "the loss"),
    Needed(validate_config, None, "a configuration that only seems to select TROLL", ("config",)),
)

if MegatronEngine is not None:
    NEEDED += (
        Needed(
            MegatronEngineWithLMHead,
            "_lm_head_logits_processor",
            "reading the head",
            ("logits", "label", "temperature", "logits_processor_func", "batch", "data_format", "distillation_only"),
        ),
        Needed(MegatronEngineWithLMHead, "forward_step", "reading the head", ("batch_iter", "model")),
        Needed(
            MegatronEngineWithLMHead,
            "postprocess_micro_batch_func",
            "captured old policies",
            ("output", "data", "forward_only", "loss_function"),
        ),
        Needed(MegatronEngineWithLMHead, "_get_context_parallel_layout", "context parallelism"),
        Needed(MegatronEngineWithLMHead, "_build_lr_scheduler", "a learning rate that follows the KL"),
        Needed(
            MegatronEngineWithLMHead,
            "lr_scheduler_step",
            "a learning rate that follows the KL",
            uses=("lr_scheduler", "step"),
        ),
        Needed(preprocess_thd_engine, None, "packed batches", ("use_fp8_padding", "pad_to_length_bucket", "cp_layout")),
        Needed(preprocess_bshd_engine, None, "padded batches", ("use_fp8_padding", "forced_max_seqlen")),
    )

check(NEEDED)


def assign(config: Any, **values: Any) -> None:
    """Sets fields of one of verl's configurations, even those that it freezes."""
    # verl freezes all fields but these. The attribute itself is one, once it is set on an instance.
    config._mutable_fields = config._mutable_fields | {"_mutable_fields", *values}
    for name, value in values.items():
        setattr(config, name, value)


def gives_logits(model: Any) -> bool:
    """Whether a transformers model's forward returns logits: verl's fused kernels replace the forward of its class."""
    return type(model).forward.__name__ not in ("forward_with_torch_backend", "forward_with_triton_backend")
