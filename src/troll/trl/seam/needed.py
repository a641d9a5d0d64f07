"""The private methods of TRL that we use: the purpose of each, and the parameters and names that it must have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import trl
from transformers import GenerationConfig, GenerationMixin
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


def _method(owner: type, name: str, purpose: str, parameters: str = "", uses: str = "") -> Needed:
    return Needed(owner, name, purpose, tuple(parameters.split()), tuple(uses.split()))


OVERRIDDEN = (
    _method(
        GRPOTrainer,
        "_generate_and_score_completions",
        "a rollout, to which the old policy and other advantages are added",
        "inputs",
        "_generate _get_per_token_logps_and_entropies _calculate_rewards _logs completion_mask advantages "
        "old_per_token_logps sampling_per_token_logps ref_per_token_logps num_items_in_batch",
    ),
    _method(
        GRPOTrainer,
        "_calculate_rewards",
        "the rewards of all processes, for advantage estimators and evaluations",
        "inputs prompts completions completion_ids_list",
        "prompts completions completion_ids trainer_state log_extra log_metric",
    ),
    _method(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        "scoring completions, where the old policy is captured",
        "model input_ids attention_mask logits_to_keep compute_entropy compute_aux_loss",
        "labels fused_lm_head log_probs entropy aux_loss",
    ),
    _method(
        GRPOTrainer,
        "_compute_loss",
        "the loss, of a micro-batch in which the old log-probabilities are shifted",
        "model inputs",
        "_get_per_token_logps_and_entropies model old_per_token_logps sampling_per_token_logps advantages "
        "epsilon_low epsilon_high beta use_bias_correction_kl importance_sampling_level "
        "current_gradient_accumulation_steps num_items_in_batch aux_loss_enabled",
    ),
    _method(GRPOTrainer, "_save_checkpoint", "checkpoints that say whether they are complete", "model trial"),
)

RELIED_ON = (
    _method(
        GRPOTrainer,
        "__init__",
        "what the trainer keeps",
        "model reward_funcs args",
        "_metrics _logs reward_func_names reward_weights reward_processing_classes rollout_func generation_config",
    ),
    _method(GRPOTrainer, "_prepare_inputs", "when a rollout is made", uses="_step _buffered_inputs num_iterations"),
    _method(GRPOTrainer, "_get_train_sampler", "whether the data fills a rollout", uses="generation_batch_size"),
    _method(GRPOTrainer, "_get_eval_sampler", "the order of evaluations", "eval_dataset"),
    _method(GRPOTrainer, "log", "that our metrics are averaged and logged with TRL's", uses="_metrics _logs"),
    _method(
        GRPOTrainer,
        "_generate",
        "further rounds of generation, and further conversations",
        "prompts",
        "completion_ids num_tokens rollout_func env_mask eos_token_ids num_input_tokens_seen "
        "completions/mean_length completions/clipped_ratio completions/mean_terminated_length",
    ),
    _method(
        GRPOTrainer,
        "_generate_single_turn",
        "generation for rollout functions",
        "prompt_ids images multimodal_fields num_generations",
        "_last_loaded_step",
    ),
    _method(GRPOTrainer, "_get_output_dir", "where checkpoints are", "trial"),
    _method(GRPOTrainer, "_push_from_checkpoint", "pushing a checkpoint once it is complete", "checkpoint_folder"),
    _method(GRPOTrainer, "_tokenize_prompts", "which tokens the prompts have", "prompts", "input_ids"),
    _method(
        GRPOTrainer, "_log_completion_extra", "what reward functions log of completions", uses="_pending_extra_logs"
    ),
    _method(GRPOTrainer, "_log_metric", "what reward functions log of rollouts", uses="_pending_metrics"),
)

#: Methods of TRL's `VLLMGeneration`.
ENGINE = (
    _method(
        VLLMGeneration,
        "__init__",
        "log-probabilities of the likeliest tokens, and the sampler's settings",
        uses="logprobs mode temperature top_k top_p min_p repetition_penalty",
    ),
    _method(VLLMGeneration, "_init_vllm", "the settings of the engine", uses="llm vllm_client"),
    _method(VLLMGeneration, "sync_weights", "weights for vLLM on a CPU", uses="_iter_named_params reset_prefix_cache"),
    _method(VLLMGeneration, "generate", "what the engine reports", "prompts images num_generations"),
)

#: How transformers completes the settings of a call of `generate`, and what it does with the scores.
GENERATION = (
    _method(
        GenerationMixin,
        "_prepare_generation_config",
        "rollouts without what the model's file says",
        "generation_config",
        "update generation_config to_dict defaults_only",
    ),
    _method(
        GenerationMixin,
        "_get_logits_processor",
        "what changes the distribution of rollouts",
        "generation_config input_ids_seq_length encoder_input_ids device",
    ),
    _method(GenerationConfig, "_get_default_generation_params", "the settings that nobody sets"),
)

#: Functions of `trl.trainer.utils`, which TRL does not document. TRL 1.14 has no fused head.
FUNCTIONS = (
    "add_fused_lm_head",
    "FusedCausalLMOutput",
    "RepeatSampler",
    "get_callable_name",
    "get_config_model_id",
    "nanstd",
    "use_adapter",
)


def differences(trainer: type = GRPOTrainer, engine: type = VLLMGeneration, functions: Any = utils) -> Iterator[str]:
    """Yields a sentence for each name that the seam needs and TRL lacks; nothing if all are there.

    In tests, the arguments replace `GRPOTrainer`, `VLLMGeneration` and `trl.trainer.utils`.
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
    for needed in GENERATION:
        yield from needed.missing()
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
