"""A value model: the backbone of a language model with a linear head."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from troll.huggingface.dropout import disable_dropout
from troll.huggingface.positions import positions_from_mask


class ValueHead(nn.Linear):
    """A linear layer to one value, in float32 even if the rest of the model computes in bf16.

    With the 8 bits of bf16, values and therefore temporal differences would have an error of 0.4 % of the value.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states (..., hidden_size) to values (..., 1) in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())

    def reset_parameters(self) -> None:
        """Sets all weights to zero, so that values start at 0, and the first updates are those of REINFORCE.

        A random head would add noise to the values. The gradient of a head of zeros is that of a linear regression, so
        the head is nonzero after the first step, and the backbone learns from the second step on.
        """
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def value_model(
    model: str | os.PathLike[str] | PreTrainedModel | PeftModel,
    peft_config: PeftConfig | None = None,
    model_init_kwargs: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """Makes a value model: the backbone of a language model, without dropout, with a `ValueHead`.

    Its position ids follow from the attention mask, like the policy's.

    Dropout is off because the critic's values at the rollout are compared with those in the update.

    Args:
        model: Name or folder of a language model; or a model, whose configuration and backbone weights are copied
            (without its adapter, if it has one).
        peft_config: The policy's LoRA configuration. The backbone then gets an adapter of that shape and is otherwise
            frozen; all weights of the head are trained. None trains all weights.
        model_init_kwargs: Arguments of `from_pretrained`, where `model` is a name. `dtype` is float32 by default.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which saves memory.

    Raises:
        ValueError: If transformers has no token classifier for the architecture, or the adapter is not LoRA.
    """
    if isinstance(model, str | os.PathLike):
        kwargs: dict[str, Any] = {"dtype": torch.float32, **(model_init_kwargs or {})}
        chosen = {key: kwargs[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in kwargs}
        config = _value_config(AutoConfig.from_pretrained(os.fspath(model), **chosen))
        critic: Any = AutoModelForTokenClassification.from_pretrained(os.fspath(model), config=config, **kwargs)
    else:
        critic = _from_model(model.get_base_model() if isinstance(model, PeftModel) else model)
    if not isinstance(getattr(critic, "score", None), nn.Linear):
        raise ValueError(
            "model must be of an architecture whose token classifier has a linear layer `score`, which "
            f"{type(critic).__name__} lacks: name a critic of another family with the same vocabulary"
        )
    critic.score = ValueHead(critic.score.in_features)
    positions_from_mask(critic)
    disable_dropout(critic)
    if gradient_checkpointing:
        # Before transformers 5.23, which deprecates it, there is only the older name.
        enable = getattr(critic, "activation_checkpointing_enable", None) or critic.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # a reentrant one would lose the gradient where the embedding is frozen
    return critic if peft_config is None else get_peft_model(critic, _adapter_of_critic(peft_config))


def _from_model(model: Any) -> Any:
    config = _value_config(copy.deepcopy(model.config))
    critic = AutoModelForTokenClassification.from_config(
        config, dtype=torch.float32, attn_implementation=model.config._attn_implementation
    )
    # Where PEFT has put its layers, the original weights have a longer name.
    added = re.compile(r"\b(base_layer|original_module|token_adapter)\.")
    weights = {added.sub("", name): weight for name, weight in model.base_model.state_dict().items()}
    backbone = critic.base_model.state_dict()
    critic.base_model.load_state_dict({name: weights[name] for name in backbone})
    return critic


def _value_config(config: PreTrainedConfig) -> PreTrainedConfig:
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"model must be of an architecture for which transformers has a token classifier, got {config.model_type!r}"
            ": name another one with the same vocabulary as critic_kwargs' model_name_or_path"
        )
    config.num_labels = 1
    config.use_cache = False
    for name, value in vars(config).items():  # Persimmon's attention reads its rate here, and not from a layer
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _adapter_of_critic(policy: PeftConfig) -> LoraConfig:
    if not isinstance(policy, LoraConfig):
        raise ValueError(f"peft_config must be a LoraConfig for a critic, got {type(policy).__name__}")
    config = copy.deepcopy(policy)
    config.task_type = TaskType.TOKEN_CLS
    config.lora_dropout = 0.0
    config.modules_to_save = [name for name in policy.modules_to_save or [] if name != "lm_head"] + ["score"]
    tokens: Any = policy.trainable_token_indices
    if isinstance(tokens, dict):
        config.trainable_token_indices = {name: ids for name, ids in tokens.items() if name != "lm_head"} or None
    if policy.target_modules == "all-linear":  # which would count the head
        excluded = policy.exclude_modules
        config.exclude_modules = f"{excluded}|score" if isinstance(excluded, str) else [*(excluded or ()), "score"]
    return config
