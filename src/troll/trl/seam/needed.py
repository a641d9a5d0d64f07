"""What we need of TRL and transformers: each private method that we touch, why, and the shape that it must have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import trl
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils

from troll.needed import Needed

#: Keys of a micro-batch, other than token ids and masks, that the model's forward takes for the batch as a whole.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

#: All parameters of `_get_per_token_logps_and_entropies`.
SCORING = (
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
    "num_images",
    "num_tiles",
    *MODEL_INPUTS,
)

OVERRIDDEN = (
    Needed(
        GRPOTrainer,
        "_generate_and_score_completions",
        "a rollout, to which the old policy and other advantages are added",
        parameters=("inputs",),
        uses=(
            "_generate",
            "_get_per_token_logps_and_entropies",
            "_calculate_rewards",
            "old_per_token_logps",
            "sampling_per_token_logps",
            "ref_per_token_logps",
            "completion_mask",
            "advantages",
            "num_items_in_batch",
            "_logs",
        ),
    ),
    Needed(
        GRPOTrainer,
        "_calculate_rewards",
        "the rewards of all processes, for advantage estimators and evaluations",
        parameters=("inputs", "prompts", "completions", "completion_ids_list"),
        uses=("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    ),
    Needed(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        "scoring completions, where the old policy is captured",
        parameters=("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy", "compute_aux_loss"),
        uses=("labels", "fused_lm_head", "log_probs", "entropy", "aux_loss"),
    ),
    Needed(
        GRPOTrainer,
        "_compute_loss",
        "the loss, of a micro-batch in which the old log-probabilities are shifted",
        parameters=("model", "inputs"),
        uses=(
            "_get_per_token_logps_and_entropies",
            "model",
            "old_per_token_logps",
            "sampling_per_token_logps",
            "advantages",
            "epsilon_low",
            "epsilon_high",
            "beta",
            "use_bias_correction_kl",
            "importance_sampling_level",
            "current_gradient_accumulation_steps",
            "num_items_in_batch",
            "aux_loss_enabled",
        ),
    ),
    Needed(
        GRPOTrainer, "_save_checkpoint", "checkpoints that say whether they are complete", parameters=("model", "trial")
    ),
)

RELIED_ON = (
    Needed(
        GRPOTrainer,
        "__init__",
        "what the trainer keeps",
        parameters=("model", "reward_funcs", "args"),
        uses=("_metrics", "_logs", "reward_func_names", "reward_weights", "reward_processing_classes", "rollout_func"),
    ),
    Needed(
        GRPOTrainer, "_prepare_inputs", "when a rollout is made", uses=("_step", "_buffered_inputs", "num_iterations")
    ),
    Needed(GRPOTrainer, "log", "that our metrics are averaged and logged with TRL's", uses=("_metrics", "_logs")),
    Needed(
        GRPOTrainer,
        "_generate",
        "further rounds of generation",
        parameters=("prompts",),
        uses=("completion_ids", "num_tokens"),
    ),
    Needed(
        GRPOTrainer, "_tokenize_prompts", "which tokens the prompts have", parameters=("prompts",), uses=("input_ids",)
    ),
    Needed(
        GRPOTrainer, "_log_completion_extra", "what reward functions log of completions", uses=("_pending_extra_logs",)
    ),
    Needed(GRPOTrainer, "_log_metric", "what reward functions log of rollouts", uses=("_pending_metrics",)),
)

#: Methods of TRL's `VLLMGeneration`.
ENGINE = (
    Needed(VLLMGeneration, "__init__", "log-probabilities of the likeliest tokens", uses=("logprobs", "mode")),
    Needed(VLLMGeneration, "_init_vllm", "the settings of the engine", uses=("llm", "vllm_client")),
    Needed(
        VLLMGeneration, "sync_weights", "weights for vLLM on a CPU", uses=("_iter_named_params", "reset_prefix_cache")
    ),
    Needed(VLLMGeneration, "generate", "what the engine reports", parameters=("prompts", "images", "num_generations")),
)

#: Functions of `trl.trainer.utils`, which is not part of TRL's documented interface. TRL 1.14 has no fused head.
FUNCTIONS = (
    "add_fused_lm_head",
    "FusedCausalLMOutput",
    "get_callable_name",
    "get_config_model_id",
    "nanstd",
    "use_adapter",
)


def differences(trainer: type = GRPOTrainer, engine: type = VLLMGeneration, functions: Any = utils) -> Iterator[str]:
    """Yields a sentence for each thing that TRL lacks and the seam needs; none if all is there.

    Args:
        trainer: `GRPOTrainer`, or another class in its place.
        engine: `VLLMGeneration`, or another class in its place.
        functions: `trl.trainer.utils`, or another module in its place.
    """
    for needed in (*OVERRIDDEN, *RELIED_ON, *ENGINE):
        yield from dataclasses.replace(needed, owner=trainer if needed.owner is GRPOTrainer else engine).missing()
    scoring = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    if scoring is not None:  # the new policy would be scored without a parameter that we do not know
        unknown = [name for name in inspect.signature(scoring).parameters if name not in SCORING]
        yield from (f"{scoring.__name__} has a new parameter {name}" for name in unknown)
    for name in FUNCTIONS:
        if not callable(getattr(functions, name, None)):
            yield f"trl.trainer.utils.{name} is missing"
    if getattr(functions, "_ChunkedLogProbFunction", True) is None:
        yield "its fused head could not be imported, which takes Triton in TRL 1.15 (pip install triton)"


def check() -> None:
    """Raises ImportError unless the installed TRL fits."""
    missing = list(differences())
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ImportError(
            f"troll.trl builds on TRL 1.15 and 1.16, and TRL {trl.__version__} is another: {missing[0]}{more}. "
            'Install one of these: pip install "trl>=1.15,<1.17"'
        )
