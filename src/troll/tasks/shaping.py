"""Rewards added to the one that says what is right: off by default."""

from __future__ import annotations

from troll.rewards.answers import AnswerFormat
from troll.rewards.shaping import FormatReward
from troll.tasks.options import Options
from troll.tasks.registry import Reward, TaskError


def take_shaping(options: Options, answer_format: AnswerFormat | None) -> tuple[list[Reward], list[float]]:
    """Takes the options that shape the form of a completion.

    `format_reward` is the weight of a reward of 1 for an answer in the format asked for. `overlong` is DAPO's soft
    punishment of long completions, in tokens: 0 up to `length - cache`, falling to -1 at `length`.

    Args:
        options: Of the task.
        answer_format: What is asked for; None where there is no such format, nor the option.

    Returns:
        The rewards, and the weight of each.

    Raises:
        TaskError: If an option is unusable.
    """
    rewards: list[Reward] = []
    weights: list[float] = []
    if answer_format is not None and (weight := options.number("format_reward")) is not None:
        rewards.append(FormatReward(answer_format))
        weights.append(weight)
    overlong = options.numbers("overlong", ("length", "cache"))
    if overlong is not None:
        if overlong["cache"] >= overlong["length"]:
            raise TaskError(f"task option overlong: cache must be below length, got {overlong}")
        from trl.rewards import get_soft_overlong_punishment

        rewards.append(get_soft_overlong_punishment(int(overlong["length"]), int(overlong["cache"])))
        weights.append(1.0)
    return rewards, weights
