"""All private names of TRL that the laboratory's trainer uses beyond those of `troll.trl.seam`; checked at import."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer import utils

from troll.trl.seam.needed import lacking, method, refuse

NEEDED = (
    method(GRPOTrainer, "__init__", "rewards of another task", uses="_logs reward_processing_classes"),
    method(
        GRPOTrainer,
        "_generate_and_score_completions",
        "a rollout of other completions",
        "inputs",
        "_generate _calculate_rewards",
    ),
    method(
        GRPOTrainer,
        "_calculate_rewards",
        "the rewards of further completions, and of evaluations",
        "inputs prompts completions completion_ids_list",
    ),
    method(GRPOTrainer, "_save_checkpoint", "checkpoints that say whether they are complete", "model trial"),
    method(GRPOTrainer, "_prepare_inputs", "evaluations without a loss", "generation_batch"),
    method(GRPOTrainer, "_get_eval_sampler", "the order of evaluations", "eval_dataset"),
    method(
        GRPOTrainer,
        "_generate",
        "further rounds of generation, and further conversations",
        "prompts",
        "completion_ids num_tokens rollout_func env_mask eos_token_ids num_input_tokens_seen "
        "completions/mean_length completions/clipped_ratio completions/mean_terminated_length",
    ),
    method(GRPOTrainer, "_get_output_dir", "where checkpoints are", "trial"),
    method(GRPOTrainer, "_push_from_checkpoint", "pushing a checkpoint once it is complete", "checkpoint_folder"),
    method(
        GRPOTrainer, "_log_completion_extra", "what reward functions log of completions", uses="_pending_extra_logs"
    ),
    method(GRPOTrainer, "_log_metric", "what reward functions log of rollouts", uses="_pending_metrics"),
)

#: Functions of `trl.trainer.utils`, which TRL does not document.
FUNCTIONS = ("get_callable_name", "nanstd")


refuse(lacking(NEEDED, FUNCTIONS))


def replace_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Replaces the metrics that TRL has just collected for the last rollout, or for a batch of an evaluation."""
    for name, value in metrics.items():
        trainer._metrics["train" if trainer.model.training else "eval"][name][-1] = value


@dataclass
class Completions:
    """The n completions that one process has sampled, and the rewards of the N completions of all processes.

    Attributes:
        examples: n rows of the data set.
        output: The result of TRL's `_generate`: lists with an entry for each completion, and values about all of them.
        extras: n dictionaries of the values that reward functions logged about a completion, by column.
        rewards: (N, F), by F reward functions.
    """

    examples: list[dict[str, Any]]
    output: list[Any]
    extras: list[dict[str, Any]]
    rewards: Tensor

    @property
    def completions(self) -> list[Any]:
        """The n completions, as reward functions get them."""
        return self.output[3]

    @property
    def completion_ids(self) -> list[list[int]]:
        """The token ids of the n completions."""
        return self.output[1]

    def _columns(self) -> list[list[Any]]:
        size = len(self.examples)
        own = [entry for entry in self.output if isinstance(entry, list) and len(entry) == size]
        return [self.examples, *own, self.extras]

    def __getitem__(self, place: int) -> list[Any]:
        """The values of one completion, without its rewards."""
        return [column[place] for column in self._columns()]

    def __setitem__(self, place: int, completion: list[Any]) -> None:
        for column, value in zip(self._columns(), completion, strict=True):
            column[place] = value


def sample(trainer: Any, examples: list[dict[str, Any]]) -> Completions:
    """Calls TRL to generate completions, one for each example of this process, and to compute their rewards."""
    prompts = [example["prompt"] for example in examples]
    output = list(trainer._generate(prompts))
    completion_ids, completions = output[1], output[3]
    rewards = trainer._calculate_rewards(examples, prompts, completions, completion_ids)
    pending = {name: values for name, values in trainer._pending_extra_logs.items() if len(values) == len(examples)}
    extras = [{name: values[i] for name, values in pending.items()} for i in range(len(examples))]
    trainer._pending_extra_logs.clear()
    return Completions(list(examples), output, extras, rewards)


@contextmanager
def unlogged(trainer: Any) -> Iterator[None]:
    """Keeps completions generated within the context out of TRL's metrics, except for their number of tokens."""
    kept = trainer._metrics["train"], trainer._pending_metrics
    before = [{name: list(values) for name, values in metrics.items()} for metrics in kept]
    try:
        yield
    finally:
        tokens = kept[0]["num_tokens"]
        for metrics, values in zip(kept, before, strict=True):
            metrics.clear()
            metrics.update(values)
        kept[0]["num_tokens"] = tokens


@contextmanager
def sampled(trainer: Any, completions: Completions) -> Iterator[None]:
    """A context in which TRL uses these completions and rewards instead of generating and computing its own."""
    for extra in completions.extras:
        for name, value in extra.items():
            trainer._pending_extra_logs[name].append(value)
    output, rewards = tuple(completions.output), completions.rewards
    with replaced(trainer, _generate=lambda *_: output, _calculate_rewards=lambda *_: rewards):
        yield


@contextmanager
def generating_within(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Makes TRL generate completions within a context, but score and judge them outside of it."""
    generate = trainer._generate

    def within(*args: Any) -> Any:
        with context():
            return generate(*args)

    with replaced(trainer, _generate=within):
        yield


@contextmanager
def generated(trainer: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Iterator[None]:
    """A context in which TRL uses the result of `change` instead of the result of `_generate`."""
    generate = trainer._generate
    with replaced(trainer, _generate=lambda *args: change(generate(*args))):
        yield


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of an instance within the context, among them methods."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def evaluation_order(trainer: Any, dataset: Any) -> list[int]:
    """The row of each completion of an evaluation, in the order in which TRL evaluates them: shuffled by the seed."""
    return list(trainer._get_eval_sampler(dataset))


def evaluation_metrics(trainer: Any) -> dict[str, list[float]]:
    """TRL's metrics of the current evaluation: for each, the values of the batches so far."""
    return trainer._metrics["eval"]


def checkpoint_folder(trainer: Any, trial: Any) -> Path:
    """The folder of the checkpoint that transformers saves at this step."""
    return Path(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")


def push_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Pushes a checkpoint to the hub, as transformers does after saving it."""
    trainer._push_from_checkpoint(str(checkpoint))


@contextmanager
def without_table(trainer: Any) -> Iterator[None]:
    """Keeps completions generated within the context out of the trainer's table of completions."""
    logs: dict[str, Any] = {name: [] for name in ("images", "prompt", "completion", "advantages")}
    logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    with replaced(trainer, _logs=logs, log_completions=False):
        yield


get_callable_name = utils.get_callable_name
nanstd = utils.nanstd
