"""Reward models: networks that were trained on preferences to score completions."""

from typing import Any


def load_reward_model(name_or_path: str, *, conversational: bool) -> Any:
    """Loads a sequence classifier with one output as a reward.

    Args:
        name_or_path: A model of the Hugging Face hub, or a folder, with its tokenizer in the same place.
        conversational: Whether it will score conversations, which needs a chat template.

    Returns:
        The `PreTrainedModel`, which TRL's trainers take as a reward function: they tokenize, place the model and call
        it.

    Raises:
        ValueError: If it cannot be loaded, is not a reward model, or its tokenizer lacks a padding token or a chat
            template.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name_or_path, num_labels=1, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the head has another size
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot load the reward model {name_or_path!r}: {reason}") from error
    if loaded["missing_keys"]:
        # transformers would make a random head, and training would follow it.
        missing = ", ".join(sorted(loaded["missing_keys"]))
        raise ValueError(f"{name_or_path} is not a reward model: it has no weights for {missing}")
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(f"the tokenizer of the reward model {name_or_path} has no token to pad with")
    if conversational and tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of the reward model {name_or_path} has no chat template, but the prompts are conversations"
        )
    # It reads a whole rollout at once, and would keep the keys and values of all layers although it never generates.
    model.config.use_cache = False
    return model
