"""Tasks of reasoning-gym: generated questions, split so that training and evaluation share none, and their judges."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from datasets import Dataset

from troll.grading import completion_text
from troll.settings import did_you_mean, number
from troll_lab.rewards.answers import tagged
from troll_lab.tasks.attempts import attempt_rewards, overthought
from troll_lab.tasks.judges import JUDGES, Judge, judge_of
from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, RewardFunc, Task, TaskConfig, TaskError, register_task
from troll_lab.tasks.splits import Split, sixteenth

DEFAULT_TRAIN_SIZE = 4096

#: The placeholder for the answer in a template.
PLAIN = "{answer}"

# Entry i of a reasoning-gym data set is drawn from seed + i: seeds must lie further apart than any size.
_SEEDS: dict[Split, int] = {"eval": 0, "warmup": 700_000_000, "train": 1_400_000_000}
# The sixteenths of the space of questions in each split.
_SIXTEENTHS: dict[Split, range] = {"eval": range(2), "warmup": range(2, 6), "train": range(6, 16)}
# How questions are split: part of the key under which a model that learned from a split is kept.
SPLITS = {split: [_SEEDS[split], *_SIXTEENTHS[split]] for split in _SEEDS}
# A split of two sixteenths accepts one draw in eight; far fewer means that the space has hardly any questions.
_DRAWS_PER_QUESTION = 64

# Some verifiers take quadratic time: a longer answer is wrong, unless the data set's own is half as long.
_MOST_CHARACTERS = 10_000


@dataclass(frozen=True)
class Question:
    """One question of a reasoning-gym data set.

    Attributes:
        prompt: The text that the model reads.
        entry: The entry that the data set generated, against which its verifier scores an answer.
        answer_format: The template of the answer, with `{answer}` for the answer itself.
    """

    prompt: str
    entry: dict[str, Any]
    answer_format: str = PLAIN

    @property
    def answer(self) -> str:
        """The data set's own answer."""
        return str(self.entry["answer"])

    @property
    def formatted_answer(self) -> str:
        """The answer in the format of a success."""
        return self.answer_format.replace(PLAIN, self.answer)


@dataclass(frozen=True)
class _Options:
    """The options of a task; docs/tasks.md says more of them.

    Attributes:
        prompt: Template of a prompt, with `{question}` and the names of the metadata, e.g. `"{expression} ="`.
        system_prompt: As in `Task`.
        examples: As in `Task`.
        answer_format: Template of a success, with `{answer}` and names of the metadata, e.g. `"<{answer}>"`.
        attempts: The text between attempts at the answer, of which the last counts; None for one attempt. Warm-up
            answers have one to five right attempts, and every eighth begins with a wrong one.
        random_reward: The probability of a random reward of 1; None for no random rewards.
    """

    prompt: str = "{question}"
    system_prompt: str | None = None
    examples: list[tuple[str, str]] = field(default_factory=list)
    answer_format: str = PLAIN
    attempts: str | None = None
    random_reward: float | None = number(None, "in (0, 1)")

    def __post_init__(self) -> None:
        if self.answer_format.count(PLAIN) != 1 or "<answer>" in self.answer_format:
            raise TaskError(
                f"task option answer_format must be a text with {PLAIN} in it, once, and without <answer> tags, in "
                f"which it is read, got {self.answer_format!r}"
            )
        if self.attempts is not None and (not self.attempts or self.answer_format != PLAIN):
            raise TaskError(f"task option attempts must be a text, without an answer_format, got {self.attempts!r}")


def _options(data_set: str, given: dict[str, Any]) -> tuple[_Options, dict[str, Any]]:
    """The options of the task, and the others, which are fields of the data set's configuration."""
    names = {entry.name for entry in fields(_Options)}
    own = TaskConfig(f"reasoning_gym:{data_set}", task_options={k: v for k, v in given.items() if k in names})
    return own.read_options(_Options), {k: v for k, v in given.items() if k not in names}


@register_task("reasoning_gym:<data set>", about="Questions that reasoning-gym generates and judges.")
def load(config: TaskConfig, data_set: str) -> Task:
    """Loads a data set of reasoning-gym, with its own generator.

    An answer is a success if the data set's verifier gives it the full score, or if its text is that of the data set's
    own answer, without spaces around it: `JUDGES` says which, and which data sets are refused. The answer is the text
    in the last `<answer>...</answer>` of a completion, or the whole completion if it has no such tag.

    `config.task_options` configures the data set (all its fields except for `seed` and `size`), and takes the options
    of `_Options`. With an `answer_format`, two more rewards, of weight 0, measure how many answers are in the format
    (`formatted`), and how many are right with or without it (`right`). With `attempts`, the rewards are those of
    `attempt_rewards`. With a `random_reward`, success has weight 0.

    Training and evaluation never share a question, even in a small space of questions: see `questions`. 256 questions
    are held out for an `eval_size` of None. The data sets have the columns `prompt` and `question_id`.

    Raises:
        TaskError: If the data set or an option is unknown, refused or unusable, or the space of questions too small.
    """
    if config.dataset_path is not None:
        raise TaskError(f"task {config.task!r} generates its questions: remove dataset_path={config.dataset_path}")
    options, of_data_set = _options(data_set, config.options)
    train = questions(data_set, config.options, split="train", size=config.train_size or DEFAULT_TRAIN_SIZE)
    held_out = questions(data_set, config.options, split="eval", size=config.eval_size or DEFAULT_EVAL_SIZE)
    verifier, asked = _create(data_set, of_data_set), train + held_out
    rewards, weights = _rewards(verifier, asked), [1.0, 0.0, 0.0]
    if options.attempts is not None:
        rewards = attempt_rewards(options.attempts, lambda text, index: is_correct(verifier, text, asked[index]))
        weights = [1.0, 0.5, 0.0]
    elif asked[0].answer_format == PLAIN:  # the other two rewards have no use then
        rewards, weights = rewards[:1], weights[:1]
    if options.random_reward is not None:
        rewards.append(_random_reward(options.random_reward))
        weights = [0.0] * len(weights) + [1.0]
    return Task(
        name=config.task,
        train_dataset=_to_dataset(train, first_id=0),
        eval_dataset=_to_dataset(held_out, first_id=len(train)),
        reward_funcs=rewards,
        reward_weights=weights if len(weights) > 1 else None,
        system_prompt=options.system_prompt,
        examples=options.examples,
    )


def questions(data_set: str, options: dict[str, Any], *, split: Split, size: int) -> list[Question]:
    """Draws questions of one split.

    Every question belongs to exactly one split, by the SHA-256 of its text: two sixteenths of all questions are held
    out for evaluation, four are for the supervised warm-up, and ten for reinforcement learning. So splits of any size
    share no question. Within a split, a question occurs as often as the generator draws it.

    Args:
        data_set: A data set of reasoning-gym, e.g. `chain_sum`.
        options: The options of the data set and of the task.
        split: `"eval"`, `"warmup"` or `"train"`.
        size: The number of questions to draw.

    Returns:
        The questions, the same on every call; a longer draw starts with the shorter one.

    Raises:
        TaskError: If the data set or an option is unknown, refused or unusable, or if the split holds hardly any
            questions.
    """
    taken, of_data_set = _options(data_set, options)
    draws = size * _DRAWS_PER_QUESTION
    drawn: list[Question] = []
    generator = _create(data_set, of_data_set, seed=_SEEDS[split], size=draws)
    for index in range(draws):
        entry = generator[index]
        if sixteenth(entry["question"]) in _SIXTEENTHS[split]:
            in_format = taken.answer_format
            for name, value in entry["metadata"].items():
                if name != "answer":  # all other braces stay: `<{{answer}}>` is a format too
                    in_format = in_format.replace(f"{{{name}}}", str(value))
            if taken.attempts is not None:
                in_format = overthought(taken.attempts, PLAIN, drawn[-1].answer if drawn else "0", entry["question"])
            drawn.append(Question(_format(taken.prompt, data_set, entry), entry, in_format))
        if len(drawn) == size:
            return drawn
    raise TaskError(
        f"reasoning-gym data set {data_set!r} has too few different questions for its {split} split: "
        "choose options that make the space of questions larger"
    )


def _format(template: str, data_set: str, entry: dict[str, Any]) -> str:
    values = {**entry["metadata"], "question": entry["question"]}
    try:
        return template.format_map(values)
    except (AttributeError, KeyError, ValueError, IndexError) as error:
        raise TaskError(
            f"prompt template {template!r} does not fit {data_set!r} ({error}); it knows {', '.join(sorted(values))}"
        ) from error


def _create(data_set: str, configuration: dict[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise TaskError('this task needs reasoning-gym: pip install "troll-rl[tasks]"') from error
    if data_set not in DATASETS:
        usable = sorted(name for name in DATASETS if isinstance(JUDGES.get(name), Judge))
        hint = did_you_mean(data_set, usable)
        raise TaskError(f"unknown reasoning-gym data set {data_set!r}{hint or ';'} it has {', '.join(usable)}")
    judge_of(data_set)
    known = {field.name for field in fields(DATASETS[data_set][1])} - {"seed", "size"}
    for name in configuration:
        if name in ("seed", "size"):
            raise TaskError(f"task option {name!r} is not for reasoning-gym tasks: use train_size and eval_size")
        if name not in known:
            takes = sorted({*known, *(entry.name for entry in fields(_Options))})
            hint = did_you_mean(name, takes)
            raise TaskError(f"{data_set!r} has no option {name!r}{hint or ';'} it has {', '.join(takes)}")
    try:
        return create_dataset(data_set, seed=seed, size=size, **configuration)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(
            f"reasoning-gym does not accept the options {configuration} for {data_set!r}: {error}"
        ) from error


def _rewards(verifier: Any, asked: list[Question]) -> list[RewardFunc]:
    """The rewards for right answers in the format, for any answers in the format, and for right answers in any form."""

    def in_format(completion: Any, index: int) -> str | None:
        return _unwrapped(_answer(completion), asked[index].answer_format)

    def scores(answers: Iterable[str | None], question_id: list[int]) -> list[float]:
        pairs = zip(answers, question_id, strict=True)
        return [float(answer is not None and is_correct(verifier, answer, asked[index])) for answer, index in pairs]

    def success(prompts: list[Any], completions: list[Any], question_id: list[int], **columns: Any) -> list[float]:
        return scores(map(in_format, completions, question_id), question_id)

    def formatted(prompts: list[Any], completions: list[Any], question_id: list[int], **columns: Any) -> list[float]:
        return [float(answer is not None) for answer in map(in_format, completions, question_id)]

    def right(prompts: list[Any], completions: list[Any], question_id: list[int], **columns: Any) -> list[float]:
        found = zip(map(in_format, completions, question_id), completions, strict=True)
        return scores([_answer(whole) if answer is None else answer for answer, whole in found], question_id)

    return [success, formatted, right]


def _random_reward(probability: float) -> RewardFunc:
    def random_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        # Drawn by torch's generator, whose state a checkpoint keeps.
        return (torch.rand(len(completions)) < probability).float().tolist()

    return random_reward


def _answer(completion: Any) -> str:
    text = completion_text(completion)
    return (tagged(text) or "").strip() or text.strip()


def _unwrapped(text: str, answer_format: str) -> str | None:
    """The answer in a text that has the format; None if the text does not have it."""
    before, after = answer_format.split(PLAIN)
    if len(text) < len(before) + len(after) or not (text.startswith(before) and text.endswith(after)):
        return None
    return text[len(before) : len(text) - len(after)]


def is_correct(verifier: Any, answer: str, question: Question) -> bool:
    """Whether an answer to a question is right.

    Args:
        verifier: The data set, whose verifier is asked if it judges the answer.
        answer: The answer.
        question: The question, with the data set's name in its entry's metadata.

    Raises:
        TaskError: If the data set is refused.
    """
    if judge_of(question.entry["metadata"]["source_dataset"]) is Judge.TEXT:
        return answer.strip() == question.answer.strip()
    if len(answer) > max(_MOST_CHARACTERS, 2 * len(question.answer)):
        return False
    try:
        return bool(verifier.score_answer(answer, question.entry) >= 1.0)
    except Exception:
        # Several verifiers parse the model's text, which can raise any error.
        return False


def _to_dataset(asked: list[Question], *, first_id: int) -> Dataset:
    ids = list(range(first_id, first_id + len(asked)))
    return Dataset.from_dict({"prompt": [question.prompt for question in asked], "question_id": ids})
