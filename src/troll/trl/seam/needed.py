"""The private methods of TRL that we use: the purpose of each, and the parameters and names that it must have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import trl
from transformers import GenerationMixin
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


def method(owner: type, name: str, purpose: str, parameters: str = "", uses: str = "") -> Needed:
    """What we need of a method; parameters and names that it uses are written with spaces between them."""
    return Needed(owner, name, purpose, tuple(parameters.split()), tuple(uses.split()))


OVERRIDDEN = (
    method(
        GRPOTrainer,
        "_generate_and_score_completions",
        "a rollout, to which the old policy and other advantages are added",
        "inputs",
        "_get_per_token_logps_and_entropies _calculate_rewards _logs completion_mask advantages "
        "old_per_token_logps sampling_per_token_logps ref_per_token_logps num_items_in_batch",
    ),
    method(
        GRPOTrainer,
        "_calculate_rewards",
        "the rewards of all processes, for advantage estimators",
        "inputs prompts completions completion_ids_list",
        "prompts completions completion_ids trainer_state log_extra log_metric",
    ),
    method(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        "scoring completions, where the old policy is captured",
        "model input_ids attention_mask logits_to_keep compute_entropy compute_aux_loss",
        "labels fused_lm_head log_probs entropy aux_loss",
    ),
    method(
        GRPOTrainer,
        "_compute_loss",
        "the loss, of a micro-batch in which the old log-probabilities are shifted",
        "model inputs",
        "_get_per_token_logps_and_entropies model old_per_token_logps sampling_per_token_logps advantages "
        "epsilon_low epsilon_high beta use_bias_correction_kl importance_sampling_level "
        "current_gradient_accumulation_steps num_items_in_batch aux_loss_enabled",
    ),
)

RELIED_ON = (
    method(
        GRPOTrainer,
        "__init__",
        "what the trainer keeps",
        "model reward_funcs args",
        "_metrics _logs reward_func_names reward_weights rollout_func generation_config _current_train_step_time "
        "_entropy_window_stats _pending_metrics _pending_extra_logs",
    ),
    method(GRPOTrainer, "_prepare_inputs", "when a rollout is made", uses="_step _buffered_inputs num_iterations"),
    method(GRPOTrainer, "_get_train_sampler", "whether the data fills a rollout", uses="generation_batch_size"),
    method(GRPOTrainer, "log", "that our metrics are averaged and logged with TRL's", uses="_metrics _logs"),
    method(
        GRPOTrainer,
        "_generate_single_turn",
        "generation for rollout functions",
        "prompt_ids images multimodal_fields num_generations",
        "_last_loaded_step",
    ),
    method(GRPOTrainer, "_tokenize_prompts", "which tokens the prompts have", "prompts", "input_ids"),
    method(
        VLLMGeneration,
        "__init__",
        "log-probabilities of the likeliest tokens, and the sampler's settings",
        uses="logprobs mode temperature top_k top_p min_p repetition_penalty",
    ),
    method(VLLMGeneration, "_init_vllm", "the settings of the engine", uses="llm vllm_client"),
    method(VLLMGeneration, "sync_weights", "weights for vLLM on a CPU", uses="_iter_named_params reset_prefix_cache"),
    method(VLLMGeneration, "generate", "what the engine reports", "prompts images num_generations"),
    # How transformers completes the settings of a call of `generate`, and what it does with the scores.
    method(
        GenerationMixin,
        "_prepare_generation_config",
        "rollouts without what the model's file says",
        "generation_config",
        "update generation_config to_dict defaults_only allow_custom_entries",
    ),
    method(
        GenerationMixin,
        "_get_logits_processor",
        "what changes the distribution of rollouts",
        "generation_config input_ids_seq_length encoder_input_ids device",
    ),
)

#: Functions of `trl.trainer.utils`, which TRL does not document. TRL 1.14 has no fused head.
FUNCTIONS = (
    "add_fused_lm_head",
    "FusedCausalLMOutput",
    "RepeatSampler",
    "get_config_model_id",
    "use_adapter",
)


def lacking(needed: Iterable[Needed], functions: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each method, and each function of `trl.trainer.utils`, that TRL lacks."""
    for each in needed:
        yield from each.missing()
    for name in functions:
        if not callable(getattr(utils, name, None)):
            yield f"trl.trainer.utils.{name} is missing"


def differences() -> Iterator[str]:
    """Yields a sentence for each difference between the installed TRL and what the seam needs; nothing if it fits."""
    yield from lacking((*OVERRIDDEN, *RELIED_ON), FUNCTIONS)
    scoring = getattr(GRPOTrainer, "_get_per_token_logps_and_entropies", None)
    if scoring is not None:  # the new policy would be scored without a parameter that we do not know
        unknown = [name for name in inspect.signature(scoring).parameters if name not in SCORING]
        yield from (f"{scoring.__name__} has a new parameter {name}" for name in unknown)
    if getattr(utils, "_ChunkedLogProbFunction", True) is None:
        yield "its fused head could not be imported, which takes Triton in TRL 1.15 (pip install triton)"


def refuse(missing: Iterable[str]) -> None:
    """Raises ImportError if anything is missing, such as the result of `differences`."""
    found = list(missing)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise ImportError(
            f"troll.trl builds on TRL 1.15 and 1.16, and TRL {trl.__version__} is another: {found[0]}{more}. "
            'Install one of these: pip install "trl>=1.15,<1.17"'
        )
