"""The work of the laboratory's trainer before a training and after each update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from troll.trl.callback import leave_out, logs_now
from troll.trl.seam import add_metrics
from troll_lab.trl.checkpoints import say_resumed


class LabCallback(TrainerCallback):
    """Restores a trainer's parts, and updates its critic; every method runs on every process.

    Args:
        trainer: The `LabTrainer`, whose `callback` runs before this one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._critic = trainer, trainer.critic

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins a training, or restores the critic and the other parts of a checkpoint."""
        trainer = self._trainer
        for part in trainer.saved_parts:
            part.start()
        checkpoint, passed_over = trainer.resumed
        if checkpoint is None:
            return
        for part in trainer.saved_parts:
            part.load(Path(checkpoint))
        if state.is_world_process_zero:
            say_resumed(Path(checkpoint), state.global_step, state.max_steps, passed_over)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Updates the critic before the policy, so that an error stops both; skips it without a judged token."""
        callback = self._trainer.callback
        if self._critic is None or callback.policy_stays:
            return
        if self._critic.warming_up:
            callback.policy_stays = True
            leave_out(model)
        self._critic.step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs."""
        self._log(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs the metrics if transformers logs once per epoch, or if training ends early."""
        self._log(control)

    def _log(self, control: TrainerControl) -> None:
        """Adds `critic/*`, over all tokens since the last log, to the metrics that TRL logs."""
        if self._critic is not None and logs_now(control):
            add_metrics(self._trainer, {f"critic/{name}": x for name, x in self._critic.metrics().items()})
