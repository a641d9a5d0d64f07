"""The second part of the protocol, as `docs/study/study.md` fixes it: its regimes and its methods.

The part is finished. Its pages are made from the rows of its tables only, so a configuration is known by the settings
that a row names, even if the package's own settings have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: The values of the settings that a configuration changed, as on the command line.
Changes = Mapping[str, str]


@dataclass(frozen=True)
class Regime:
    """A regime, whose runs have a table of their own.

    Attributes:
        name: The name on the page.
        recipe: The recipe of all its runs.
        tuning_rates: The learning rates at which configurations are chosen.
        rates: The learning rates of the counted runs.
        added_rates: The rates that are added if a method is best at an end of `rates`, by that end.
        seeds: The seeds of the counted runs.
        changes: What all its runs change in the recipe.
    """

    name: str
    recipe: str
    tuning_rates: Sequence[float]
    rates: Sequence[float]
    added_rates: Mapping[float, float]
    seeds: Sequence[int]
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A method, and the configurations from which the tuning chooses.

    Attributes:
        name: The name on the page.
        surrogate: The value of `--surrogate`.
        configurations: The settings to choose from; of equally good ones the first wins.
    """

    name: str
    surrogate: str
    configurations: Sequence[Changes]


#: The regimes by the names of their tables.
REGIMES = {
    "second-a": Regime(
        "(a) 8 updates a rollout",
        "sparse-signal",
        tuning_rates=(1e-4, 3e-4),
        rates=(1e-4, 3e-4, 1e-3),
        added_rates={1e-4: 3e-5, 1e-3: 3e-3},
        seeds=range(20, 40),
    ),
    "second-b": Regime(
        "(b) 32 updates a rollout",
        "sparse-signal-32-updates",
        tuning_rates=(3e-5, 1e-4),
        rates=(3e-5, 1e-4, 3e-4),
        added_rates={3e-5: 1e-5, 3e-4: 1e-3},
        seeds=range(20, 40),
    ),
    "second-d": Regime(
        "(d) Rollouts that are 16 rollouts old",
        "sparse-signal-long",
        tuning_rates=(1e-4,),
        rates=(3e-5, 1e-4, 3e-4),
        added_rates={3e-5: 1e-5, 3e-4: 1e-3},
        seeds=range(20, 30),
        changes={"rollout_delay": "16", "anchor": "rollout"},
    ),
}
#: The regimes of the hypotheses about a fast learning rate, and that of the one about old rollouts.
FAST, OLD = ("second-a", "second-b"), "second-d"
TUNING_SEEDS = (100, 101, 102, 103)

#: The methods by their names in run folders, in the order of tables. The hypotheses are about the first.
NEW, PENALTIES = "proximal", ("penalty", "bounded-penalty")
METHODS = {
    "proximal": Method(
        "pull everywhere",
        "troll",
        (
            {"pull": "proximal", "kl_bound": "0.5", "regression_weight": "1"},
            {"pull": "proximal", "kl_bound": "0.5", "regression_weight": "0.3"},
            {"pull": "proximal", "kl_bound": "0.5", "constraint": "sequence"},
        ),
    ),
    "troll": Method("TROLL", "troll", ({"kl_bound": "0.05"}, {"kl_bound": "0.2"}, {"kl_bound": "0.5"})),
    "penalty": Method(
        "KL penalty",
        "kl_penalty",
        ({"surrogate_kwargs.weight": "0.1"}, {"surrogate_kwargs.weight": "0.3"}, {"surrogate_kwargs.weight": "1"}),
    ),
    "bounded-penalty": Method(
        "KL penalty, bounded",
        "kl_penalty",
        (
            {"surrogate_kwargs.cap": "5", "surrogate_kwargs.weight": "1"},
            {"surrogate_kwargs.cap": "5", "surrogate_kwargs.weight": "0.3"},
            {"surrogate_kwargs.clip": "1", "surrogate_kwargs.weight": "1"},
        ),
    ),
    "clip": Method("clip", "clip", ({"epsilon": "0.1"}, {"epsilon": "0.2"}, {"epsilon": "0.4"})),
}

#: The values of these settings where a configuration does not change them. A row names all that its surrogate read.
UNCHANGED: Mapping[str, Changes] = {"troll": {"pull": "projection", "regression_weight": "1", "constraint": "token"}}


def configurations() -> Iterator[tuple[str, Changes]]:
    """Each configuration of each method, with the method's key in `METHODS`, in the order of tables."""
    return ((key, changes) for key, method in METHODS.items() for changes in method.configurations)


def settings_of(method: str, changes: Changes) -> dict[str, str | None]:
    """What a row of a configuration has in each field that some configuration of its surrogate changes.

    Args:
        method: The method's key in `METHODS`.
        changes: The configuration.

    Returns:
        The values by field; None where the row must be empty.
    """
    surrogate = METHODS[method].surrogate
    names = {name for key, other in configurations() if METHODS[key].surrogate == surrogate for name in other}
    values = {**UNCHANGED.get(surrogate, {}), **changes}
    return {name: values.get(name) for name in names}
