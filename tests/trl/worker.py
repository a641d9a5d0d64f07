"""One of two processes: `accelerate launch -m tests.trl.worker MODE PART FOLDER MODEL=PATH...`.

To start two processes takes longer than most of what is tested in them, so they do all that a back end is tested for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import register_package

from tests.trl import (
    conversations_worker,
    critic_worker,
    distributed_worker,
    resampling_worker,
    tiny,
    token_rewards_worker,
    ungraded_worker,
)
from tests.trl.sharding import fsdp_on_cpu, zero_on_cpu

#: What either process returns, by the test file that looks at it: of a back end, the paths of models, and a folder.
Work = Callable[[str, Callable[[str], Path], Path], dict[str, Any]]

CRITIC, DISTRIBUTED = critic_worker.work, distributed_worker.updates
DDP_ALONE = {
    "conversations": conversations_worker.work,
    "resampling": resampling_worker.work,
    "token rewards": token_rewards_worker.work,
    "unscored": ungraded_worker.work,
}
PARTS: dict[str, dict[str, dict[str, Work]]] = {
    "updates": {
        "ddp": {"critic": CRITIC, **DDP_ALONE, "distributed": DISTRIBUTED},
        "fsdp": {"critic": CRITIC, "distributed": DISTRIBUTED},
        "zero3": {"distributed": DISTRIBUTED},
    },
    "the rest": {mode: {"distributed": distributed_worker.the_rest} for mode in ("ddp", "fsdp", "zero3")},
}


def restore_to_indexed_cpu() -> None:
    """Before transformers 5.18, Trainer resumes to "cpu:0" where processes share a CPU, which torch does not know."""
    register_package(0, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None)


def main() -> None:
    torch.set_num_threads(1)
    restore_to_indexed_cpu()
    mode, part, folder, *models = sys.argv[1:]
    paths = dict(model.split("=", 1) for model in models)
    if mode == "fsdp":
        fsdp_on_cpu()
    elif mode == "zero3":
        zero_on_cpu()
        tiny.DEFAULTS["use_cpu"] = False  # DeepSpeed is on its device, and that is the CPU
    results = {}
    for name, work in PARTS[part][mode].items():
        Path(folder, name).mkdir(exist_ok=True)
        results[name] = work(mode, lambda architecture: Path(paths[architecture]), Path(folder, name))
    torch.save(results, Path(folder, f"{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
