"""What a number in the settings must be, in words; and the numbers of `TrollConfig`, by their range."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, get_args, get_type_hints

from trl import GRPOConfig

#: The ranges of numbers, by the words that error messages use.
RANGES: dict[str, Callable[[Any], bool]] = {
    "above 0": lambda value: value > 0,
    "above 1": lambda value: value > 1,
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "finite": math.isfinite,
    "finite and above 0": lambda value: 0 < value < math.inf,
    "finite and at least 0": lambda value: 0 <= value < math.inf,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "an integer, at least 0": lambda value: isinstance(value, int) and value >= 0,
    "an integer, at least 1": lambda value: isinstance(value, int) and value >= 1,
    "an integer, at least 1, or -1": lambda value: isinstance(value, int) and (value >= 1 or value == -1),
    "an integer in [0, 2^32)": lambda value: isinstance(value, int) and 0 <= value < 2**32,
}

#: The range of each number of `TrollConfig`, a key of `RANGES`. None is allowed where it is the default. TRL's settings
#: are checked only with a surrogate that reads them.
NUMBERS: dict[str, tuple[str, ...]] = {
    "above 0": ("kl_bound", "epsilon", "epsilon_high"),
    "above 1": ("delta",),  # the largest ratio: at most 1, tokens with a positive advantage would not learn
    "finite and above 0": (
        "kl_target",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    ),
    "finite and at least 0": (
        "regression_weight",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    "in [0, 1)": ("mass_threshold",),
    "an integer, at least 0": ("diagnostics_steps",),
    "an integer, at least 1": ("support_top_k",),
}

#: The same for numbers that TRL and transformers do not check: out of range they train wrongly, or fail after loading.
TRL_NUMBERS: dict[str, tuple[str, ...]] = {
    "above 0": ("num_train_epochs", "vllm_importance_sampling_clip_max"),
    "finite and above 0": ("temperature",),
    "finite": ("entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    "finite and at least 0": (
        "learning_rate",
        "weight_decay",
        "adam_epsilon",
        "warmup_steps",
        "beta",
        "router_aux_loss_coef",
        "neftune_noise_alpha",
        "vllm_importance_sampling_clip_min",
        "logging_steps",
        "eval_steps",
        "save_steps",
    ),
    "at least 0": ("max_grad_norm", "off_policy_mask_threshold"),  # infinity clips and masks nothing
    "in [0, 1]": ("top_entropy_quantile", "ref_model_mixup_alpha"),
    "in [0, 1)": ("adam_beta1", "adam_beta2"),
    "an integer, at least 1": (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "num_generations_eval",
        "num_iterations",
        "steps_per_generation",
        "max_completion_length",
        "ref_model_sync_steps",
    ),
    "an integer, at least 1, or -1": ("max_steps",),  # transformers takes 0 for -1, which trains num_train_epochs
    "an integer in [0, 2^32)": ("seed", "data_seed"),
}

#: Fields of TRL that may be None, from its annotations, since a parser changes the types of fields; and max_grad_norm,
#: where transformers takes None too.
MAY_BE_NONE = {name for name, hint in get_type_hints(GRPOConfig).items() if type(None) in get_args(hint)}
MAY_BE_NONE.add("max_grad_norm")


def in_range(value: Any, takes: str) -> bool:
    """Whether a value is a number in a range, a key of `RANGES`."""
    return isinstance(value, Real) and not isinstance(value, bool) and RANGES[takes](value)


def check_number(name: str, value: Any, takes: str) -> None:
    """Raises ValueError unless a setting is a number in a range, a key of `RANGES`."""
    if not in_range(value, takes):
        raise ValueError(f"{name} must be {takes}, got {value!r}")
