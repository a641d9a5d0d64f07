"""The learning rate that follows `policy_loss.kl_target`, between verl's scheduler and the optimiser."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from troll.trust_region.metrics import Tally, masked_total
from troll.trust_region.optimizer import set_rates
from troll.trust_region.rate import KLTarget
from troll.trust_region.step import TrustRegionStep
from troll.verl.settings import TrollPolicyLossConfig

logger = logging.getLogger(__name__)

#: The names of `sums_of`: an update adds them to its metrics, and they are not logged.
NOT_LOGGED = ("entropy", "length", "reward", "least_reward", "teaching")

#: The key of the state in that of verl's scheduler.
STATE = "kl_target"


def sums_of(step: TrustRegionStep, mask: Tensor, numbers: Tensor, data: TensorDict, rounding: float) -> Tally:
    """What is needed of a micro-batch besides its KL.

    Args:
        step: The step of this process's n tokens, with their entropy.
        mask: True where a token counts, (n,).
        numbers: Their numbers among the tokens of all responses, (n,).
        data: The micro-batch.
        rounding: The largest advantage that rounding can make of equal rewards, relative to the rewards.

    Returns:
        The means `entropy` over tokens, and `length` and `reward` over sequences, `least_reward`, and `teaching`, the
        number of tokens with an advantage. Without rewards in the batch, there are none.
    """
    assert step.entropy is not None
    # Processes that share the tokens of a sequence all count the whole, so a mean is right, and a sum would not be.
    lengths = _sums_over_tokens(data["response_mask"]).to(step.entropy)
    # verl fills batches up with sequences in which no token counts.
    counted = lengths > 0
    totals = {
        "entropy": masked_total(step.entropy, mask & step.entropy.isfinite()),
        "length": masked_total(lengths, counted),
    }
    minima, rounding_error, advantages = {}, torch.zeros_like(step.entropy), data["advantages"].values()[numbers]
    if "rm_scores" in data:
        rewards = _sums_over_tokens(data["rm_scores"]).to(step.entropy)
        totals["reward"] = masked_total(rewards, counted)
        numbers_of_tokens = data["response_mask"].offsets().diff()
        of_tokens = rewards.repeat_interleave(numbers_of_tokens, output_size=len(data["response_mask"].values()))
        # Advantages do not grow with an offset of the rewards.
        rounding_error = (rounding * of_tokens[numbers].abs()).clamp(max=rounding)
        minima["least_reward"] = torch.where(counted, rewards, torch.inf).min()
    teaching = (mask & (advantages.abs() > rounding_error)).sum()
    return Tally(totals, minima=minima, counts={"teaching": teaching.to(step.entropy)})


def _sums_over_tokens(values: Any) -> Tensor:
    """The sums of nested values (B, T), (B,), without a wait for the device."""
    return torch.segment_reduce(values.values().float(), "sum", lengths=values.offsets().diff(), unsafe=True)


def computes_in_bfloat16(engine: Any) -> bool:
    """Whether an engine with this configuration computes in bfloat16."""
    # FSDP's engine computes in bfloat16 unless this says otherwise, whatever `dtype` is. Megatron's has none of it.
    mixed = (engine.mixed_precision or {}) if hasattr(engine, "mixed_precision") else {"param_dtype": engine.dtype}
    return mixed.get("param_dtype", "bf16") in ("bf16", "bfloat16")


class KLTargetScheduler:
    """The scheduler that verl's engine steps and saves, which also sets the rate of every update.

    verl's own scheduler only makes the schedule: a warm-up and a decay multiply the rate that follows the KL. Every
    method runs on every process, and gets the same numbers there. The engines with another scheduler than torch's
    override `kind`, `peak`, `scheduled` and `rates`.

    Args:
        scheduler: The scheduler that verl has made.
        settings: Those of the trust region, with a `kl_target`.
        bfloat16: As in `KLTarget`.
        warns: Whether this process logs warnings.

    Raises:
        ValueError: If the scheduler is of another class than `kind`.
    """

    #: The class of verl's scheduler.
    kind: type = LambdaLR

    def __init__(
        self, scheduler: Any, settings: TrollPolicyLossConfig, *, bfloat16: bool = False, warns: bool = True
    ) -> None:
        if not isinstance(scheduler, self.kind):
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.kl_target multiplies the rates of {self.kind.__name__}, and "
                f"verl's scheduler is {type(scheduler).__name__}: set kl_target=null, or use a verified version of verl"
            )
        assert settings.kl_target is not None
        self.scheduler: Any = scheduler
        self._batches_per_rollout = settings.batches_per_rollout
        self._planned = settings.updates_per_rollout
        self._target = KLTarget(
            settings.kl_target,
            updates_per_rollout=self._planned,
            learning_rate=self.peak,
            bfloat16=bfloat16,
            warn=logger.warning if warns else lambda message: None,
        )
        # The batches and the updates that were made on the current rollout. Checkpoints lie between rollouts.
        self._batches_on_rollout = self._updates_on_rollout = 0
        self._used = self._write()

    @property
    def peak(self) -> float:
        """The rate at the schedule's peak, the same on every process; the largest stands for those of all groups."""
        return max(float(rate) for rate in self.scheduler.base_lrs)

    @property
    def scheduled(self) -> float:
        """The schedule's rate of the current update, of the group that `peak` is of."""
        return max(self.rates())

    def rates(self) -> list[float]:
        """The schedule's rates of the current update, of each parameter group."""
        return [float(rate) for rate in self.scheduler.get_last_lr()]

    def update(self, means: Mapping[str, float]) -> dict[str, float]:
        """Sets the rate of the current update, before the optimiser's step.

        Args:
            means: Those of the update over all micro-batches and processes.

        Returns:
            The metrics of the update: the KL of a sequence, measured above the floor, wanted, and the floor; and the
            rate before the schedule.
        """
        age, length = self._updates_on_rollout, means["length"]
        if age > self._target.last_age:  # more updates than the last rollout had
            self._target.expect(age + 1)
        self._target.update(
            means["kl_before_mean"],
            age,
            length=length,
            schedule=self.scheduled / self.peak,
            moves=means["teaching"] > 0,
            entropy=means["entropy"],
            # The half of a mean says nothing where rewards may be negative.
            success=means["reward"] if means.get("least_reward", -1.0) >= 0 else None,
        )
        self._updates_on_rollout += 1
        self._used = self._write()
        # As verl's metrics of no token.
        measured, wanted, floor = (value if math.isfinite(value) else 0.0 for value in self._target.compared)
        return {
            "kl_target/measured": measured,
            "kl_target/wanted": wanted,
            "kl_target/floor": floor,
            "kl_target/rate": self._target.rate,
        }

    def skipped(self) -> None:
        """Ends an update whose step the optimiser has skipped."""
        self._target.used(0.0)

    def step(self, *increment: int) -> None:
        """Makes the schedule's next step, as verl calls it after all updates on a batch."""
        self.scheduler.step(*increment)
        self._write()  # for the next update; `get_last_lr` stays that of the last one
        self._batches_on_rollout = (self._batches_on_rollout + 1) % self._batches_per_rollout
        if self._batches_on_rollout == 0:
            # An agent loop may make several rows of a sample, and so more updates than the configuration says.
            if self._updates_on_rollout > 1:
                self._target.expect(self._updates_on_rollout)
            self._updates_on_rollout = 0

    def get_last_lr(self) -> list[float]:
        """The rates that the last update used, of each parameter group; verl logs them after `step`."""
        return self._used

    def state_dict(self) -> dict[str, Any]:
        """The state of verl's scheduler, with ours in it."""
        own = {"updates": self._target.last_age + 1, "planned": self._planned, **self._target.state_dict()}
        return {**self.scheduler.state_dict(), STATE: own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of a checkpoint; without ours in it, the search begins."""
        schedule = dict(state)
        own = schedule.pop(STATE, None)
        self.scheduler.load_state_dict(schedule)
        if own is not None:
            found = dict(own)
            made, planned = found.pop("updates"), found.pop("planned", self._planned)
            if planned == self._planned:  # else the configuration has changed, and says what comes
                self._target.expect(made)
            self._target.load_state_dict(found)
        self._used = self._write()

    def _write(self) -> list[float]:
        """Writes the rates into the optimiser, and returns them."""
        # In the controller's order, whose walk is the sum of these.
        rates = [self._target.rate * (rate / self.peak) for rate in self.rates()]
        set_rates(self.scheduler.optimizer, rates)
        return rates
