"""The toy task's reward in verl's signature, for `reward.custom_reward_function.path`."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """Returns `score` and `acc`: 1 where the completion is the right answer, else 0.

    Args:
        data_source: Unused; part of the signature.
        solution_str: The completion.
        ground_truth: The right answer, as the task wants it written.
        extra_info: Unused; part of the signature.
        **kwargs: Unused; what else verl may pass.
    """
    success = float(solution_str.strip() == ground_truth)
    return {"score": success, "acc": success}
