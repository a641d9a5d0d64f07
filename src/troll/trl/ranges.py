"""The range of every number in `TrollConfig`, in the words of `troll.settings.RANGES`."""

from __future__ import annotations

from typing import get_args, get_type_hints

from trl import GRPOConfig

#: The range of each number of `TrollConfig`, a key of `RANGES`. None is allowed where it is the default. Of TRL's
#: numbers, these are the ones that TRL and transformers do not check: out of range they train wrongly, or fail after
#: loading.
NUMBERS: dict[str, str] = {
    "kl_target": "finite and above 0",
    "kl_bound": "above 0",
    "regression_weight": "finite and at least 0",
    "mass_threshold": "in [0, 1)",
    "support_top_k": "an integer, at least 1",
    "updates_per_rollout": "an integer, at least 1",
    "diagnostics_steps": "an integer, at least 0",
    # TRL's.
    "num_train_epochs": "above 0",
    "vllm_importance_sampling_clip_max": "above 0",
    "temperature": "finite and above 0",
    "entropy_coef": "finite",
    "entropy_coef_min": "finite",
    "entropy_coef_max": "finite",
    "entropy_coef_delta": "finite",
    "entropy_target": "finite",
    "learning_rate": "finite and at least 0",
    "weight_decay": "finite and at least 0",
    "adam_epsilon": "finite and at least 0",
    "warmup_steps": "finite and at least 0",
    "beta": "finite and at least 0",
    "router_aux_loss_coef": "finite and at least 0",
    "neftune_noise_alpha": "finite and at least 0",
    "vllm_importance_sampling_clip_min": "finite and at least 0",
    "logging_steps": "finite and at least 0",
    "eval_steps": "finite and at least 0",
    "save_steps": "finite and at least 0",
    "max_grad_norm": "at least 0",  # infinity clips nothing
    "off_policy_mask_threshold": "at least 0",  # infinity masks nothing
    "top_entropy_quantile": "in [0, 1]",
    "ref_model_mixup_alpha": "in [0, 1]",
    "adam_beta1": "in [0, 1)",
    "adam_beta2": "in [0, 1)",
    "per_device_train_batch_size": "an integer, at least 1",
    "per_device_eval_batch_size": "an integer, at least 1",
    "gradient_accumulation_steps": "an integer, at least 1",
    "num_generations": "an integer, at least 1",
    "num_generations_eval": "an integer, at least 1",
    "num_iterations": "an integer, at least 1",
    "steps_per_generation": "an integer, at least 1",
    "max_completion_length": "an integer, at least 1",
    "ref_model_sync_steps": "an integer, at least 1",
    "max_steps": "an integer, at least 1, or -1",  # transformers takes 0 for -1, which trains num_train_epochs
    "seed": "an integer in [0, 2^32)",
    "data_seed": "an integer in [0, 2^32)",
}

#: The same for TRL's numbers that are checked only with a surrogate that reads them.
NUMBERS_OF_SURROGATES: dict[str, str] = {
    "epsilon": "above 0",
    "epsilon_high": "above 0",
    "delta": "above 1",  # the largest ratio: at most 1, tokens with a positive advantage would not learn
    "sapo_temperature_pos": "finite and above 0",
    "sapo_temperature_neg": "finite and above 0",
    "vespo_k_pos": "finite and at least 0",
    "vespo_lambda_pos": "finite and at least 0",
    "vespo_k_neg": "finite and at least 0",
    "vespo_lambda_neg": "finite and at least 0",
}

#: Fields of TRL that may be None with another default: from its annotations, since a parser changes the types of
#: fields.
MAY_BE_NONE = {name for name, hint in get_type_hints(GRPOConfig).items() if type(None) in get_args(hint)}

#: The values of TRL's fields that TRL checks only after the first rollout.
CHOICES: dict[str, tuple[object, ...]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
