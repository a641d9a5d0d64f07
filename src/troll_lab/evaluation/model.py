"""The model that `troll eval` evaluates, by name or folder, and its tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from troll_lab.evaluation.config import EvaluationError

_ADAPTER = "adapter_config.json"
# The model that `make smollm2` fetches, on the hub and in its folder.
_SMOLLM2 = "SmolLM2-135M-Instruct"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class ModelSource:
    """The place of a model, and its properties that are known before its weights are loaded.

    Attributes:
        name: The name on the hub, or the folder.
        path: What is loaded: the name or the folder; for an adapter on the hub, the folder with its download.
        base: For an adapter, the model that it changes; otherwise the same as `path`.
        adapter_rank: The rank of a LoRA adapter; None for a whole model.
        context: The number of tokens that the model takes at once; None if its configuration does not say.
        fingerprint: Changes with the model: the commits on the hub, and hashes of the names, sizes and times of the
            files in folders except for the model card.
        revision: The revision of the model on the hub; for an adapter, the revision of its base.
        trust_remote_code: Whether the model's own code may run.
    """

    name: str
    path: str
    base: str
    adapter_rank: int | None
    context: int | None
    fingerprint: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for transformers to load any part of the model."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def find_model(name_or_path: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Finds a model without loading its weights.

    Args:
        name_or_path: The name of a model or of a LoRA adapter on the Hugging Face hub, a folder with one, or the folder
            of a `troll train` run, for the folder `model` in it.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether the model's own code may run.

    Raises:
        EvaluationError: If the model does not exist, or a revision is given for a folder.
    """
    folder = Path(name_or_path).expanduser()
    if revision is not None and folder.is_dir():
        raise EvaluationError(f"model_revision is for models on the hub, and {name_or_path} is a folder: leave it out")
    if name_or_path in ("toy", "toy-moe") and not folder.is_dir():
        raise EvaluationError("the toy model is made by troll train: give the folder of a run, as in runs/quickstart")
    downloaded = None
    if not folder.is_dir():
        with contextlib.suppress(EntryNotFoundError, OSError, ValueError):  # no adapter on the hub
            hf_hub_download(name_or_path, _ADAPTER, revision=revision)
            everything = snapshot_download(name_or_path, revision=revision, ignore_patterns=["*checkpoint*/*"])
            folder = downloaded = Path(everything)
    if folder.is_dir() and not _is_model(folder) and _is_model(folder / "model"):
        folder = folder / "model"
    path = str(folder) if folder.is_dir() else name_or_path
    base, rank = path, None
    try:
        if (folder / _ADAPTER).is_file():
            from peft import PeftConfig

            adapter = PeftConfig.from_pretrained(path)
            base, rank = str(adapter.base_model_name_or_path), getattr(adapter, "r", None)
            revision = adapter.revision
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _unloadable(path, base, error) from error
    if path != base and rank is None:
        raise EvaluationError(f"{path} is an adapter without a rank: only LoRA and its like can be evaluated")
    commits = [getattr(config, "_commit_hash", None), downloaded and downloaded.name]
    places = [Path(place) for place in sorted({path, base}) if Path(place) != downloaded]
    local = [_folder_fingerprint(place) for place in places if place.is_dir()]
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    fingerprints = " ".join([*filter(None, commits), *local])
    name = path if downloaded is None else name_or_path
    return ModelSource(name, path, base, rank, context, fingerprints, revision, trust_remote_code)


def load_tokenizer(source: ModelSource) -> Any:
    """Loads the model's tokenizer; for an adapter without a tokenizer, that of its base.

    Raises:
        EvaluationError: If there is none.
    """
    for path in dict.fromkeys((source.path, source.base)):
        folder = Path(path)
        # transformers would make one without a vocabulary.
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            continue
        try:
            return AutoTokenizer.from_pretrained(path, **source.options)
        except (OSError, ValueError):
            continue
    raise EvaluationError(f"{source.path} has no tokenizer that transformers can load")


def load_model(source: ModelSource, dtype: str) -> Any:
    """Loads the weights onto the GPU, or the CPU if there is none.

    A LoRA adapter computes next to its base, as in training: merged into bf16 weights, much of it would be rounded
    away.

    Args:
        source: The model from `find_model`.
        dtype: "auto" for the dtype in which the weights are stored, or the name of a torch dtype.

    Raises:
        EvaluationError: If the weights cannot be loaded.
    """
    try:
        if source.adapter_rank is None:
            model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, **source.options)
        else:
            model = _with_adapter(source, dtype)
    except SafetensorError as error:
        raise EvaluationError(
            f"the weights of {source.path} cannot be read, {error}: download or save them again"
        ) from error
    except (OSError, ValueError) as error:
        raise _unloadable(source.path, source.base, error) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _with_adapter(source: ModelSource, dtype: str) -> Any:
    """The base with its adapter; the embedding has the rows of training, not one for each token of the tokenizer.

    AutoPeftModel would add random rows for all tokens of the tokenizer, and their logits would count.
    """
    from peft import PeftModelForCausalLM, load_peft_weights

    base: Any = AutoModelForCausalLM.from_pretrained(source.base, dtype=dtype, **source.options)
    name = next(name for name, module in base.named_modules() if module is base.get_input_embeddings())
    embedding = re.compile(rf"base_model\.model\.{re.escape(name)}\.(token_adapter\.|base_layer\.)*weight")
    for key, weight in load_peft_weights(source.path, device="cpu").items():
        if embedding.fullmatch(key) and len(weight) != len(base.get_input_embeddings().weight):
            base.resize_token_embeddings(len(weight))  # the adapter has the values of all rows
    return PeftModelForCausalLM.from_pretrained(base, source.path)  # even if its configuration names no task


def fingerprint(content: Any) -> str:
    """A short hash of anything that JSON can hold; other values, such as dates, are hashed as text."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", _ADAPTER))


def _folder_fingerprint(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return fingerprint([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def _unloadable(path: str, base: str, error: Exception) -> EvaluationError:
    if "trust_remote_code" in str(error):
        return EvaluationError(f"{base} comes with its own code: let it run with --trust_remote_code, if you trust it")
    if path != base:
        return EvaluationError(f"cannot load the adapter {path}, or the model {base!r} that it changes")
    return EvaluationError(not_loadable(path))


def not_loadable(path: str) -> str:
    """Why transformers cannot load a model, given by its name or folder, and what to do."""
    if Path(path).exists():
        return f"{path} does not hold a model that transformers can load"
    remedy = "check the name and the network, or give a local folder"
    if Path(path).name == _SMOLLM2:
        remedy = f"without the hub, run make smollm2 in a checkout of TROLL, and give its folder models/{_SMOLLM2}"
    return (
        f"cannot load the model {path!r}: there is no such folder, and the Hugging Face hub does not have it or cannot "
        f"be reached; {remedy}"
    )
