import logging
import string
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from troll.study.embedded_text import embedded_text_model
from troll.study.small_model import (
    EOS,
    IGNORED_LABEL,
    PAD,
    UNKNOWN,
    cached_model,
    learn,
    model_config,
    pad_right,
    shuffled_batches,
    token_losses,
)
from troll.tasks import free_text
from troll.tasks.reasoning_gym import SPLITS, Question, questions
from troll.tasks.registry import TaskConfig, TaskError

logger = logging.getLogger(__name__)

#: The name of the model that this package makes itself.
EMBEDDED = "embedded"

CHARACTERS = "\n" + "".join(character for character in string.printable if character.isprintable())


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


def embedded_model(
    task_config: TaskConfig, *, seed: int = 0, cache_dir: str | Path | None = None, warm_up: WarmUp = WarmUp()
) -> Path:
    """Returns a folder with a small language model that can do a little of a task, making it if need be.

    For `free_text` it writes text in word-pieces, see :func:`~troll.study.embedded_text.embedded_text_model`. For
    `reasoning_gym:<data set>`, it is a Qwen3 of about 0.7 million parameters that reads and writes characters, warmed
    up on questions of the task that are neither in its training nor in its evaluation data. Models are kept in a
    cache, see :func:`~troll.study.small_model.cached_model`.

    Args:
        task_config: The task `free_text`, or one of reasoning-gym whose data set gives one answer per question.
        seed: Of the initial weights and the order of what it learns from.
        cache_dir: Where models are kept. Default: `troll` in `$XDG_CACHE_HOME`, or in `~/.cache`.
        warm_up: How long, and on how many questions, it learns.

    Returns:
        A folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        TaskError: If the task is another one, or has no answers to learn from.
        OSError: If the cache folder cannot be written.
    """
    prefix, _, data_set = task_config.task.partition(":")
    if task_config.task == free_text.NAME:
        return embedded_text_model(seed=seed, cache_dir=cache_dir)
    if prefix != "reasoning_gym" or not data_set:
        raise TaskError(
            f"the embedded model learns '{free_text.NAME}' and 'reasoning_gym:<data set>' tasks, not "
            f"{task_config.task!r}: name another model with --model_name_or_path"
        )
    tokenizer = character_tokenizer()

    def learn_answers(model: Qwen3ForCausalLM) -> dict[str, Any]:
        learned = questions(data_set, task_config.options, split="warmup", size=warm_up.num_questions)
        # Tested on what reinforcement learning starts with, so that small spaces of questions cannot be learned by
        # heart.
        tested = questions(data_set, task_config.options, split="train", size=warm_up.test_size)
        return _train(model, tokenizer, learned, tested, warm_up)

    determined_by = {
        "splits": SPLITS,
        "data_set": data_set,
        "options": task_config.options,
        "warm_up": asdict(warm_up),
        "characters": CHARACTERS,
        "reasoning-gym": version("reasoning-gym"),
    }
    return cached_model(
        model_config(tokenizer),
        tokenizer,
        learn_answers,
        determined_by=determined_by,
        seed=seed,
        cache_dir=cache_dir,
    )


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
        batches = shuffled_batches(len(learned), warm_up.batch_size, warm_up.max_steps)
        for step, batch in enumerate(batches, start=1):
            input_ids, labels = _encode(tokenizer, [learned[index] for index in batch])
            optimizer.param_groups[0]["lr"] = warm_up.learning_rate * min(1.0, step / warm_up.rise_steps)
            learn(model, optimizer, input_ids, labels)
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
    return (-token_losses(model, input_ids, labels).sum(dim=1)).exp().mean().item()


def _encode(tokenizer: PreTrainedTokenizerFast, batch: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = tokenizer([question.prompt for question in batch])["input_ids"]
    answers = tokenizer([question.answer + EOS for question in batch])["input_ids"]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    targets = [torch.tensor([IGNORED_LABEL] * len(p) + a) for p, a in zip(prompts, answers, strict=True)]
    return pad_right(rows, tokenizer.pad_token_id), pad_right(targets, IGNORED_LABEL)
