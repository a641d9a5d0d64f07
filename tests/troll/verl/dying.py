"""A module for `VERL_USE_EXTERNAL_MODULES`: a worker of rank 1 that dies where it is told to, and a record of states.

`DYING` is "update N", in the N-th optimiser step of the process, or "checkpoint N", half-way through writing the
checkpoint of step N. What a worker saves and loads is noted in the folder `DYING_FOLDER`.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from wrapt import when_imported

PLACE, _, NUMBER = os.environ.get("DYING", "").partition(" ")


def die() -> None:
    """As a machine that is gone: no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def fingerprint(manager: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(manager.model.state_dict().items()):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(name.encode() + local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def note(kind: str, manager: Any, path: str) -> None:
    """Adds a line: what was done, with which checkpoint, by which rank, and the parameters."""
    step = Path(path).parent.name
    with open(Path(os.environ["DYING_FOLDER"]) / "states.txt", "a") as file:
        file.write(f"{kind} {step} {manager.rank} {fingerprint(manager)}\n")


@when_imported("verl.workers.engine.fsdp.transformer_impl")
def install(_: Any) -> None:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as Manager
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    step, save, load = FSDPEngine.optimizer_step, Manager.save_checkpoint, Manager.load_checkpoint
    steps = iter(range(1, sys.maxsize))

    def optimizer_step(self: Any) -> Any:
        if f"update {next(steps)}" == f"{PLACE} {NUMBER}" and torch.distributed.get_rank() == 1:
            die()
        return step(self)

    def save_checkpoint(self: Any, local_path: str, *arguments: Any, **keywords: Any) -> None:
        if PLACE == "checkpoint" and Path(local_path).parent.name == f"global_step_{NUMBER}" and self.rank == 1:
            torch_save = torch.save

            def half(value: Any, path: str) -> None:
                torch_save(value, path)
                os.truncate(path, os.path.getsize(path) // 2)
                die()

            torch.save = half  # type: ignore[assignment]
        save(self, local_path, *arguments, **keywords)
        note("saved", self, local_path)

    def load_checkpoint(self: Any, local_path: str, *arguments: Any, **keywords: Any) -> None:
        load(self, local_path, *arguments, **keywords)
        if local_path is not None:
            note("loaded", self, local_path)

    FSDPEngine.optimizer_step = optimizer_step
    Manager.save_checkpoint, Manager.load_checkpoint = save_checkpoint, load_checkpoint
