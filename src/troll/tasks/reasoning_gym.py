import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Literal

from datasets import Dataset

from troll.rewards.completion import completion_text
from troll.tasks.registry import DEFAULT_EVAL_SIZE, RewardFunc, Task, TaskConfig, TaskError, register_task

Split = Literal["eval", "warmup", "train"]

DEFAULT_TRAIN_SIZE = 4096

# Entry i of a reasoning-gym data set is drawn from seed + i: seeds must lie further apart than any size.
_SEEDS: dict[Split, int] = {"eval": 0, "warmup": 700_000_000, "train": 1_400_000_000}
# Which sixteenths of the space of questions belong to which split.
_SIXTEENTHS: dict[Split, range] = {"eval": range(2), "warmup": range(2, 6), "train": range(6, 16)}
# How questions are split, for the keys of what was learned from one of the splits.
SPLITS = {split: [_SEEDS[split], *_SIXTEENTHS[split]] for split in _SEEDS}
# A split of two sixteenths accepts one draw in eight; far fewer means that the space has hardly any questions.
_DRAWS_PER_QUESTION = 64


@dataclass(frozen=True)
class Question:
    """One question of a reasoning-gym data set.

    Attributes:
        prompt: What the model reads.
        entry: What the data set generated; its verifier scores an answer against it.
    """

    prompt: str
    entry: dict[str, Any]

    @property
    def answer(self) -> str:
        """The data set's own answer, in the form a model should write it.

        Raises:
            TaskError: If the data set has no single answer, as where many solutions are accepted.
        """
        answer = self.entry["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"question {self.prompt!r} has no answer to learn from: its field 'answer' is {answer!r}")
        return answer


@register_task("reasoning_gym:<data set>")
def load(config: TaskConfig, data_set: str) -> Task:
    """Loads any data set of reasoning-gym, with its own generator and verifier.

    An answer is a success where the data set's verifier gives it the full score. The answer is what stands in the last
    `<answer>...</answer>` of a completion, or the whole completion where there is no such tag.

    `config.task_options` configures the data set (its fields but `seed` and `size`), and takes one option more:
    `prompt`, a template with the question's text as `{question}` (the default) and everything in its metadata under
    the metadata's own name, e.g. `"{expression} ="` for `chain_sum`.

    Training and evaluation are drawn from seeds far apart, and share no question however small the space of questions
    is: a hash of its text assigns every question to one split (see `questions`).

    Args:
        config: Options and sizes; `train_size` defaults to 4096, and 256 are held out for an `eval_size` of None.
        data_set: Name of the data set, e.g. `chain_sum`.

    Returns:
        The task. Its data sets have the columns `prompt` and `question_id`.

    Raises:
        TaskError: If the data set or an option is unknown or unusable, or the space of questions too small.
    """
    if config.dataset_path is not None:
        raise TaskError(f"task {config.task!r} generates its questions: remove dataset_path={config.dataset_path}")
    train = questions(data_set, config.options, split="train", size=config.train_size or DEFAULT_TRAIN_SIZE)
    held_out = questions(data_set, config.options, split="eval", size=config.eval_size or DEFAULT_EVAL_SIZE)
    return Task(
        name=config.task,
        train_dataset=_to_dataset(train, first_id=0),
        eval_dataset=_to_dataset(held_out, first_id=len(train)),
        reward_funcs=[_success_of(_create(data_set, config.options), train + held_out)],
    )


def questions(data_set: str, options: dict[str, Any], *, split: Split, size: int) -> list[Question]:
    """Draws questions of one split.

    Every question belongs to exactly one split, by the SHA-256 of its text: two sixteenths of all questions are held
    out for evaluation, four are for the supervised warm-up, ten for reinforcement learning. So no two splits share a
    question, whatever the sizes, and all have the distribution of the generator: within a split, a question comes as
    often as the generator draws it.

    Args:
        data_set: Name of the reasoning-gym data set.
        options: Its configuration, and `prompt` (see `load`).
        split: `"eval"`, `"warmup"` or `"train"`.
        size: Number of questions.

    Returns:
        The questions, the same on every call; a longer draw starts with the shorter one.

    Raises:
        TaskError: If the data set or an option is unknown or unusable, or the split holds (almost) no question.
    """
    drawn = list(islice(_draw(data_set, options, split=split, draws=size * _DRAWS_PER_QUESTION), size))
    if len(drawn) < size:
        raise TaskError(
            f"reasoning-gym data set {data_set!r} has too few different questions for its {split} split: "
            "choose options that make the space of questions larger"
        )
    return drawn


def _draw(data_set: str, options: dict[str, Any], *, split: Split, draws: int) -> Iterator[Question]:
    template = options.get("prompt", "{question}")
    if not isinstance(template, str):
        raise TaskError(f"task option prompt must be a string, got {template!r}")
    generator = _create(data_set, options, seed=_SEEDS[split], size=draws)
    for index in range(draws):
        entry = generator[index]
        digest = hashlib.sha256(entry["question"].encode()).digest()
        if digest[0] % 16 not in _SIXTEENTHS[split]:
            continue
        yield Question(_format(template, data_set, entry), entry)


def _format(template: str, data_set: str, entry: dict[str, Any]) -> str:
    values = {**entry["metadata"], "question": entry["question"]}
    try:
        return template.format_map(values)
    except (AttributeError, KeyError, ValueError, IndexError) as error:
        raise TaskError(
            f"prompt template {template!r} does not fit {data_set!r} ({error}); it knows {', '.join(sorted(values))}"
        ) from error


def _create(data_set: str, options: dict[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise TaskError('this task needs reasoning-gym: pip install "troll-rl[tasks]"') from error
    if data_set not in DATASETS:
        raise TaskError(f"unknown reasoning-gym data set {data_set!r}; it has {', '.join(sorted(DATASETS))}")
    known = {field.name for field in fields(DATASETS[data_set][1])} - {"seed", "size"}
    configuration = {name: value for name, value in options.items() if name != "prompt"}
    for name in configuration:
        if name in ("seed", "size"):
            raise TaskError(f"task option {name!r} is not for reasoning-gym tasks: use train_size and eval_size")
        if name not in known:
            raise TaskError(f"{data_set!r} has no option {name!r}; it has {', '.join(sorted(known | {'prompt'}))}")
    try:
        return create_dataset(data_set, seed=seed, size=size, **configuration)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(
            f"reasoning-gym does not accept the options {configuration} for {data_set!r}: {error}"
        ) from error


def _success_of(verifier: Any, asked: list[Question]) -> RewardFunc:
    def success(prompts: list[Any], completions: list[Any], question_id: list[int], **columns: Any) -> list[float]:
        from reasoning_gym.utils import extract_answer

        rewards = []
        for completion, index in zip(completions, question_id, strict=True):
            text = completion_text(completion)
            rewards.append(float(is_correct(verifier, extract_answer(text) or text.strip(), asked[index])))
        return rewards

    return success


def is_correct(verifier: Any, answer: str, question: Question) -> bool:
    """Whether a data set's verifier gives an answer the full score."""
    try:
        return bool(verifier.score_answer(answer, question.entry) >= 1.0)
    except Exception:
        # Several verifiers evaluate or index what the model wrote and raise whatever comes of it.
        return False


def _to_dataset(asked: list[Question], *, first_id: int) -> Dataset:
    ids = list(range(first_id, first_id + len(asked)))
    return Dataset.from_dict({"prompt": [question.prompt for question in asked], "question_id": ids})
