"""What was fixed before the first counted run: the regimes, the methods, and what is tested."""

from __future__ import annotations

#: Recipe to its name on the page; all other regimes only explore.
REGIMES = {
    "sparse-signal": "Sparse signal, 8 updates a rollout",
    "sparse-signal-32-updates": "Sparse signal, 32 updates a rollout",
    "sparse-signal-resampled": "Sparse signal, groups of equal rewards sampled again",
}

#: Surrogate to its name on the page, in the order of tables and colours.
METHODS = {
    "troll": "TROLL",
    "kl_penalty": "KL penalty",
    "regression": "pull only",
    "clip": "clip",
    "none": "no bound",
}

#: The rivals of the tests; the other differences are shown without one.
TESTED = ("kl_penalty", "regression", "clip")

LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
SEEDS = 20

#: Differences of success within this are equivalent.
MARGIN = 0.05
LEVEL = 0.05
