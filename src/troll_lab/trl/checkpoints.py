"""Marks checkpoints as complete, and resumes only from complete ones."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from troll.files import json_text, read_json, write_atomically
from troll_lab.trl.seam import push_checkpoint

#: The file of a checkpoint that says whether it is complete, and how large its files are.
MARKER = "checkpoint.json"

#: The file that transformers writes last, and the only sign of completeness in checkpoints without a marker.
_STATE = "trainer_state.json"

#: A file that transformers keeps in a checkpoint while it writes one at SIGTERM (`enable_jit_checkpoint`).
_UNDER_WAY = "checkpoint-is-incomplete.txt"

logger = logging.getLogger(__name__)


class Judgement(NamedTuple):
    """What a checkpoint's folder lacks.

    Attributes:
        defect: In words; None if the checkpoint is complete.
        was_complete: Whether its marker says that it was complete once.
    """

    defect: str | None
    was_complete: bool = False


def judge(checkpoint: Path) -> Judgement:
    """Judges a checkpoint's folder.

    A checkpoint is complete if its marker says so, every file still has its recorded size, and it does not hold only
    the model. A checkpoint without a marker, such as one of TRL's trainer, is complete if it has a readable
    `trainer_state.json`, which transformers writes last.
    """
    try:
        marker = read_json(checkpoint / MARKER) if (checkpoint / MARKER).is_file() else {}
        if marker.get("complete") is False:
            return Judgement("the run ended while it was written")
        if marker.get("complete") is not True or not isinstance(marker.get("files"), dict):  # none, or somebody else's
            if not (checkpoint / _STATE).is_file():
                return Judgement(f"it has no {_STATE}")
            read_json(checkpoint / _STATE)
            return Judgement(None)
    except ValueError as error:
        return Judgement(str(error))
    for name, size in marker["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return Judgement(f"{name} is missing", was_complete=True)
        if path.stat().st_size != size:
            return Judgement(f"{name} has {path.stat().st_size} bytes and had {size}", was_complete=True)
    # Another optimizer and schedule would start with its model.
    only_model = "it holds only the model (save_only_model)" if marker.get("only_model") else None
    return Judgement(only_model, was_complete=True)


def newest_complete(output_dir: Path) -> tuple[Path | None, dict[Path, str]]:
    """The complete checkpoint of the highest step, if any; and the defect of each checkpoint of a higher step."""
    passed_over: dict[Path, str] = {}
    for checkpoint in _checkpoints(output_dir):
        lacks = judge(checkpoint).defect
        if lacks is None:
            return checkpoint, passed_over
        passed_over[checkpoint] = lacks
    return None, passed_over


def last_checkpoint(output_dir: Path) -> tuple[Path, dict[Path, str]]:
    """The complete checkpoint of the highest step, and the defects of newer ones; raises if there is none.

    Raises:
        ValueError: If no checkpoint is complete; names the incomplete ones and their defects.
    """
    checkpoint, passed_over = newest_complete(output_dir)
    return _existing(checkpoint, output_dir, passed_over), passed_over


def _existing(checkpoint: Path | None, output_dir: Path, passed_over: dict[Path, str]) -> Path:
    if checkpoint is None:
        raise ValueError(
            f"there is no complete checkpoint in output_dir {output_dir} to resume from{_why(passed_over)}"
        )
    return checkpoint


def check_complete(checkpoint: Path) -> None:
    """Raises ValueError if a checkpoint is incomplete.

    The error names the defect, a checkpoint to take instead, and how to resume from this one if it once was complete.
    """
    lacks, was_complete = judge(checkpoint)
    if lacks is None:
        return
    if not (checkpoint / MARKER).exists() and not (checkpoint / _STATE).exists():
        raise ValueError(f"{checkpoint} is not the folder of a checkpoint: {lacks}")
    other, _ = newest_complete(checkpoint.parent)
    instead = "there is no complete one next to it" if other is None else f"resume from {other}"
    on_purpose = f"; to resume from it as it is, delete its {MARKER}" if was_complete else ""
    raise ValueError(f"{checkpoint} is an incomplete checkpoint: {lacks}; {instead}{on_purpose}")


def resolved(output_dir: Path, resume_from_checkpoint: str | bool | None) -> tuple[str | None, dict[Path, str]]:
    """The checkpoint to resume from, or None to start a new run; and the defect of each newer one.

    Args:
        output_dir: The run's folder.
        resume_from_checkpoint: The argument of `Trainer.train`: a checkpoint's folder; or True for the newest complete
            one in `output_dir`; or None.

    Raises:
        ValueError: If there is none, the processes see different ones, or the given one is incomplete.
    """
    if not resume_from_checkpoint:
        return None, {}
    if resume_from_checkpoint is not True:
        if Path(resume_from_checkpoint).is_dir():
            check_complete(Path(resume_from_checkpoint))
        return str(resume_from_checkpoint), {}
    newest, passed_over = newest_complete(output_dir)
    # Before anything is raised, or the other processes would wait for this one.
    found = set(gather_object([newest.name if newest else "none"]))
    if len(found) > 1:  # each would load its own
        raise ValueError(
            f"the processes see different newest checkpoints ({', '.join(sorted(found))}): name one with "
            "resume_from_checkpoint"
        )
    return str(_existing(newest, output_dir, passed_over)), passed_over


@contextlib.contextmanager
def marked(trainer: Any, checkpoint: Path) -> Iterator[None]:
    """Marks the checkpoint that a transformers `Trainer` writes into a folder within the context.

    The marker is written twice: as incomplete before the first file, and again with the size of every file once every
    process has written its part. Only then are older checkpoints deleted (`save_total_limit`) or pushed to the hub, so
    that there always is a complete one. Every process has to call it.
    """
    args, saves = trainer.args, trainer.args.should_save
    if saves:
        _begin(checkpoint)
    trainer.accelerator.wait_for_everyone()
    postponed = {name: getattr(args, name) for name in ("save_total_limit", "push_to_hub")}
    vars(args).update(save_total_limit=None, push_to_hub=False)
    try:
        yield
    finally:
        vars(args).update(postponed)
    if saves:  # it was saved without them
        torch.save(args, checkpoint / TRAINING_ARGS_NAME)
    trainer.accelerator.wait_for_everyone()
    if saves:
        _complete(checkpoint, args.save_only_model)
    if args.push_to_hub:
        push_checkpoint(trainer, checkpoint)
    if saves:
        _delete_older(checkpoint, args.save_total_limit, trainer.state.best_model_checkpoint)


def say_resumed(checkpoint: Path, step: int, max_steps: int, passed_over: dict[Path, str]) -> None:
    """Logs which checkpoint training resumes from, and which newer ones are incomplete."""
    # Not a warning, but the lowest level that is shown if nobody has set up logging.
    logger.warning("resuming from %s (step %d of %d)%s", checkpoint.name, step, max_steps, _why(passed_over))


def save_state(state: dict[str, Any], path: Path) -> None:
    """Writes a file of a checkpoint so that a crash leaves either the old or the new content."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def load_state(path: Path, run: str) -> dict[str, Any]:
    """Reads a file of `save_state` to the CPU; `run` describes the runs that write it, for the error.

    Raises:
        FileNotFoundError: If the checkpoint has no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}: it is not a checkpoint of {run}, or save_only_model was set"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def _checkpoints(output_dir: Path) -> list[Path]:
    """The folders of checkpoints, the highest step first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path: path.name.removeprefix(prefix) for path in output_dir.glob(f"{prefix}*") if path.is_dir()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -int(steps[path]))


def _why(passed_over: dict[Path, str]) -> str:
    return "".join(f"; {path.name} is incomplete and is ignored: {lacks}" for path, lacks in passed_over.items())


def _begin(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_atomically(checkpoint / MARKER, json_text({"complete": False}))


def _complete(checkpoint: Path, only_model: bool = False) -> None:
    files = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path not in (checkpoint / MARKER, checkpoint / _UNDER_WAY) and path.is_file()
    }
    content = {"complete": True, "only_model": only_model, "files": files}
    write_atomically(checkpoint / MARKER, json_text(content, indent=2))


def _delete_older(checkpoint: Path, limit: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints beyond `save_total_limit`; the one just written counts."""
    if limit is None or limit <= 0:
        return
    for other in _checkpoints(checkpoint.parent):
        lacks, was_complete = judge(other)
        # One that was not written to its end would count towards the limit, so a complete one would be deleted instead.
        # One that was changed later stays: somebody may have taken the optimizer's state out of it, to save space.
        if lacks is not None and not was_complete and other != checkpoint:
            shutil.rmtree(other, ignore_errors=True)
    rotate_checkpoints(
        output_dir=str(checkpoint.parent), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True
    )
