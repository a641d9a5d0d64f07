"""The work before a training and after each update: refusals, warnings and the log, and what a resumed run needs."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from troll.trl import checks, seam
from troll.trl.kl_target import SETTLED_ROLLOUTS, KLTargetRate
from troll.trl.resumed_settings import changed_settings, settings

#: The key of a `TrainerState`, and so of a checkpoint's `trainer_state.json`, under which the callback's own state is.
STATE = "troll"
#: The key of the learning rate's state in it, where a KL sets the rate.
KL_TARGET = "kl_target"


class TrollCallback(TrainerCallback):
    """The work of a `TrollTrainer` around its updates; every method runs on every process.

    Args:
        trainer: The trainer, whose parent's `__init__` has not run yet.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # The bound that the last update used: a callback may set `kl_bound` for the next update before we log.
        self._used_bound = math.inf
        #: Whether the current update leaves the policy as it is, since nothing was judged. The laboratory's callback,
        #: which runs after this one, has reasons of its own.
        self.policy_stays = False
        # Whether the policy has changed since the tokens of the current update were sampled.
        self._moved = False
        self._rollouts = 0
        self._settings: dict[str, Any] = {}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses other than data parallelism, and keeps the dtype of the outputs under FSDP2.

        transformers calls it when it has made the accelerator, before TRL shares out the reference model.
        """
        trainer = self._trainer
        checks.refuse_model_parallelism(trainer)
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate would round every output to the parameters' dtype, log-probabilities among them.
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Begins a training, or restores the order of the data and the state of a checkpoint."""
        trainer = self._trainer
        trainer.begin()
        self._rollouts = self._rollouts_done()
        self._settings = settings(trainer.args)
        # The steps between logs, evaluations and checkpoints: transformers keeps those of the checkpoint.
        state.compute_steps(args, state.max_steps)
        # Of the checkpoint that transformers has read; a new run, and a checkpoint of another trainer, have none.
        resumed = _states(state).get(STATE)
        seam.skip_epochs(train_dataloader, int(state.epoch or 0))
        # A stream counts as one epoch of `max_steps`: exactly 1 is the end of a training, more a stream that had ended.
        if (state.epoch or 0) > 1 and seam.rows_of_an_epoch(trainer) is None and state.is_world_process_zero:
            warnings.warn(
                "the checkpoint's stream of prompts had ended and begun anew, and transformers does not find its place "
                "in it: the resumed run begins with its first prompt. For an exact resume, pass a Dataset",
                stacklevel=2,
            )
        trainer.kl_target_rate = None
        if trainer.args.kl_target is not None:
            trainer.kl_target_rate = KLTargetRate(trainer, trainer.lr_scheduler, (resumed or {}).get(KL_TARGET))
        elif resumed is not None and KL_TARGET in resumed and state.is_world_process_zero:
            warnings.warn(
                f"the checkpoint's learning rate followed a KL target, and was {resumed[KL_TARGET]['rate']:.2g} before "
                "the schedule. Without kl_target it becomes the checkpoint's learning_rate, of which the search began "
                "at a hundredth. If this is not what you want, begin a new run from its weights",
                stacklevel=2,
            )
        changed = None if resumed is None else changed_settings(resumed["settings"], self._settings)
        if changed is not None and state.is_world_process_zero:
            checkpoint = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            warnings.warn(f"resuming from {checkpoint} with other settings: {changed}", stacklevel=2)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Finds whether the policy has changed since the update's tokens were sampled."""
        self._moved = self._passes_since_sampling() > 0

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Skips an update without a judged token, except under DeepSpeed, which made it in the backward pass."""
        self._used_bound = self._trainer.kl_bound
        self.policy_stays = self._trainer.ungraded.left_nothing() and not self._trainer.is_deepspeed_enabled
        if self.policy_stays:
            leave_out(model)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Warns of a bound that does not fit, and has the next checkpoint keep settings and rate.

        At the step's end it would be too late, for transformers may save before this callback has its turn there
        (`enable_jit_checkpoint`).
        """
        rollouts = self._rollouts_done()
        last, self._rollouts = rollouts > self._rollouts, rollouts
        trainer = self._trainer
        monitor, rate = trainer.monitor, trainer.kl_target_rate
        monitor.end_update(self._used_bound, moved=self._moved and not self.policy_stays, last=last)
        states = {"settings": self._settings}
        if rate is not None:
            rate.end_update(moved=not self.policy_stays and not trainer.accelerator.optimizer_step_was_skipped)
            if last and rollouts == SETTLED_ROLLOUTS:
                checks.warn_about_precision(trainer.accelerator, trainer.model, rate.rate)
            states[KL_TARGET] = rate.state_dict()
        _states(state)[STATE] = states

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs."""
        # Also between two of `logging_steps`: after the evaluation that may follow, TRL drops what is left.
        control.should_log |= control.should_training_stop
        self._log(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs the metrics if transformers logs once per epoch, or if training ends early."""
        self._log(state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses a training that has ended without a step."""
        checks.refuse_no_step(self._trainer)

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        """Adds `trust_region/*`, over all tokens since the last log, to the metrics that TRL logs."""
        if not logs_now(control):
            return
        trainer = self._trainer
        metrics = trainer.monitor.metrics() | trainer.diagnostics.metrics()
        if trainer.kl_target_rate is not None:
            metrics |= trainer.kl_target_rate.metrics()
        # An infinite bound is not logged: JSON has no infinity, and transformers writes its state as JSON too.
        if metrics and trainer.surrogate.projects and math.isfinite(self._used_bound):
            metrics["trust_region/kl_bound"] = self._used_bound
        seam.add_metrics(trainer, metrics)

    def _passes_since_sampling(self) -> int:
        """The passes since the tokens of the next one were sampled from the network itself."""
        trainer = self._trainer
        passes = seam.micro_batches_done(trainer) % trainer.args.rollout_steps
        return trainer.passes_behind(anew=passes == 0) + passes

    def _rollouts_done(self) -> int:
        """The number of rollouts that have had all their updates."""
        return seam.micro_batches_done(self._trainer) // self._trainer.args.rollout_steps


def _states(state: TrainerState) -> dict[str, Any]:
    """The states of callbacks by name, which transformers keeps in checkpoints; it declares them as a list."""
    states: Any = state.stateful_callbacks
    return states


def logs_now(control: TrainerControl) -> bool:
    """Whether transformers logs after this event; it ends a training with a log too."""
    return control.should_log or control.should_training_stop  # the latter by a callback after ours


def leave_out(model: Any) -> None:
    """Makes the optimiser's next step leave a model unchanged.

    The optimiser skips a parameter without a gradient; with a gradient of zero its momentum would still move it.
    """
    model.zero_grad()
