"""The third part of the protocol, as `docs/study/study.md` fixes it: a learning rate that follows a KL target.

Only the settings of its runs are here, so its page is made from rows alone. `third_runs.py` makes the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments import second
from experiments.second import Changes

#: T, in nats, the same for all methods and regimes.
TARGET = 0.03
#: The values of `learning_rate` with the target; the search begins at a hundredth of them.
STARTS = (1e-6, 1e-2)


@dataclass(frozen=True)
class Regime:
    """A regime, whose runs have a table of their own.

    Attributes:
        table: The table of the second part's runs of the regime.
        updates: The updates on one rollout.
        staleness: The number of updates between the sampling of a rollout and its first update.
        seeds: The seeds of the counted runs.
        methods: The configuration of each method, by its key in `second.METHODS`, in the order of tables, with its
            learning rate: those that the second part found best.
        gates: Whether the hypotheses are decided here.
    """

    table: str
    updates: int
    staleness: int
    seeds: Sequence[int]
    methods: Mapping[str, tuple[Changes, float]]
    gates: bool = True

    @property
    def name(self) -> str:
        """The name on the page."""
        return second.REGIMES[self.table].name

    @property
    def last_age(self) -> int:
        """A, the age of a rollout's last update."""
        return self.updates - 1 + self.staleness


#: The regimes by the names of their tables, in the order in which their runs are made.
REGIMES = {
    "third-a": Regime(
        "second-a",
        updates=8,
        staleness=0,
        seeds=range(40, 64),
        methods={
            "troll": ({"kl_bound": "0.05"}, 1e-4),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "constraint": "sequence"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "1"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 1e-4),
        },
    ),
    "third-b": Regime(
        "second-b",
        updates=32,
        staleness=0,
        seeds=range(40, 64),
        methods={
            "troll": ({"kl_bound": "0.05"}, 3e-5),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "regression_weight": "0.3"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "0.3"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 3e-5),
        },
    ),
    "third-d": Regime(
        "second-d",
        updates=8,
        staleness=128,
        seeds=range(40, 52),
        methods={
            "troll": ({"kl_bound": "0.5"}, 1e-4),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "regression_weight": "0.3"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "0.1"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 3e-5),
        },
        gates=False,
    ),
}


#: The table of the rival rule, which explores: its runs are those with a target in the first regime.
RIVALS = "third-rivals"
#: The regime of each table.
TABLES = {**{name: name for name in REGIMES}, RIVALS: "third-a"}


@dataclass(frozen=True)
class Arm:
    """One of the twelve runs of a seed.

    Attributes:
        method: The method's key in `second.METHODS`.
        rate: The value of `learning_rate`.
        target: T; None at a constant rate.
    """

    method: str
    rate: float
    target: float | None


def arms(table: str) -> list[Arm]:
    """The runs of each seed of a table, in the order in which they are made."""
    found = []
    for method, (_, rate) in REGIMES[TABLES[table]].methods.items():
        found += [Arm(method, start, TARGET) for start in STARTS]
        found += [] if table == RIVALS else [Arm(method, rate, None)]
    return found


def settings_of(table: str, arm: Arm) -> dict[str, str | None]:
    """What a row of a run has in each field that tells the runs of its surrogate apart; None where it must be empty."""
    regime = REGIMES[table]
    changes = {**second.settings_of(arm.method, regime.methods[arm.method][0]), **second.REGIMES[regime.table].changes}
    return {**changes, "kl_target": None if arm.target is None else f"{arm.target:g}", "plugins": None}
