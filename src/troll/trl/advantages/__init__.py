"""How rewards become advantages."""

from troll.trl.advantages.estimators import ESTIMATORS

__all__ = ["ESTIMATORS"]
