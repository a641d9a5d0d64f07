"""The configuration of a model, which is not downloaded if the model is in a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from troll import recipes
from troll.recipes import RecipeError
from troll.runs.toy_model import character_tokenizer
from troll.runs.toy_network import TOY_MODELS, model_config
from troll.runs.toy_text_model import TextWarmUp
from troll.tasks import TaskConfig, free_text

#: The configurations of the models in the recipes, with only the numbers of their architecture.
FOLDER = recipes.FOLDER / "shapes"


def shape_file(name: str) -> Path:
    """The file for the configuration of a model of the hub; it exists if it ships with the recipes."""
    return FOLDER / f"{name.replace('/', '--')}.json"


def model_shape(name: str, task: TaskConfig, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The configuration of a model: the one that ships with the recipes, or else that of a folder or of the hub.

    Args:
        name: A name on the hub, a folder, or one of `TOY_MODELS`.
        task: The task of a toy model.
        revision: The branch, tag or commit on the hub.
        trust_remote_code: Whether the configuration's own code may run.

    Raises:
        RecipeError: If it cannot be read.
    """
    if name in TOY_MODELS:
        config = model_config(character_tokenizer(), name)
        if task.task == free_text.NAME:
            config.vocab_size = TextWarmUp().vocab_size
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return config
    shipped = shape_file(name)
    if shipped.is_file() and not Path(name).exists():
        return AutoConfig.for_model(**json.loads(shipped.read_text()))
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        where = "in that folder" if Path(name).exists() else "on the hub, or the hub cannot be reached"
        raise RecipeError(
            f"cannot read the configuration of {name!r}: there is none {where}; check the name and the network, or "
            "give a local folder"
        ) from error
