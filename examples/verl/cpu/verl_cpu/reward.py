"""The toy task's reward in verl's signature, for `reward.custom_reward_function.path`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from reasoning_gym.factory import create_dataset

from troll_lab.tasks.reasoning_gym import Question, is_correct


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """Returns `score` and `acc`: 1 where the answer is right, else 0.

    Args:
        data_source: The task, `reasoning_gym:<data set>`.
        solution_str: The completion.
        ground_truth: Unused; part of the signature.
        extra_info: Its `entry` is what the data set generated, as JSON.
        **kwargs: Unused; what else verl may pass.
    """
    verifier = _verifier(data_source.partition(":")[2])
    success = float(is_correct(verifier, solution_str.strip(), Question("", json.loads(extra_info["entry"]))))
    return {"score": success, "acc": success}


@cache
def _verifier(data_set: str) -> Any:
    return create_dataset(data_set, size=1)
