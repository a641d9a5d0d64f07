"""Groups with equal rewards sampled again: the dynamic sampling of DAPO (arXiv 2503.14476)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from troll.trl.estimators import combine_rewards
from troll.trl.seam import add_metrics, micro_batches_done
from troll_lab.trl import seam
from troll_lab.trl.token_rewards import Judged


class Resampling:
    """Replaces the groups of a trainer's rollout whose rewards are all equal; every method runs on every process.

    After a rollout's own prompts, further rounds generate completions of other prompts, a whole rollout each time,
    until every such group has been replaced by one with different rewards, or `LabConfig.resampling_rounds` rounds
    are over. Only then does TRL score completions and compute advantages, for the final rollout.

    Raises:
        ValueError: With images, tools, environments, a rollout function or a data set without length.
    """

    def __init__(self, trainer: Any) -> None:
        _refuse(trainer)
        self._trainer = trainer

    @contextmanager
    def rollout(self, examples: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Samples a rollout, which TRL uses within the context instead of generating one.

        TRL's metrics remain those of the first round, as without resampling; only `num_tokens` counts all rounds. Three
        metrics are added: `resampling/rounds`, the number of rounds after the first; `resampling/equal_groups`, the
        share of the first round's groups with equal rewards; and `resampling/equal_groups_left`, that share in the
        rollout that is trained on.

        Args:
            examples: This process's rows of the data set for the rollout's own prompts.

        Yields:
            The rows of the final rollout: `examples`, except in replaced groups.
        """
        trainer = self._trainer
        found = seam.sample(trainer, examples)
        first, rounds = found.rewards, 0
        with seam.unlogged(trainer):
            for others in self._other_examples(examples):
                if not self._equal(found.rewards).any():
                    break
                rounds += 1
                self._replace(found, seam.sample(trainer, others))
        trainer.observe_rewards(found.rewards)
        trainer.judged = Judged(found.examples, found.completions, found.completion_ids)
        with seam.sampled(trainer, found):
            yield found.examples
        equal = float(self._equal(first).float().mean())
        logged = reward_metrics(first, trainer.reward_weights, trainer.reward_func_names)
        seam.replace_metrics(trainer, logged | {"frac_reward_zero_std": equal})
        left = float(self._equal(found.rewards).float().mean())
        counts = {"rounds": rounds, "equal_groups": equal, "equal_groups_left": left}
        add_metrics(trainer, {f"resampling/{name}": value for name, value in counts.items()})

    def _equal(self, rewards_per_function: Tensor) -> Tensor:
        rewards = combine_rewards(rewards_per_function, self._trainer.reward_weights)
        return equal_groups(rewards, self._trainer.num_generations)

    def _replace(self, found: seam.Completions, more: seam.Completions) -> None:
        """Replaces groups with equal rewards by groups with different ones, as far as there are any."""
        size, rows = self._trainer.num_generations, len(found.examples)
        first = self._trainer.accelerator.process_index * rows
        places = _completions(self._equal(found.rewards), size)
        sources = _completions(~self._equal(more.rewards), size)[: len(places)]
        # A group may lie on several processes, and its place on others: gathered, completions are in the order of all.
        given = gather_object([more[i - first] for i in sources if first <= i < first + rows])
        for place, completion in zip(places, given, strict=False):
            if first <= place < first + rows:
                found[place - first] = completion
        found.rewards = found.rewards.clone()
        found.rewards[places[: len(sources)]] = more.rewards[sources]

    def _other_examples(self, examples: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """For each further round, this process's part of the rows, as many as in the first round."""
        trainer, rows = self._trainer, len(examples)
        size, dataset = trainer.num_generations, trainer.train_dataset
        prompts = rows * trainer.accelerator.num_processes // size
        # The same on all processes, and in a run that is resumed here.
        passes = micro_batches_done(trainer) % trainer.args.gradient_accumulation_steps
        seed = f"{trainer.args.seed} {trainer.state.global_step} {passes}"
        drawn = draw(len(dataset), prompts * trainer.args.resampling_rounds, seed)
        first = trainer.accelerator.process_index * rows
        for start in range(0, len(drawn), prompts):
            others = (dataset[drawn[start + i // size]] for i in range(first, first + rows))
            # The trainer may have removed columns.
            yield [{name: other[name] for name in examples[0]} for other in others]


def equal_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Finds the groups whose scored completions all have the same reward.

    Args:
        rewards: (N,), group by group; NaN where a completion was not scored.
        num_generations: n, completions per group.

    Returns:
        (N / n,) bool.
    """
    grouped = rewards.view(-1, num_generations)
    largest = grouped.nan_to_num(nan=-torch.inf).amax(1)
    return largest <= grouped.nan_to_num(nan=torch.inf).amin(1)


def draw(size: int, count: int, seed: str) -> list[int]:
    """Draws `count` numbers below `size` in random order; none is drawn twice before all others have been drawn.

    A seed gives the same numbers in every version of Python.
    """
    generator, drawn = random.Random(seed), list[int]()
    while len(drawn) < count:
        drawn += generator.sample(range(size), min(size, count - len(drawn)))
    return drawn


def reward_metrics(rewards_per_function: Tensor, weights: Tensor, names: Sequence[str]) -> dict[str, float]:
    """TRL's metrics of (N, F) rewards, NaN where a function returned None, from the F functions' weights and names.

    These are `rewards/NAME/mean` and `rewards/NAME/std` of each function, `reward` and `reward_std`.
    """
    total = combine_rewards(rewards_per_function, weights)
    metrics = {"reward": float(total.nanmean()), "reward_std": float(seam.nanstd(total))}
    for name, rewards in zip(names, rewards_per_function.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = float(rewards.nanmean())
        metrics[f"rewards/{name}/std"] = float(seam.nanstd(rewards))
    return metrics


def _completions(groups: Tensor, size: int) -> list[int]:
    """The indices of the completions of the groups that are true."""
    return groups.repeat_interleave(size).nonzero().flatten().tolist()


def _refuse(trainer: Any) -> None:
    """Raises ValueError unless each completion comes from one call of TRL's generation and a text."""
    found = {
        "tools": trainer.tools,
        "environments": trainer.environment_factories,
        "a rollout function": trainer.rollout_func,
    }
    for name, value in found.items():
        if value:
            raise ValueError(f"resampling_rounds cannot be used with {name}: set resampling_rounds to 0")
    if not isinstance(trainer.train_dataset, Dataset):
        raise ValueError(
            f"resampling_rounds draws prompts from train_dataset by their number, got {type(trainer.train_dataset)}: "
            "make it a datasets.Dataset, or set resampling_rounds to 0"
        )
    images = {"image", "images"} & set(trainer.train_dataset.column_names)
    if images:
        raise ValueError(
            f"resampling_rounds takes text only, and train_dataset has a column {min(images)!r}: remove it, or set "
            "resampling_rounds to 0"
        )
