"""The toy models that this package makes itself: their architecture, and the cache in which they are kept."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from troll.files import json_text

PAD, EOS, UNKNOWN = "<|pad|>", "<|eos|>", "<|unknown|>"

#: The names of the models that this package makes by itself; they replace a path.
TOY, TOY_MOE = "toy", "toy-moe"
TOY_MODELS = (TOY, TOY_MOE)

#: A target that the loss leaves out.
IGNORED_LABEL = -100

_MANIFEST = "manifest.json"


def model_config(tokenizer: PreTrainedTokenizerFast, name: str = TOY) -> Qwen3Config | Qwen3MoeConfig:
    """Returns a toy model's architecture: 3 layers, and 0.7 million parameters without the embeddings.

    Args:
        tokenizer: The model's tokenizer.
        name: One of `TOY_MODELS`: a Qwen3, or a Qwen3-MoE with 8 experts, 2 for each token.
    """
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if name == TOY_MOE:
        return Qwen3MoeConfig(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, **shared
        )
    return Qwen3Config(intermediate_size=384, **shared)


def cached_model(
    config: Qwen3Config | Qwen3MoeConfig,
    tokenizer: PreTrainedTokenizerFast,
    warm_up: Callable[[PreTrainedModel], dict[str, Any]],
    *,
    determined_by: dict[str, Any],
    seed: int,
    cache_dir: str | Path | None = None,
) -> Path:
    """Returns the folder of a small model, and warms it up if it is not in the cache.

    The folder is named by a hash of everything that determines the model: `determined_by`, the architecture, the seed
    and the versions of the libraries. A cached model with changed files is made again.

    Args:
        config: The architecture, from `model_config`.
        tokenizer: The model's tokenizer, which is saved in its folder.
        warm_up: A function that trains a freshly initialised model in place, and returns a record about it. It has its
            own random numbers, seeded by `seed`, and does not change the caller's.
        determined_by: The data and the settings of the warm-up, as JSON.
        seed: The seed of the initial weights and of the warm-up.
        cache_dir: The folder in which models are kept; `default_cache_dir` if None.

    Returns:
        A folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        OSError: If the cache folder cannot be written.
    """
    determined_by = {
        **determined_by,
        "troll-rl": version("troll-rl"),
        "seed": seed,
        "architecture": config.to_diff_dict(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    digest = hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode()).hexdigest()[:16]
    folder = (Path(cache_dir) if cache_dir else default_cache_dir()) / f"toy-{digest}"
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)  # if it cannot be made, the warm-up would be lost
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        result = warm_up(model)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return _publish(folder, model, tokenizer, {"determined_by": determined_by, **result})


def default_cache_dir() -> Path:
    """Returns the folder `troll` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troll"


def warm_up_progress() -> Progress:
    """The progress bar of a warm-up, not yet started."""
    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Progress(*columns, TimeElapsedColumn())


def pad_right(rows: list[torch.Tensor], fill: int) -> torch.Tensor:
    """Returns B rows of different lengths as (B, L). Causal attention does not look to the right, and needs no mask."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def shuffled_batches(count: int, batch_size: int, steps: int) -> Iterator[list[int]]:
    """Yields `steps` lists of `batch_size` indices below `count`: all of them in random order, again and again."""
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch_size:
            order += torch.randperm(count).tolist()
        yield order[:batch_size]
        del order[:batch_size]


def token_losses(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns −log p (B, L − 1) of the labels (B, L) after the first; zero where they are `IGNORED_LABEL`."""
    logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED_LABEL, reduction="none"
    )


def learn(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, input_ids: torch.Tensor, labels: torch.Tensor
) -> None:
    """One step of supervised learning on the labelled tokens of (B, L) rows."""
    loss = token_losses(model, input_ids, labels).sum() / (labels != IGNORED_LABEL).sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _publish(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, manifest: dict[str, Any]
) -> Path:
    # In the same file system, so that the folder appears at once or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        hashes = {path.name: _sha256(path) for path in temporary.iterdir()}
        (temporary / _MANIFEST).write_text(json_text({**manifest, "files": hashes}, indent=2))
        try:
            os.replace(temporary, folder)
        except OSError:
            # The folder exists: another process was faster, and may be reading the same model; or it is damaged.
            if not _is_intact(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(temporary, folder)
    return folder


def _is_intact(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / _MANIFEST).read_text())["files"]
        return bool(hashes) and all(_sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
