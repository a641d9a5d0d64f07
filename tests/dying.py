"""Processes that kill themselves at a chosen place of a training run, as the kernel or a scheduler would: SIGKILL."""

import contextlib
import io
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback, TrainerState

from troll_lab.trl import LabTrainer, checkpoints

#: Forks from a process that has imported all this, and never from the one that runs the tests, which has threads.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.dying", "troll_lab.runs.train"])


def die() -> None:
    """Ends this process without any of its clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_new_process(function: Callable[..., None], *arguments: Any) -> int | None:
    """Calls a function in a process of its own, and returns how that ended: 0, or −9 where it was killed."""
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    process.join(600)
    return process.exitcode


class DieInUpdate(TrainerCallback):
    """Between the gradients of an update and its step."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.update - 1:
            die()


@contextlib.contextmanager
def dying_in_checkpoint(step: int, file: str) -> Iterator[None]:
    """Dies with half of a file of `checkpoint-step` written; of the marker, before it says that all is there."""
    folder = f"checkpoint-{step}"

    def halve(path: Path) -> None:
        if path.name == file and path.parent.name == folder:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            die()

    save, to_json, save_model = torch.save, TrainerState.save_to_json, LabTrainer._save
    complete = checkpoints._complete

    def torch_save(value: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        save(value, path, *arguments, **keywords)
        if not isinstance(path, io.IOBase):
            halve(Path(path))

    def json_save(state: TrainerState, path: str) -> None:
        to_json(state, path)
        halve(Path(path))

    def model_save(trainer: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        save_model(trainer, output_dir, state_dict)
        if output_dir is not None:
            halve(Path(output_dir, "model.safetensors"))

    def complete_marker(checkpoint: Path, only_model: bool) -> None:
        if file == checkpoints.MARKER and checkpoint.name == folder:
            die()
        complete(checkpoint, only_model)

    with (
        mock.patch("torch.save", torch_save),
        mock.patch.object(TrainerState, "save_to_json", json_save),
        mock.patch.object(LabTrainer, "_save", model_save),
        mock.patch.object(checkpoints, "_complete", complete_marker),
    ):
        yield


def dying(place: str) -> tuple[list[TrainerCallback], contextlib.AbstractContextManager[None]]:
    """Callbacks and a context for a place: `update 3` or `checkpoint-2/optimizer.pt`; empty for nowhere."""
    if place.startswith("update "):
        return [DieInUpdate(int(place.removeprefix("update ")))], contextlib.nullcontext()
    if place:
        folder, file = place.split("/")
        return [], dying_in_checkpoint(int(folder.removeprefix("checkpoint-")), file)
    return [], contextlib.nullcontext()
