import hashlib
import json
import logging
import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from troll.tasks.reasoning_gym import SPLITS, Question, questions
from troll.tasks.registry import TaskConfig, TaskError

logger = logging.getLogger(__name__)

PAD, EOS, UNKNOWN = "<|pad|>", "<|eos|>", "<|unknown|>"
CHARACTERS = "\n" + "".join(character for character in string.printable if character.isprintable())

_IGNORED_LABEL = -100
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class WarmUp:
    """How the embedded model is prepared by supervised learning.

    Attributes:
        target_success: Warm-up ends once the probability of sampling exactly the correct answer (temperature 1) reaches
            this, in the mean over `test_size` questions it does not learn from.
        max_steps: Warm-up ends here at the latest.
        batch_size: Questions per step.
        learning_rate: Constant, after a linear rise over the first `rise_steps`.
        rise_steps: See `learning_rate`.
        num_questions: Draws to learn from; they repeat, in a new order, when all are used.
        test_size: See `target_success`.
        test_every: Steps between two tests.
    """

    target_success: float = 0.3
    max_steps: int = 2000
    batch_size: int = 32
    learning_rate: float = 1e-3
    rise_steps: int = 20
    num_questions: int = 32768
    test_size: int = 256
    test_every: int = 25


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one id for every printable ASCII character and the newline.

    Decoding what it encoded gives the text back exactly; characters outside ASCII become `<|unknown|>`.

    Returns:
        The tokenizer: 99 ids, three of them special (padding, end of sequence, unknown), padding on the left.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Returns the embedded model's architecture: Qwen3 with about 0.7 million parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def embedded_model(
    task_config: TaskConfig, *, seed: int = 0, cache_dir: str | Path | None = None, warm_up: WarmUp = WarmUp()
) -> Path:
    """Returns a folder with a small language model that solves some of a task's questions, making it if need be.

    The model is a Qwen3 of about 0.7 million parameters that reads and writes characters. It is warmed up on questions
    of the task that are neither in its training nor in its evaluation data, and the result is kept in a cache folder
    named by a hash of everything that determines it. A cached model whose files are not those that were written is
    made anew.

    Args:
        task_config: A reasoning-gym task whose data set gives one answer per question.
        seed: Of the initial weights and the order of the questions.
        cache_dir: Where models are kept. Default: `troll` in `$XDG_CACHE_HOME`, or in `~/.cache`.
        warm_up: How long, and on how much, it learns.

    Returns:
        A folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        TaskError: If the task is not one of reasoning-gym's, or has no answers to learn from.
        OSError: If the cache folder cannot be written.
    """
    prefix, _, data_set = task_config.task.partition(":")
    if prefix != "reasoning_gym" or not data_set:
        raise TaskError(
            f"the embedded model learns 'reasoning_gym:<data set>' tasks, not {task_config.task!r}: "
            "name another model with --model_name_or_path"
        )
    tokenizer = character_tokenizer()
    config = model_config(tokenizer)
    determined_by = {
        "troll-rl": version("troll-rl"),
        "splits": SPLITS,
        "data_set": data_set,
        "options": task_config.options,
        "seed": seed,
        "warm_up": asdict(warm_up),
        "architecture": config.to_diff_dict(),
        "characters": CHARACTERS,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")},
    }
    digest = hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode()).hexdigest()[:16]
    folder = (Path(cache_dir) if cache_dir else default_cache_dir()) / f"embedded-{digest}"
    if _is_intact(folder):
        return folder
    learned = questions(data_set, task_config.options, split="warmup", size=warm_up.num_questions)
    # Tested on what reinforcement learning starts with, so that small spaces of questions cannot be learned by heart.
    tested = questions(data_set, task_config.options, split="train", size=warm_up.test_size)
    # The caller's random numbers are none of our business.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        result = _train(model, tokenizer, learned, tested, warm_up)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return _publish(folder, model, tokenizer, {"determined_by": determined_by, **result})


def default_cache_dir() -> Path:
    """Returns the folder `troll` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troll"


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    learned: list[Question],
    tested: list[Question],
    warm_up: WarmUp,
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate)
    test = _encode(tokenizer, tested)
    success = 0.0
    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=warm_up.max_steps)
        for step, (input_ids, labels) in enumerate(_batches(tokenizer, learned, warm_up), start=1):
            optimizer.param_groups[0]["lr"] = warm_up.learning_rate * min(1.0, step / warm_up.rise_steps)
            loss = -_answer_log_probs(model, input_ids, labels).sum() / (labels != _IGNORED_LABEL).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % warm_up.test_every == 0 or step == warm_up.max_steps:
                success = _sampled_success(model, *test)
            progress.update(bar, advance=1, description=f"success {success:.0%} of {warm_up.target_success:.0%}")
            if success >= warm_up.target_success:
                break
    if success < warm_up.target_success:
        logger.warning(
            "warm-up ended after %d steps with a success of %.0f %%, below its target of %.0f %%: choose task options "
            "that make the questions easier",
            step,
            100 * success,
            100 * warm_up.target_success,
        )
    return {"steps": step, "success": success}


@torch.no_grad()
def _sampled_success(model: Qwen3ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the mean probability of the correct answers: the success of sampling, without its noise."""
    return _answer_log_probs(model, input_ids, labels).exp().mean().item()


def _batches(
    tokenizer: PreTrainedTokenizerFast, learned: list[Question], warm_up: WarmUp
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order: list[int] = []
    for _ in range(warm_up.max_steps):
        while len(order) < warm_up.batch_size:
            order += torch.randperm(len(learned)).tolist()
        yield _encode(tokenizer, [learned[index] for index in order[: warm_up.batch_size]])
        del order[: warm_up.batch_size]


def _encode(tokenizer: PreTrainedTokenizerFast, batch: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = tokenizer([question.prompt for question in batch])["input_ids"]
    answers = tokenizer([question.answer + EOS for question in batch])["input_ids"]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    targets = [torch.tensor([_IGNORED_LABEL] * len(p) + a) for p, a in zip(prompts, answers, strict=True)]
    # Padded on the right, where causal attention never looks: no mask is needed.
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(targets, batch_first=True, padding_value=_IGNORED_LABEL),
    )


def _answer_log_probs(model: Qwen3ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability (B,) of each row's whole answer, end of sequence included."""
    logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], ignore_index=_IGNORED_LABEL, reduction="none"
    )
    return -losses.sum(dim=1)


def _publish(
    folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, manifest: dict[str, Any]
) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same file system, so that the folder appears at once or not at all.
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        hashes = {path.name: _sha256(path) for path in temporary.iterdir()}
        (temporary / _MANIFEST).write_text(json.dumps({**manifest, "files": hashes}, indent=2))
        if not _is_intact(folder):  # else another process was faster
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.replace(temporary, folder)
            except OSError:
                # Another process may have finished the same model first.
                if not _is_intact(folder):
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_intact(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / _MANIFEST).read_text())["files"]
        return bool(hashes) and all(_sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
