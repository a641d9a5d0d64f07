"""A plugin: a KL target that the learning rate follows by the rule of robot learning, as a rival.

rsl_rl's rule (`KLAdaptiveLR` in skrl, the same in torchrl) divides the rate by 1.5 where the KL is above 2 T and
multiplies it by 1.5 where it is below T/2, at every update with a KL above 0, and keeps it within [1e-5, 1e-2]: in
leggedrobotics/rsl_rl, `rsl_rl/algorithms/ppo.py`. Its start is that of `troll.KLTarget`, so both begin at one rate, and
the rate may also fall to a hundredth of 1e-5, since the rates here are smaller than those of robots.
"""

from __future__ import annotations

from collections.abc import Sequence

from troll.trl import Estimator, kl_target, register_estimator
from troll.trust_region.rate import KLTarget

FACTOR, LEAST, MOST = 1.5, 1e-7, 1e-2


class RivalTarget(KLTarget):
    """rsl_rl's rule, with the interface of `troll.KLTarget`."""

    def _observe(self, kl: float, age: float, walk: float, fallen: Sequence[str]) -> None:
        """Moves the rate by one factor if the KL is far from the target, whatever the age."""
        state = self._state
        if kl > 2 * self.kl:
            state.rate = max(state.rate / FACTOR, LEAST)
        elif 0 < kl < self.kl / 2:
            state.rate = min(state.rate * FACTOR, MOST)


# A plugin must register something, and there is no registry of rules: the trainer's own is replaced.
kl_target.KLTarget = RivalTarget  # type: ignore[misc]
register_estimator("group_with_rival_rate", Estimator(needs_group=True))
