"""What we need of TRL: each of its private methods that we touch, why, and the shape that it must have.

TRL's hooks are methods whose names begin with an underscore, and they change between versions. So what counts is not a
version number but the shape of each: `check` looks at every method's parameters and at the names that its code uses,
and says what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import trl
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils


@dataclass(frozen=True)
class Needed:
    """A method of TRL's trainer that we override, call or rely on.

    Attributes:
        name: The method's name.
        purpose: What we need it for.
        parameters: The names of the parameters that it must take.
        uses: Names, attributes and dictionary keys that must occur in its code.
    """

    name: str
    purpose: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


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
        "_calculate_rewards",
        "the rewards of all processes, for advantage estimators and evaluations",
        parameters=("inputs", "prompts", "completions", "completion_ids_list"),
        uses=("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    ),
    Needed(
        "_get_per_token_logps_and_entropies",
        "scoring completions, where the old policy is captured and the new one's scores are handed in",
        parameters=("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy", "compute_aux_loss"),
        uses=("labels", "fused_lm_head", "log_probs", "entropy", "aux_loss"),
    ),
    Needed(
        "_compute_loss",
        "the loss, of a micro-batch in which the old log-probabilities are shifted",
        parameters=("model", "inputs"),
        uses=(
            "_get_per_token_logps_and_entropies",
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
    Needed("_save_checkpoint", "checkpoints that say whether they are complete", parameters=("model", "trial")),
)

RELIED_ON = (
    Needed(
        "__init__",
        "what the trainer keeps",
        parameters=("model", "reward_funcs", "args"),
        uses=("_metrics", "_logs", "reward_func_names", "reward_weights", "reward_processing_classes", "rollout_func"),
    ),
    Needed("_prepare_inputs", "when a rollout is made", uses=("_step", "_buffered_inputs", "num_iterations")),
    Needed("log", "that our metrics are averaged and logged with TRL's", uses=("_metrics", "_logs")),
    Needed("_generate", "further rounds of generation", parameters=("prompts",), uses=("completion_ids", "num_tokens")),
    Needed("_tokenize_prompts", "which tokens the prompts have", parameters=("prompts",), uses=("input_ids",)),
    Needed("_log_completion_extra", "what reward functions log of completions", uses=("_pending_extra_logs",)),
    Needed("_log_metric", "what reward functions log of rollouts", uses=("_pending_metrics",)),
)

#: Methods of TRL's `VLLMGeneration`.
ENGINE = (
    Needed("__init__", "log-probabilities of the likeliest tokens", uses=("logprobs", "mode")),
    Needed("_init_vllm", "the settings of the engine", uses=("llm", "vllm_client")),
    Needed("generate", "what the engine reports", parameters=("prompts", "images", "num_generations")),
)

#: Functions of `trl.trainer.utils`, which is not part of TRL's documented interface. TRL 1.14 has no fused head.
FUNCTIONS = (
    "add_fused_lm_head",
    "FusedCausalLMOutput",
    "get_callable_name",
    "get_config_model_id",
    "nanstd",
)


def differences(trainer: type = GRPOTrainer, engine: type = VLLMGeneration, functions: Any = utils) -> Iterator[str]:
    """Yields a sentence for each thing that TRL lacks and the seam needs; none if all is there.

    Args:
        trainer: `GRPOTrainer`, or another class in its place.
        engine: `VLLMGeneration`, or another class in its place.
        functions: `trl.trainer.utils`, or another module in its place.
    """
    of_trainer = ((trainer, needed) for needed in (*OVERRIDDEN, *RELIED_ON))
    for owner, needed in (*of_trainer, *((engine, needed) for needed in ENGINE)):
        place = f"{owner.__name__}.{needed.name} ({needed.purpose})"
        method = getattr(owner, needed.name, None)
        if method is None:
            yield f"{place} is missing"
            continue
        method = inspect.unwrap(method)
        parameters, names = inspect.signature(method).parameters, set(_names(method.__code__))
        yield from (f"{place} has no parameter {name}" for name in needed.parameters if name not in parameters)
        yield from (f"{place} does not use {name}" for name in needed.uses if name not in names)
        if needed.name == "_get_per_token_logps_and_entropies":
            # The new policy would be scored without a parameter that we do not know.
            yield from (f"{place} has a new parameter {name}" for name in parameters if name not in SCORING)
    for name in FUNCTIONS:
        if not callable(getattr(functions, name, None)):
            yield f"trl.trainer.utils.{name} is missing"
    if getattr(functions, "_ChunkedLogProbFunction", True) is None:
        yield "its fused head could not be imported, which takes Triton in TRL 1.15 (pip install triton)"


def _names(code: CodeType) -> Iterator[str]:
    """Names, attributes and strings of a function, and of the functions inside it."""
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        for text in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(text, str):
                yield text


def check() -> None:
    """Raises ImportError unless the installed TRL fits."""
    missing = list(differences())
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ImportError(
            f"troll.trl builds on TRL 1.15 and 1.16, and TRL {trl.__version__} is another: {missing[0]}{more}. "
            'Install one of these: pip install "trl>=1.15,<1.17"'
        )
