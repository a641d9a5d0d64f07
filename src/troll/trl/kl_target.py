"""The learning rate that follows `TrollConfig.kl_target`, between transformers' scheduler and the optimiser."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from troll.trl import seam
from troll.trl.estimators import combine_rewards
from troll.trl.monitor import CHOOSING
from troll.trust_region.metrics import Tally, masked_total
from troll.trust_region.rate import KLTarget

#: After so many rollouts the rate is near the one that it will stay at.
SETTLED_ROLLOUTS = 4

#: The schedulers that set the learning rate by what they measure.
OWN_RATE_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
#: What to do instead, at the end of an error.
CONSTANT = "For a rate that is not measured, set a learning_rate and no kl_target"

Schedule = Callable[[int], float]


def check_target(args: Any) -> None:
    """Refuses updates that say nothing about the learning rate, and optimisers and schedulers with their own.

    Args:
        args: A `TrollConfig` with a `kl_target`.

    Raises:
        ValueError: Names the setting.
    """
    if args.updates_per_rollout is None:
        raise ValueError(
            f"kl_target needs updates of one rollout each: {args.rollout_steps} passes a rollout "
            "(steps_per_generation times num_iterations) must be a multiple of gradient_accumulation_steps, "
            f"got {args.gradient_accumulation_steps}. {CONSTANT}"
        )
    if args.updates_per_rollout == 1:
        raise ValueError(
            "kl_target needs updates_per_rollout of at least 2, got 1: in the first update on a rollout the policy "
            f"is still the one that sampled, and its KL says nothing about the learning rate. {CONSTANT}"
        )
    if not args.learning_rate > 0:
        raise ValueError(
            f"kl_target begins its search at learning_rate, which must be above 0, got {args.learning_rate}"
        )
    # As users write them, not as transformers' enumerations.
    scheduler, optimizer = (str(getattr(x, "value", x)) for x in (args.lr_scheduler_type, args.optim))
    if scheduler in OWN_RATE_SCHEDULERS:
        raise ValueError(
            f"kl_target sets the learning rate, and so does lr_scheduler_type {scheduler!r}: use another, such as "
            "constant or linear"
        )
    if "lomo" in optimizer or optimizer.endswith("_layerwise"):
        raise ValueError(
            f"kl_target sets the learning rate of an update before its last backward pass, and optim {optimizer!r} "
            "makes a step for each layer within it: use another"
        )


def _computes_in_bfloat16(trainer: Any) -> bool:
    dtype = getattr(trainer.model, "dtype", None)  # which a model that is not transformers' may lack
    return trainer.accelerator.mixed_precision == "bf16" or dtype == torch.bfloat16


class KLTargetRate:
    """Sets the learning rate of every update where it is measured; every method runs on every process.

    The scheduler stays a `LambdaLR`, each of whose functions is multiplied by one factor: a decay, a warm-up and the
    ratio of two parameter groups keep their shape, `get_last_lr` is the rate that is used, and a checkpoint's
    scheduler is the one of a run without a target. The factor changes before the last backward pass of an update, in
    which DeepSpeed makes its step.

    Args:
        trainer: The `TrollTrainer` whose training begins; its configuration has a `kl_target`.
        scheduler: Its scheduler, restored if there is a checkpoint.
        state: A checkpoint's `state_dict`; None if there is none.

    Raises:
        ValueError: If the scheduler is not a `LambdaLR`, or the optimiser's rate is 0.
    """

    def __init__(self, trainer: Any, scheduler: Any, state: dict[str, Any] | None) -> None:
        self._trainer, self._args = trainer, trainer.args
        scheduler = getattr(scheduler, "scheduler", scheduler)  # within accelerate's wrapper
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"kl_target multiplies the functions of a LambdaLR, and the scheduler is {type(scheduler).__name__}: "
                "set lr_scheduler_type, and leave the scheduler out of the trainer's arguments and of DeepSpeed's file"
            )
        self._scheduler = scheduler
        rates = [float(rate) for rate in scheduler.base_lrs]
        # The largest rate stands for those of all groups.
        self._base = max(rates)
        # A scheduler that the user has made may come from an earlier training.
        schedules = [getattr(each, "schedule", each) for each in scheduler.lr_lambdas]
        self._schedule = schedules[rates.index(self._base)]
        scheduler.lr_lambdas = [self._multiplied(each) for each in schedules]
        self._target = KLTarget(
            self._args.kl_target,
            updates_per_rollout=self._args.updates_per_rollout,
            learning_rate=self._base,
            staleness=self._args.anchor_staleness,
            bfloat16=_computes_in_bfloat16(trainer),
            warn=self._warn,
        )
        if state is not None:
            self._target.load_state_dict(state)
        # Of each update, the KL of a sequence: measured above the floor, wanted, and the floor.
        self._kls: list[tuple[float, float, float]] = []
        seam.write_rates(scheduler)

    @property
    def rate(self) -> float:
        """The rate before the schedule, of the parameter group with the largest."""
        return self._target.rate

    def sums_of(self, inputs: dict[str, Any]) -> Tally:
        """What is needed besides a micro-batch's KL: lengths, its tokens with an advantage, the rollout's reward."""
        mask, advantages = seam.loss_mask(inputs).bool(), inputs["advantages"]
        advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
        rewards = combine_rewards(self._trainer.rollout_rewards, self._trainer.reward_weights)
        # The half of a mean says nothing where rewards may be negative.
        counted = ~rewards.isnan() & ~(rewards < 0).any()
        teaching = (mask & (advantages.abs() > self._rounding(rewards))).sum()
        lengths = mask.sum(-1).to(rewards)
        totals = {"length": masked_total(lengths, lengths > 0), "reward": masked_total(rewards, counted)}
        return Tally(totals, counts={"teaching": teaching.to(rewards)})

    def update(self, sums: Tally) -> None:
        """Sets the rate of the current update, before its last backward pass.

        Args:
            sums: Those of the update over all micro-batches and processes, in host memory.
        """
        means = {name: mean.item() for name, mean in sums.values().items()}
        age, length = self._age(), means["length"]
        self._target.update(
            means.get("kl_before_mean", math.nan),
            age,
            length=length,
            schedule=self._schedule(self._scheduler.last_epoch),
            moves=means["teaching"] > 0,
            entropy=means.get("entropy"),
            success=means["reward"],
        )
        if math.isfinite(self._target.compared[0]):
            self._kls.append(self._target.compared)
        seam.write_rates(self._scheduler)

    def end_update(self, *, moved: bool) -> None:
        """Ends an update; `moved` is false if the optimiser's step was skipped or left the policy as it was."""
        if not moved:
            self._target.used(0.0)

    def metrics(self) -> dict[str, float]:
        """`trust_region/kl_target/*`: the means since the last call of a sequence's KL, and the rate."""
        kls, self._kls = self._kls, []
        if not kls:
            return {}
        measured, wanted, floor = (sum(values) / len(kls) for values in zip(*kls, strict=True))
        return {
            "trust_region/kl_target/measured": measured,
            "trust_region/kl_target/wanted": wanted,
            "trust_region/kl_target/floor": floor,
            "trust_region/kl_target/rate": self.rate,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint; it survives JSON."""
        return self._target.state_dict()

    def _rounding(self, rewards: Tensor) -> Tensor:
        """The largest advantage that rounding can make of equal rewards, which TRL divides by a deviation of 1e-4."""
        largest = rewards.abs().nan_to_num().max()
        if self._args.advantage_estimator == "group" and self._args.scale_rewards not in ("none", False):
            return (2**-8 * largest).clamp(max=0.05)
        return 2**-20 * largest

    def _age(self) -> int:
        """The updates since the policy from which the current one's KL is measured."""
        args, trainer = self._args, self._trainer
        passes = seam.micro_batches_done(trainer) % args.rollout_steps
        behind = trainer.passes_behind(anew=False) if args.anchor == "rollout" else 0
        return (behind + passes) // args.gradient_accumulation_steps

    def _multiplied(self, schedule: Schedule) -> Schedule:
        def multiplied(step: int) -> float:
            return schedule(step) * (self.rate / self._base)

        vars(multiplied)["schedule"] = schedule  # kept so that a second training does not multiply twice
        return multiplied

    def _warn(self, message: str) -> None:
        if self._trainer.accelerator.is_main_process:
            warnings.warn(f"{message} ({CHOOSING})", stacklevel=2)
