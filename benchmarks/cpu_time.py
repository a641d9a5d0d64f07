"""Times that other programs on a shared machine disturb less than they do the clock on the wall."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from benchmarks.measure import Contenders


def medians(contenders: Contenders, repeats: int) -> dict[str, float]:
    """CPU seconds of this process, torch on one thread: all contenders in turn in every round, after one to warm up."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            gc.collect()
            start = time.process_time()
            contender()
            if repeat:
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in taken.items()}
