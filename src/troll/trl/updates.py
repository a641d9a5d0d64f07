"""What happens at the ends of an update: the critic's own, the bound's, and what is logged and resumed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from troll.files import write_atomically
from troll.trl.checkpoints import say_resumed
from troll.trl.config import TrollConfig
from troll.trl.seam import add_metrics
from troll.trust_region.bounds import Bound

#: The file of a checkpoint that holds what ε adapts by.
BOUND_STATE = "kl_bound.json"


class Updates(TrainerCallback):
    """Follows the updates of a `TrollTrainer`; every event runs on every process.

    Args:
        trainer: The `TrollTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._args: TrollConfig = trainer.args
        self._bound: Bound | None = None
        self._used_bound = self._args.kl_bound
        self._rests = False
        # Shifted old log-probabilities of this update whose gradient has not come yet.
        self._unused = 0
        #: The checkpoint to go on from, if any, and what newer ones lack.
        self.resumed: tuple[str | None, dict[Path, str]] = None, {}

    @property
    def kl_bound(self) -> Bound:
        """ε now, and how it goes on."""
        if self._bound is None:  # only training knows how long it takes
            self._bound = self._args.make_bound(total_steps=max(1, self._trainer.state.max_steps))
        return self._bound

    def watch(self, shifted: Any) -> None:
        """Has `on_pre_optimizer_step` check that TRL's loss takes its ratio from these old log-probabilities."""
        if not shifted.requires_grad:
            return
        self._unused += 1

        def used(_: Any) -> None:
            self._unused -= 1

        shifted.register_hook(used)

    def save(self, checkpoint: Path) -> None:
        """Writes what `on_train_begin` reads of a checkpoint."""
        self._trainer.advantages.save(checkpoint)
        if self._args.should_save:
            write_atomically(checkpoint / BOUND_STATE, json.dumps(self.kl_bound.state_dict()))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Goes on with the bound and the critic of a checkpoint."""
        self._bound, self._unused = None, 0
        checkpoint, passed_over = self.resumed
        if checkpoint is None:
            return
        self._trainer.advantages.load(Path(checkpoint))
        path = Path(checkpoint) / BOUND_STATE
        if path.is_file():
            self.kl_bound.load_state_dict(json.loads(path.read_text()))
        elif self._args.kl_bound_schedule != "fixed":
            warnings.warn(f"{checkpoint} has no {BOUND_STATE}: the schedule of kl_bound starts anew", stacklevel=2)
        if state.is_world_process_zero:
            say_resumed(Path(checkpoint), state.global_step, state.max_steps, passed_over)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Before the policy moves: that its loss used the trust region, and the critic's update.

        Raises:
            RuntimeError: If TRL's loss did not take its ratio from what the surrogate made.
        """
        unused, self._unused = self._unused, 0
        if unused:
            raise RuntimeError(
                "GRPOTrainer's loss did not use the ratio of the trust region, and the update was not made: this "
                "version of TRL computes it from something else than old_per_token_logps"
            )
        advantages = self._trainer.advantages
        self._rests = advantages.policy_rests
        if self._rests:
            model.zero_grad()  # without a gradient, the optimiser leaves a parameter as it is
        advantages.step_critic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """ε adapts to what was seen in the update."""
        statistics = self._trainer.monitor.end_update()
        if statistics is not None:
            self._used_bound = self.kl_bound.value
            if not self._rests:  # a policy that does not move says nothing about ε
                self.kl_bound.update(state.global_step, statistics)
        if control.should_log or control.should_training_stop:
            self.log(state.global_step)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """With ``logging_strategy="epoch"``."""
        if control.should_log:
            self.log(state.global_step)

    def log(self, global_step: int) -> None:
        """Adds ``trust_region/*`` and ``critic/*`` to what TRL logs, over all tokens since the last time."""
        trainer = self._trainer
        metrics = trainer.monitor.metrics(global_step) | trainer.diagnosis.metrics()
        if metrics and self._args.surrogate == "troll":
            metrics["trust_region/kl_bound"] = self._used_bound
        add_metrics(trainer, metrics | trainer.advantages.metrics())
