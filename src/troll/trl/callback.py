"""The work after an update: the critic's step, and the log; and the state that a resumed run needs."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from troll.files import json_text, write_atomically
from troll.trl import seam
from troll.trl.checkpoints import say_resumed
from troll.trl.resumed_settings import changed_settings, save_settings, settings

#: The file of a checkpoint that holds what the watch over projected tokens has counted.
WATCH_STATE = "projected.json"


class TrollCallback(TrainerCallback):
    """The work of a `TrollTrainer` between updates; every method runs on every process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._args, self._critic = trainer, trainer.args, trainer.advantages.critic
        self._monitor, self._diagnostics, self._ungraded = trainer.monitor, trainer.diagnostics, trainer.ungraded
        # These have files of their own in a checkpoint.
        parts = (self._critic, trainer.rollout_weights, trainer.resampling)
        self._saved = [part for part in parts if part is not None]
        # The bound that the last update used, for the log: it may have moved on by then.
        self._used_bound = trainer.kl_bound
        #: Whether the current update leaves the policy as it is: the critic warms up, or nothing was judged.
        self._policy_stays = False
        #: Whether the policy has changed since the tokens of the current update were sampled.
        self._moved = False
        self._rollouts = 0
        self._settings: dict[str, Any] = {}
        #: From `checkpoints.resolved`: the checkpoint to resume from, if any, and the defects of newer ones.
        self.resumed: tuple[str | None, dict[Path, str]] = None, {}

    def save(self, checkpoint: Path) -> None:
        """Writes the files of a checkpoint that `on_train_begin` reads."""
        for part in self._saved:
            part.save(checkpoint)
        if self._args.should_save:
            save_settings(self._settings, checkpoint)
            write_atomically(checkpoint / WATCH_STATE, json_text(self._monitor.watch.state_dict()))

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Restores the critic and the order of the data, and drops the state of an interrupted update."""
        self._rollouts, self._moved = self._rollouts_done(), self._passes_since_sampling() > 0
        self._settings = settings(self._args)
        for part in (self._monitor, self._diagnostics, self._ungraded, *self._saved):
            part.start()
        checkpoint, passed_over = self.resumed
        if checkpoint is None:
            return
        changed = changed_settings(self._settings, Path(checkpoint))
        if changed is not None and state.is_world_process_zero:
            warnings.warn(changed, stacklevel=2)
        seam.skip_epochs(train_dataloader, int(state.epoch or 0))
        for part in self._saved:
            part.load(Path(checkpoint))
        path = Path(checkpoint) / WATCH_STATE
        if path.is_file() and changed is None:  # with other settings, the counts begin anew
            self._monitor.watch.load_state_dict(json.loads(path.read_text()))
        if state.is_world_process_zero:
            say_resumed(Path(checkpoint), state.global_step, state.max_steps, passed_over)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Updates the critic before the policy, so that an error stops both; skips both without a judged token."""
        self._used_bound = self._trainer.kl_bound
        nothing_judged = self._ungraded.left_nothing()
        self._policy_stays = nothing_judged or (self._critic is not None and self._critic.warming_up)
        if self._policy_stays:
            # The optimiser skips a parameter without a gradient; with a gradient of zero its momentum would still move
            # it. DeepSpeed has made its update in the backward pass.
            model.zero_grad()
        if self._critic is not None and not nothing_judged:
            self._critic.step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Warns of a bound that does not fit, and logs."""
        # Also between two of `logging_steps`: after the evaluation that may follow, TRL drops what is left.
        control.should_log |= control.should_training_stop
        rollouts = self._rollouts_done()
        last, self._rollouts = rollouts > self._rollouts, rollouts
        self._monitor.end_update(self._used_bound, moved=self._moved and not self._policy_stays, last=last)
        self._moved = self._passes_since_sampling() > 0
        self._log(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs the metrics if transformers logs once per epoch, or if training ends early."""
        self._log(state, control)

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        """Adds `trust_region/*` and `critic/*`, over all tokens since the last log, to the metrics that TRL logs."""
        if not (control.should_log or control.should_training_stop):  # the latter by a callback after this one
            return
        metrics = self._monitor.metrics() | self._diagnostics.metrics()
        # An infinite bound is not logged: JSON has no infinity, and transformers writes its state as JSON too.
        if metrics and self._trainer.surrogate.projects and math.isfinite(self._used_bound):
            metrics["trust_region/kl_bound"] = self._used_bound
        if self._critic is not None:
            metrics |= {f"critic/{name}": value for name, value in self._critic.metrics().items()}
        seam.add_metrics(self._trainer, metrics)

    def _passes_since_sampling(self) -> int:
        """The passes since the tokens of the next one were sampled from the network itself."""
        passes = seam.micro_batches_done(self._trainer) % self._args.rollout_steps
        weights = self._trainer.rollout_weights
        behind = 0 if weights is None else weights.rollouts_behind(anew=passes == 0)
        return behind * self._args.rollout_steps + passes

    def _rollouts_done(self) -> int:
        """The number of rollouts that have had all their updates."""
        return seam.micro_batches_done(self._trainer) // self._args.rollout_steps
