"""One of two processes: `accelerate launch -m tests.troll.trl.worker MODE PART FOLDER MODEL=PATH...`.

To start two processes takes longer than most of what is tested in them, so they do all that a back end is tested for.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import register_package

from tests.troll.trl import distributed_worker, tiny
from tests.troll.trl.sharding import fsdp_on_cpu, zero_on_cpu
from tests.troll_lab.trl import distributed_worker as laboratory
from tests.troll_lab.trl import test_conversations, test_critic, test_resampling, test_token_rewards, test_ungraded
from troll.trl import TrollTrainer
from troll_lab.trl import LabTrainer

#: What either process returns, by the test file that looks at it: of a back end, with a maker of trainers, in a folder.
Work = Callable[[str, tiny.Maker, Path], dict[str, Any]]

DISTRIBUTED = distributed_worker.updates
#: What trains the laboratory's trainer; another start would take longer than to do it here.
LABORATORY: dict[str, Work] = {
    "critic": test_critic.work,
    "laboratory": laboratory.work,
    "conversations": test_conversations.work,
    "resampling": test_resampling.work,
    "token rewards": test_token_rewards.work,
    "unscored": test_ungraded.work,
}
PARTS: dict[str, dict[str, dict[str, Work]]] = {
    "updates": {
        "ddp": {**LABORATORY, "distributed": DISTRIBUTED},
        "fsdp": {name: LABORATORY[name] for name in ("critic", "laboratory")} | {"distributed": DISTRIBUTED},
        "zero3": {"laboratory": laboratory.work, "distributed": DISTRIBUTED},
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
        own = Path(folder, name)
        own.mkdir(exist_ok=True)
        trainer = LabTrainer if name in LABORATORY else TrollTrainer
        maker = tiny.Maker(lambda architecture: Path(paths[architecture]), own / "out", trainer)
        results[name] = work(mode, maker, own)
    assert torch.distributed.get_world_size() == 2
    torch.save(results, Path(folder, f"{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
