"""Ctrl-C in `troll train`: the run stops at the end of the rollout, with a checkpoint; a second stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from troll.trl.seam import micro_batches_done
from troll_lab.trl import LabTrainer

_SAID = b"\ntroll: stopping at the end of the rollout, with a checkpoint; Ctrl-C again stops at once\n"


class StopAfterRollout(TrainerCallback):
    """Ends a training that was interrupted by Ctrl-C where a resumed run repeats an uninterrupted one bit for bit.

    In the middle of a rollout, a checkpoint would lack the rollout's completions.

    Args:
        trainer: The trainer, whose other callbacks run before this one.

    Attributes:
        stopped: Whether it has ended the training before its last step.
    """

    def __init__(self, trainer: LabTrainer) -> None:
        self._trainer, self._asked, self.stopped = trainer, False, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the first Ctrl-C within the context; the second raises KeyboardInterrupt, as without it.

        Does nothing outside the main thread, the only one to get signals, or if SIGINT has another handler already.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            # The signal may have interrupted `print`, which cannot be called again before it returns.
            os.write(2, _SAID)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Saves and ends the training if a rollout has had all its updates; every process has to agree."""
        trainer = self._trainer
        if micro_batches_done(trainer) % trainer.args.rollout_steps or state.global_step >= state.max_steps:
            return
        asked = torch.tensor([self._asked], device=trainer.accelerator.device)
        if trainer.accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True
