"""Everything of verl, and of Megatron in verl, that is not documented for others: what it is for, and its shape.

verl changes every few weeks. What counts is not its version but what we build on, so this looks at import whether every
class, method and parameter is there, and says what is missing. Nothing else in `troll.verl` imports from verl.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Versions that the tests ran with.
VERIFIED = ("0.9.1",)

try:
    _found = version("verl")
except PackageNotFoundError:
    raise ImportError("troll.verl needs verl: pip install 'troll-rl[verl]'") from None

try:
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import masked_mean
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
    from verl.workers.config import FSDPActorConfig, McoreActorConfig, PolicyLossConfig
    from verl.workers.engine import MegatronEngine
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import pad_packed_inputs
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
    from verl.workers.utils.padding import no_padding_2_padding

    if MegatronEngine is not None:
        from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
        from verl.utils.megatron_utils import unwrap_model
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
except ImportError as error:
    raise ImportError(
        f"troll.verl builds on what verl {_found} does not have ({error}); it is verified with verl "
        f"{' and '.join(VERIFIED)}"
    ) from error


@dataclass(frozen=True)
class Needed:
    """A function or method of verl's that we override or call.

    Attributes:
        owner: The class it is of, or the function itself.
        name: Of the method; None for a function.
        purpose: What we need it for.
        parameters: That it has to take, by name.
    """

    owner: Any
    name: str | None
    purpose: str
    parameters: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What it lacks, if anything."""
        function: Callable[..., Any] | None = self.owner if self.name is None else getattr(self.owner, self.name, None)
        name = f"{self.owner.__name__}{'' if self.name is None else '.' + self.name}"
        if function is None:
            return f"{name} ({self.purpose})"
        found = inspect.signature(function).parameters
        if any(x.kind is x.VAR_KEYWORD for x in found.values()):
            return None
        lacking = [parameter for parameter in self.parameters if parameter not in found]
        return f"{', '.join(lacking)} of {name} ({self.purpose})" if lacking else None


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
    Needed(FSDPEngineWithLMHead, "optimizer_step", "to leave an update out"),
    Needed(pad_packed_inputs, None, "packs of static sizes"),
    Needed(ulysses_pad_and_slice_inputs, None, "sequence parallelism", ("sp_size",)),
    Needed(agg_loss, None, "the loss", ("loss_mat", "loss_mask", "loss_agg_mode")),
    Needed(register_policy_loss, None, "the loss", ("name",)),
    Needed(no_padding_2_padding, None, "the loss"),
    Needed(RolloutReplicaRegistry, "register", "a rollout that reports its distributions", ("name", "loader")),
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
        Needed(preprocess_thd_engine, None, "packed batches", ("use_fp8_padding", "pad_to_length_bucket", "cp_layout")),
        Needed(preprocess_bshd_engine, None, "padded batches", ("use_fp8_padding", "forced_max_seqlen")),
    )


def missing() -> Iterator[str]:
    """What the installed verl lacks of all that we build on."""
    return (found for found in (needed.missing() for needed in NEEDED) if found is not None)


def takes_output_processor(model: Any) -> bool:
    """Whether a model of Megatron hands its hidden states to a function of ours (megatron-core from 0.18 on)."""
    return "output_processor" in inspect.signature(type(model).forward).parameters


if _missing := list(missing()):
    raise ImportError(
        f"troll.verl builds on what verl {_found} does not have: {'; '.join(_missing)}. It is verified with verl "
        f"{' and '.join(VERIFIED)}"
    )

__all__ = [
    "EngineRegistry",
    "FSDPActorConfig",
    "FSDPEngineWithLMHead",
    "McoreActorConfig",
    "MegatronEngine",
    "PolicyLossConfig",
    "RolloutReplica",
    "RolloutReplicaRegistry",
    "agg_loss",
    "get_ulysses_sequence_parallel_group",
    "masked_mean",
    "no_padding_2_padding",
    "pad_packed_inputs",
    "register_policy_loss",
    "tu",
    "ulysses_pad_and_slice_inputs",
]
if MegatronEngine is not None:
    __all__ += ["MegatronEngineWithLMHead", "preprocess_bshd_engine", "preprocess_thd_engine", "unwrap_model"]
