"""A small language model that can partly solve a task: its tokenizer of characters, and its warm-up on questions."""

from __future__ import annotations

import logging
import string
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from troll.settings import number, parse
from troll_lab.runs.toy_network import (
    EOS,
    IGNORED_LABEL,
    PAD,
    TOY,
    UNKNOWN,
    cached_model,
    learn,
    model_config,
    pad_right,
    shuffled_batches,
    token_losses,
    warm_up_progress,
)
from troll_lab.runs.toy_text_model import toy_text_model
from troll_lab.tasks import free_text
from troll_lab.tasks.reasoning_gym import PLAIN, SPLITS, Question, questions
from troll_lab.tasks.registry import TaskConfig, TaskError, is_file, registration_of
from troll_lab.terminal import raised_as

logger = logging.getLogger(__name__)

# The probability that an answer is in the format: how close it has to come to the wanted one, and within which steps.
_CALIBRATION_TOLERANCE, _CALIBRATION_STEPS = 0.05, 500

CHARACTERS = "\n" + "".join(character for character in string.printable if character.isprintable())


@dataclass(frozen=True)
class WarmUp:
    """The settings of the toy model's supervised warm-up.

    Attributes:
        target_success: Warm-up ends once the probability of sampling exactly the correct answer (temperature 1), in the
            mean over `test_size` questions that it does not learn from, reaches this, in (0, 1]; None for `max_steps`
            always.
        max_steps: Warm-up ends after this many steps at the latest.
        batch_size: The questions of a step.
        learning_rate: The learning rate, constant between a linear rise and a linear fall.
        rise_steps: The steps in which the learning rate rises. 1 for no rise.
        fall_steps: The steps before `max_steps` in which the learning rate falls to about 0. 1 for no fall.
        num_questions: The number of questions to learn from; they are repeated in a new order when all have been used.
        test_size: The questions of a test.
        test_every: The steps between two tests.
        format_share: The share of the answers that the model learns in the task's `answer_format`; the others are
            plain. Below 1, the model is calibrated after the steps above: it continues to learn at a tenth of the
            learning rate until the probability that an answer begins like the format is within 5 % of this share.
        task_options: Options of the task that differ in the warm-up, e.g. `{"max_terms": 2}` for shorter questions.
    """

    target_success: float | None = number(0.3, "in (0, 1]")
    max_steps: int = number(2000, "an integer, at least 1")
    batch_size: int = number(32, "an integer, at least 1")
    learning_rate: float = number(1e-3, "finite and above 0")
    rise_steps: int = number(20, "an integer, at least 1")
    fall_steps: int = number(1, "an integer, at least 1")
    num_questions: int = number(32768, "an integer, at least 1")
    test_size: int = number(256, "an integer, at least 1")
    test_every: int = number(25, "an integer, at least 1")
    format_share: float = number(1.0, "in (0, 1]")
    task_options: dict[str, Any] = field(default_factory=dict)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer of 99 ids: every printable ASCII character, the newline, and three special ones.

    These are padding (on the left), end of sequence, and `<|unknown|>` for characters outside ASCII. Decoding an
    encoded text gives it back exactly.
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


def toy_model(task_config: TaskConfig, name: str = TOY, *, seed: int = 0, cache_dir: str | Path | None = None) -> Path:
    """Returns the folder of a small language model that can partly solve a task; makes it if it is not in the cache.

    For `free_text` this is the model of `troll_lab.runs.toy_text_model`. For `reasoning_gym:<data set>`, it is a Qwen3
    of about 0.7 million parameters that reads and writes characters, warmed up on questions of the task that are
    neither in its training nor in its evaluation data.

    Args:
        task_config: The task `free_text` or one of reasoning-gym, with the settings `warm_up`.
        name: One of `TOY_MODELS`.
        seed: The seed of the initial weights and of the order of the questions.
        cache_dir: The folder in which models are kept. Default: `troll` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        TaskError: If the task is another one, or the task or its `warm_up` is unusable.
        OSError: If the cache folder cannot be written.
    """
    prefix, _, data_set = task_config.task.partition(":")
    if task_config.task == free_text.NAME:
        if task_config.warm_up:
            raise TaskError(f"warm_up is for tasks with answers: the task {free_text.NAME!r} takes none")
        return toy_text_model(name, seed=seed, cache_dir=cache_dir)
    if prefix != "reasoning_gym" or not data_set:
        if not is_file(task_config.task):
            registration_of(task_config.task)  # a misspelt name should not be blamed on the model
        raise TaskError(
            f"the toy model learns '{free_text.NAME}' and 'reasoning_gym:<data set>' tasks, not "
            f"{task_config.task!r}: name another model with --model_name_or_path"
        )
    with raised_as(TaskError):
        warm_up = parse(WarmUp, task_config.warm_up, "warm_up", "the toy model")
    tokenizer = character_tokenizer()
    config = model_config(tokenizer, name)
    settings = asdict(warm_up)
    options = task_config.options | settings.pop("task_options")

    def learn_answers(model: PreTrainedModel) -> dict[str, Any]:
        learned = questions(data_set, options, split="warmup", size=warm_up.num_questions)
        # Tested on the questions that reinforcement learning starts with, so that a small space of questions cannot be
        # learned by heart.
        tested = questions(data_set, options, split="train", size=warm_up.test_size)
        return _train(model, tokenizer, learned, tested, warm_up)

    determined_by = {
        "splits": SPLITS,
        "data_set": data_set,
        "options": options,
        "warm_up": settings,
        "characters": CHARACTERS,
        "reasoning-gym": version("reasoning-gym"),
    }
    return cached_model(config, tokenizer, learn_answers, determined_by=determined_by, seed=seed, cache_dir=cache_dir)


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    learned: list[Question],
    tested: list[Question],
    warm_up: WarmUp,
) -> dict[str, Any]:
    share = warm_up.format_share
    begins = tested[0].answer_format.partition(PLAIN)[0]
    if share < 1 and not begins:
        raise TaskError("warm_up: format_share needs a task option answer_format that begins with text")
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate)
    success, target = 0.0, warm_up.target_success
    test = _encode(tokenizer, tested, [_written(question, share == 1) + EOS for question in tested])

    def learn_batch(batch: list[int], format_share: float) -> None:
        drawn = [learned[index] for index in batch]
        # Without a choice, no random number is drawn.
        formatted = [format_share == 1] * len(drawn)
        if 0 < format_share < 1:
            formatted = (torch.rand(len(drawn)) < format_share).tolist()
        answers = [_written(question, form) + EOS for question, form in zip(drawn, formatted, strict=True)]
        learn(model, optimizer, *_encode(tokenizer, drawn, answers))

    batches = shuffled_batches(len(learned), warm_up.batch_size, warm_up.max_steps + _CALIBRATION_STEPS)
    with warm_up_progress() as progress:
        bar = progress.add_task("", total=warm_up.max_steps)
        for step, batch in enumerate(islice(batches, warm_up.max_steps), start=1):
            rising, falling = step / warm_up.rise_steps, (warm_up.max_steps + 1 - step) / warm_up.fall_steps
            optimizer.param_groups[0]["lr"] = warm_up.learning_rate * min(1.0, rising, falling)
            learn_batch(batch, share)
            if step % warm_up.test_every == 0 or step == warm_up.max_steps:
                success = _mean_probability(model, *test)
            progress.update(bar, advance=1, description=f"success {success:.0%}")
            if target is not None and success >= target:
                # A full bar: the steps that are left were only for a model that learns more slowly.
                progress.update(bar, total=step, description=f"ready at {success:.0%}")
                break
        result = {"steps": step, "success": success}
        if share < 1:
            optimizer.param_groups[0]["lr"] = warm_up.learning_rate / 10
            beginnings = _encode(tokenizer, tested, [begins] * len(tested))
            probability = _calibrate(model, beginnings, share, learn_batch, batches)
            result |= {"success": _mean_probability(model, *test), "format_probability": probability}
    if target is not None and success < target:
        logger.warning(
            "warm-up ended after %d steps with a success of %.0f %%, below its target of %.0f %%: choose task options "
            "that make the questions easier",
            step,
            100 * success,
            100 * target,
        )
    return result


def _calibrate(
    model: PreTrainedModel,
    beginnings: tuple[torch.Tensor, torch.Tensor],
    share: float,
    learn_batch: Callable[[list[int], float], None],
    batches: Iterator[list[int]],
) -> float:
    """Learns until the probability of the format's beginning is near its share, and returns it."""
    probability = _mean_probability(model, *beginnings)
    for batch in islice(batches, _CALIBRATION_STEPS):
        if abs(probability - share) <= _CALIBRATION_TOLERANCE * share:
            break
        # Learning twice the share raises a low probability; learning plain answers only lowers a high one.
        learn_batch(batch, min(2 * share, 1.0) if probability < share else 0.0)
        probability = _mean_probability(model, *beginnings)
    if abs(probability - share) > _CALIBRATION_TOLERANCE * share:
        logger.warning("answers begin like the format with %.3f, not with format_share=%g", probability, share)
    return probability


def _written(question: Question, formatted: bool) -> str:
    return question.formatted_answer if formatted else question.answer


@torch.no_grad()
def _mean_probability(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean probability of the labelled texts: the success of sampling, without its noise."""
    return (-token_losses(model, input_ids, labels).sum(dim=1)).exp().mean().item()


def _encode(
    tokenizer: PreTrainedTokenizerFast, asked: list[Question], texts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions, each followed by a text, as ids and labels, (B, L) each."""
    prompts = tokenizer([question.prompt for question in asked])["input_ids"]
    following = tokenizer(texts)["input_ids"]
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, following, strict=True)]
    targets = [torch.tensor([IGNORED_LABEL] * len(p) + t) for p, t in zip(prompts, following, strict=True)]
    return pad_right(rows, tokenizer.pad_token_id), pad_right(targets, IGNORED_LABEL)
