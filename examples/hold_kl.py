"""A bound that adapts: ε falls while the network is farther from the old policy than a target, and rises while nearer.

    trainer = TrollTrainer(..., args=TrollConfig(kl_bound=0.05, logging_steps=1))
    trainer.add_callback(HoldKL(trainer, target=0.02))

After every update, with the running mean m of the network's KL divergence from the old policy before the projection,

    log ε  ←  log ε − rate · clamp(m / target − 1, −1, 1),

and ε stays between 1e-3 and 1. Every process computes the same ε. Checkpoints keep it, for a run that is resumed.

ε bounds the projected policy, which the network only follows. If the network stays within the target by itself, ε ends
at its upper limit; if it follows too slowly, at the lower one. Whether a bound that adapts helps is an open question.
The study ran one that widens ε until a fifth of the tokens is projected: it was not better than a fixed ε
(docs/study/exploration.md). It did not run this one.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

from troll.trl import TrollTrainer

#: Its entry in the trainer's state, which checkpoints keep. It is not the name of the class: with
#: `restore_callback_states_from_checkpoint`, transformers would make a new callback, without a trainer. It says instead
#: that it ignores the entry, which `on_train_begin` reads.
KEPT = "hold_kl"


class HoldKL(TrainerCallback):
    """Moves `trainer.kl_bound` so that the network's mean KL divergence meets a target.

    Args:
        trainer: The trainer, with `logging_steps=1`.
        target: The mean KL(p̃ ‖ p) to hold, in nats.
        rate: No update changes ε by more than a factor of e^rate. If ε oscillates, halve it.
        smoothing: The weight of the past in the mean, which goes back about 1/(1 − smoothing) updates. It should cover
            at least those of a rollout: its first update measures 0, its last one the most.
    """

    def __init__(self, trainer: TrollTrainer, target: float, rate: float = 0.05, smoothing: float = 0.9) -> None:
        self.trainer, self.target, self.rate, self.smoothing = trainer, target, rate, smoothing
        # Sums of the measurements and of their weights: the first measurements count in full.
        self.measured = self.weight = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes over the state of the checkpoint from which a run is resumed."""
        if (kept := state.stateful_callbacks.get(KEPT)) is not None:
            self.trainer.kl_bound = kept["kl_bound"]
            self.measured, self.weight = kept["measured"], kept["weight"]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Moves ε after an update; other logs, such as those of an evaluation, say nothing about it."""
        if (kl := logs.get("trust_region/kl_before_mean")) is None:
            return
        self.measured = self.smoothing * self.measured + (1 - self.smoothing) * kl
        self.weight = self.smoothing * self.weight + (1 - self.smoothing)
        error = min(max(self.measured / self.weight / self.target - 1, -1.0), 1.0)
        self.trainer.kl_bound = min(max(self.trainer.kl_bound * math.exp(-self.rate * error), 1e-3), 1.0)
        kept = {"kl_bound": self.trainer.kl_bound, "measured": self.measured, "weight": self.weight}
        state.stateful_callbacks[KEPT] = kept
