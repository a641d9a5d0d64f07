"""The third part of the protocol, as `docs/study/study.md` fixes it: a learning rate that follows a KL target.

Only the settings of its runs are here, so its page is made from rows alone. Commit a1cd21e9 makes the runs: its targets
are a mean over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments import second
from experiments.second import Changes

#: T, in nats a token, the same for all methods and regimes.
TARGET = 0.03
#: The values of `learning_rate` with the target; the search begins at a hundredth of them.
STARTS = (1e-6, 1e-2)
#: What the target and the constant rate are multiplied by to see how wide each dial is, next to 1.
FACTORS = (1 / 9, 1 / 3, 3.0, 9.0)


@dataclass(frozen=True)
class Regime:
    """A regime, whose runs have a table of their own.

    Attributes:
        name: The name on the page.
        recipe: The recipe of all its runs.
        updates: The updates on one rollout.
        staleness: The number of updates between the sampling of a rollout and its first update.
        seeds: The seeds of the counted runs.
        methods: The configuration of each method, by its key in `second.METHODS`, in the order of tables, with its
            learning rate: those that the second part found best, or the recipe's.
        changes: What all its runs change in the recipe.
        starts: The values of `learning_rate` with the target.
        former: The table of the second part's runs of the regime; None if it has none.
        decay: The number of updates in which the recipe's schedule takes the rate to 0; None for a constant one.
        gates: Whether the hypotheses are decided here.
    """

    name: str
    recipe: str
    updates: int
    staleness: int
    seeds: Sequence[int]
    methods: Mapping[str, tuple[Changes, float]]
    changes: Changes = field(default_factory=dict)
    starts: Sequence[float] = STARTS
    former: str | None = None
    decay: int | None = None
    gates: bool = True

    @property
    def last_age(self) -> int:
        """A, the age of a rollout's last update."""
        return self.updates - 1 + self.staleness

    def schedule(self, rollout: int) -> float:
        """What the recipe's schedule multiplies the rate by in the last update of a rollout, counted from 1."""
        return 1.0 if self.decay is None else 1 - (self.updates * rollout - 1) / self.decay


#: The regimes by the names of their tables, in the order in which their runs are made.
REGIMES = {
    "third-a": Regime(
        second.REGIMES["second-a"].name,
        second.REGIMES["second-a"].recipe,
        updates=8,
        staleness=0,
        seeds=range(40, 64),
        methods={
            "troll": ({"kl_bound": "0.05"}, 1e-4),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "constraint": "sequence"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "1"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 1e-4),
        },
        former="second-a",
    ),
    "third-b": Regime(
        second.REGIMES["second-b"].name,
        second.REGIMES["second-b"].recipe,
        updates=32,
        staleness=0,
        seeds=range(40, 64),
        methods={
            "troll": ({"kl_bound": "0.05"}, 3e-5),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "regression_weight": "0.3"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "0.3"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 3e-5),
        },
        former="second-b",
    ),
    "third-d": Regime(
        second.REGIMES["second-d"].name,
        second.REGIMES["second-d"].recipe,
        updates=8,
        staleness=128,
        seeds=range(40, 52),
        methods={
            "troll": ({"kl_bound": "0.5"}, 1e-4),
            "proximal": ({"pull": "proximal", "kl_bound": "0.5", "regression_weight": "0.3"}, 1e-4),
            "penalty": ({"surrogate_kwargs.weight": "0.1"}, 1e-4),
            "clip": ({"epsilon": "0.2"}, 3e-5),
        },
        changes=second.REGIMES["second-d"].changes,
        former="second-d",
        gates=False,
    ),
    "third-smollm2": Regime(
        "SmolLM2 with LoRA",
        "smollm2-sums",
        updates=8,
        staleness=0,
        seeds=range(3, 8),
        methods={
            "troll": ({"kl_bound": "0.05"}, 2e-4),
            "penalty": ({"surrogate_kwargs.weight": "1"}, 2e-4),
            "clip": ({"epsilon": "0.2"}, 2e-4),
        },
        changes={"model_name_or_path": "models/SmolLM2-135M-Instruct"},
        starts=(1e-2,),
        decay=128,
    ),
}

#: The table of the second part's runs of each regime that has some.
FORMER = {name: regime.former for name, regime in REGIMES.items() if regime.former is not None}
#: The table of the rule of robot learning, whose runs are those with a target in the first regime.
RIVALS = "third-rivals"
#: The table of targets and rates that are too low or too high, for the first seeds of the first regime.
DIAL = "third-dial"
#: The regime of each table, and the seeds of its runs.
TABLES = {
    **{name: (name, regime.seeds) for name, regime in REGIMES.items()},
    DIAL: ("third-a", range(40, 48)),
}


@dataclass(frozen=True)
class Arm:
    """One of the runs of a seed.

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
    regime, found = REGIMES[TABLES[table][0]], []
    for method, (_, rate) in regime.methods.items():
        if table == DIAL:
            found += [Arm(method, regime.starts[-1], rounded(TARGET * factor)) for factor in FACTORS]
            found += [Arm(method, rounded(rate * factor), None) for factor in FACTORS]
        else:
            found += [Arm(method, start, TARGET) for start in regime.starts]
            found.append(Arm(method, rate, None))
    return found


def rounded(value: float) -> float:
    """A setting with two digits, as it is given to a run."""
    return float(f"{value:.2g}")


def settings_of(regime: Regime, arm: Arm) -> dict[str, str | None]:
    """What a row of a run has in each field that tells the runs of its surrogate apart; None where it must be empty."""
    changes = {**second.settings_of(arm.method, regime.methods[arm.method][0]), **regime.changes}
    return {**changes, "kl_target": None if arm.target is None else f"{arm.target:g}", "plugins": None}
