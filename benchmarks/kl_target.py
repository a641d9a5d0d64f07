"""What a KL target costs: whole training with and without `kl_target`, of TROLL and of the clip, as in `step`.

The clip reads no policies by itself, and with a target it does, to measure their KL.
"""

from __future__ import annotations

from typing import Any

from benchmarks import measure, step


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints times and peak memory of one rollout's updates, as ratios to TROLL's without a target."""
    return step.compare(step.WITH_TARGET, step.CASES[measure.shapes(device)], device, repeats)
