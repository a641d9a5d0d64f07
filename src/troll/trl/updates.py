"""What follows an update: the critic's step, ε, β and the log; and the state that a resumed run needs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from troll.files import write_atomically
from troll.trl import seam
from troll.trl.advantages.critic import Critic
from troll.trl.checkpoints import say_resumed
from troll.trl.config import TrollConfig
from troll.trl.penalty import PenaltyWeight
from troll.trl.surrogates import SURROGATES
from troll.trust_region.bounds import Bound

#: The file of a checkpoint that holds the state of the bound's schedule or controller.
BOUND_STATE = "kl_bound.json"
#: The file that holds the weight of a pull or a KL penalty, if it adapts.
PENALTY_STATE = "kl_penalty.json"


class Updates(TrainerCallback):
    """Follows the updates of a `TrollTrainer`; every event runs on every process.

    Args:
        trainer: The `TrollTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._args: TrollConfig = trainer.args
        self._critic: Critic | None = trainer.advantages.critic
        # What has files of its own in a checkpoint.
        self._saved = [part for part in (self._critic, trainer.rollout_weights) if part is not None]
        self._bound: Bound | None = None
        self._used_bound = self._args.kl_bound
        self._rests = False
        self._penalty = SURROGATES[self._args.surrogate].penalty
        self._penalty_adapts = self._args.penalty_target is not None
        #: The weight of a pull or a KL penalty, for the next update.
        self.penalty_weight = self._initial_penalty_weight()
        self._used_penalty_weight, self._rollouts = self.penalty_weight.value, 0
        #: The checkpoint to resume from, if any, and what newer ones lack.
        self.resumed: tuple[str | None, dict[Path, str]] = None, {}

    @property
    def kl_bound(self) -> Bound:
        """The bound: its value now, and its schedule."""
        if self._bound is None:  # only training knows how long it takes
            self._bound = self._args.make_bound(total_steps=max(1, self._trainer.state.max_steps))
        return self._bound

    def _initial_penalty_weight(self) -> PenaltyWeight:
        args = self._args
        return PenaltyWeight(self._trainer.accelerator, self._penalty or "", args.penalty_weight, args.penalty_target)

    def save(self, checkpoint: Path) -> None:
        """Writes the files of a checkpoint that `on_train_begin` reads."""
        for part in self._saved:
            part.save(checkpoint)
        if self._args.should_save:
            write_atomically(checkpoint / BOUND_STATE, json.dumps(self.kl_bound.state_dict()))
            if self._penalty_adapts:
                write_atomically(checkpoint / PENALTY_STATE, json.dumps(self.penalty_weight.state_dict()))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restores ε, β and the critic from a checkpoint, and drops what an interrupted update has left."""
        self._bound, self.penalty_weight = None, self._initial_penalty_weight()
        self._rollouts = self._rollouts_done()
        for part in (self._trainer.monitor, self._trainer.unscored, *self._saved):
            part.start()
        checkpoint, passed_over = self.resumed
        if checkpoint is None:
            return
        for part in self._saved:
            part.load(Path(checkpoint))
        path = Path(checkpoint) / BOUND_STATE
        if path.is_file():
            self.kl_bound.load_state_dict(json.loads(path.read_text()))
        elif self._args.kl_bound_schedule != "fixed":
            warnings.warn(f"{checkpoint} has no {BOUND_STATE}: the schedule of kl_bound starts anew", stacklevel=2)
        path = Path(checkpoint) / PENALTY_STATE
        if self._penalty_adapts and path.is_file():
            self.penalty_weight.load_state_dict(json.loads(path.read_text()))
        elif self._penalty_adapts:
            warnings.warn(f"{checkpoint} has no {PENALTY_STATE}: {self._penalty}_weight starts anew", stacklevel=2)
        if state.is_world_process_zero:
            say_resumed(Path(checkpoint), state.global_step, state.max_steps, passed_over)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Updates the critic before the policy, so that an error stops both; without a judged token, neither moves."""
        nothing_judged = self._trainer.unscored.left_nothing()
        self._rests = nothing_judged or (self._critic is not None and self._critic.warming_up)
        if self._rests:
            # Without a gradient, the optimiser leaves a parameter as it is; one of zero would go on with its momentum.
            # DeepSpeed has made its update in the backward pass.
            model.zero_grad()
        if self._critic is not None and not nothing_judged:
            self._critic.step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adapts ε to what was seen in the update, and β to what was seen in a rollout's last update."""
        rollouts, self._used_penalty_weight = self._rollouts_done(), self.penalty_weight.value
        self.penalty_weight.end_update(adapt=rollouts > self._rollouts and not self._rests)
        self._rollouts = rollouts
        statistics = self._trainer.monitor.end_update()
        if statistics is not None:
            self._used_bound = self.kl_bound.value
            if not self._rests:  # a policy that does not move says nothing about ε
                self.kl_bound.update(state.global_step, statistics)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Adds `trust_region/*` and `critic/*`, over all tokens since the last log, before any callback reports."""
        trainer = self._trainer
        if logs is None or not trainer.model.training:
            return
        metrics = trainer.monitor.metrics(state.global_step) | trainer.diagnostics.metrics()
        if metrics and SURROGATES[self._args.surrogate].projects:
            metrics["trust_region/kl_bound"] = self._used_bound
        if metrics and self._penalty:
            metrics[f"trust_region/{self._penalty}_weight"] = self._used_penalty_weight
            metrics |= {f"trust_region/{name}": value for name, value in self.penalty_weight.metrics().items()}
        if self._critic is not None:
            metrics |= {f"critic/{name}": value for name, value in self._critic.metrics().items()}
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def _rollouts_done(self) -> int:
        """Rollouts that have been used up."""
        return seam.micro_batches_done(self._trainer) // self._args.rollout_steps
