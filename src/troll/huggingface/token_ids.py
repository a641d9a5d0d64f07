"""Token ids for which a model's embedding has no row."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: The advice in errors about such token ids.
REMEDY = (
    "call model.resize_token_embeddings(len(tokenizer)) and save the model with its tokenizer, or use the tokenizer "
    "that the model was trained with"
)


def embedding_rows(model: Any) -> int:
    """The number of token ids of a model: the rows of its whole embedding, even if its weight is sharded."""
    embedding: Any = model.get_input_embeddings()
    for wrapped in ("base_layer", "original_module"):  # PEFT's names for what LoRA, or trainable tokens, are put around
        embedding = getattr(embedding, wrapped, embedding)
    rows = getattr(embedding, "num_embeddings", None)
    return int(model.config.get_text_config().vocab_size if rows is None else rows)


def without_embedding(model: Any, tokenizer: Any) -> dict[int, str]:
    """The tokens of a tokenizer that a model cannot read, by id.

    Not every such token is a mistake: Gemma 3's tokenizer has one for images, which its text-only models lack. An
    embedding may have more rows than the tokenizer has tokens.
    """
    rows = embedding_rows(model)
    return {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}


def check_token_ids(model: nn.Module, input_ids: Tensor) -> None:
    """Raises ValueError if ids on a CPU have no row in a model's embedding; on a GPU, that would wait for it."""
    if input_ids.device.type != "cpu" or not input_ids.numel():
        return
    rows, largest = embedding_rows(model), int(input_ids.max())
    if largest >= rows:
        raise ValueError(
            f"input_ids has the token id {largest}, and the embedding of {type(model).__name__} has {rows} rows: "
            f"{REMEDY}"
        )
