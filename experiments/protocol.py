"""What was fixed before the first counted run: the regimes, the methods, the runs, and what is tested."""

from __future__ import annotations

from typing import Literal

#: Runs of the tuning seeds chose each method's bound; counted runs decide the hypotheses; the others only explore.
Phase = Literal["tuning", "counted", "exploratory"]

#: The names of the primary regimes on the page, by recipe; all other regimes only explore.
REGIMES = {
    "sparse-signal": "(a) 8 updates a rollout",
    "sparse-signal-32-updates": "(b) 32 updates a rollout",
    "sparse-signal-resampled": "(c) Groups of equal rewards replaced",
}

#: The names of the methods on the page, by surrogate, in the order of tables and colours.
METHODS = {
    "troll": "TROLL",
    "kl_penalty": "KL penalty",
    "regression": "pull only",
    "clip": "clip",
    "none": "no bound",
}

#: The bound of each surrogate, and the values that are tried.
BOUNDS = {
    "troll": ("kl_bound", (0.01, 0.05, 0.2)),
    "kl_penalty": ("surrogate_kwargs.weight", (0.3, 1.0, 3.0)),
    "regression": ("kl_bound", (0.01, 0.05, 0.2)),
    "clip": ("epsilon", (0.1, 0.2, 0.4)),
}
TUNING_RATES = (1e-4, 3e-4)
TUNING_SEEDS = (100, 101, 102, 103)

LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
#: The rates that are added if a method is best at an end of these, by that end.
ADDED_RATES = {3e-5: 1e-5, 1e-3: 3e-3}
SEEDS = 20

#: The rivals in the tests; other differences are shown without a test.
TESTED = ("kl_penalty", "regression", "clip")

#: Differences of success within this are equivalent.
MARGIN = 0.05
LEVEL = 0.05


def letter(regime: str) -> str:
    """The letter of a primary regime, as in its name."""
    return REGIMES[regime].partition(" ")[0]
