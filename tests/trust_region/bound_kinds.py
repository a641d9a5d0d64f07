"""Every kind of bound, with options that it takes."""

from typing import Any

from troll.trust_region.bounds import BoundStatistics

NOTHING = BoundStatistics(projected_fraction=0.0, kl=0.0)

#: One valid set of options for each kind, so that a new kind is tested once it is named here.
OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "linear": {"end": 0.01},
    "cosine": {"end": 0.01, "steps": 30},
    "by_age": {"end": 0.5, "steps": 16},
    "hold_projected_fraction": {"target": 0.05},
    "hold_kl": {"target": 0.02, "rate": 0.1},
}
