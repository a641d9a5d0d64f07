"""Which learning rate a KL target leads to, and with what success, as far as runs at constant rates tell.

The rows of the study's second part say how large the KL was at each rate. So they say at which rate it would have been
the wanted one, and how good the runs at that rate were. They cannot say whether a controller finds that rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments import third
from experiments.second_analysis import Contest
from troll.trust_region.rate import EXPONENT

#: Targets, in nats a token.
TARGETS = (0.01, 0.02, 0.03, 0.05, 0.1)
#: W/T as a function of A: how the KL that is wanted in a rollout's last update depends on its age.
LAWS: Mapping[str, Callable[[float], float]] = {
    "√(A/7)": lambda age: math.sqrt(age / 7),
    "1": lambda age: 1.0,
    "A/7": lambda age: age / 7,
}
#: The law that `troll.KLTarget` has.
LAW = "√(A/7)"


@dataclass(frozen=True)
class Prediction:
    """What a target leads to.

    Attributes:
        rate: The learning rate; beyond those that were run, it is extrapolated.
        success: The mean success at that rate; None beyond the rates that were run.
    """

    rate: float
    success: float | None


def last_kls(table: str, method: str, found: Contest) -> dict[float, float]:
    """The KL of a rollout's last update at each learning rate, a geometric mean over seeds, while it grows.

    A row's `token_kl` is the mean over a rollout's updates, for the clip that of the last one. The KL is taken to grow
    as age^1.7. At rates where it falls again, the policy has collapsed: these are left out.

    Args:
        table: The name of the third part's table.
        method: The method's key in `second.METHODS`.
        found: The second part's counted runs of the regime.
    """
    regime = third.REGIMES[table]
    ages = range(regime.staleness, regime.last_age + 1)
    share = 1.0 if method == "clip" else fmean((age / regime.last_age) ** EXPONENT for age in ages)
    kls_by_rate: dict[float, float] = {}
    for rate, runs in found.methods[method].runs.items() if method in found.methods else ():
        kls = [run.token_kl for run in runs.values() if run.token_kl]
        kl = math.exp(fmean(map(math.log, kls))) / share if kls else 0.0
        if kl <= max(kls_by_rate.values(), default=0.0):
            break
        kls_by_rate[rate] = kl
    return kls_by_rate


def predict(table: str, method: str, wanted: float, found: Contest) -> Prediction | None:
    """The rate at which the KL of a rollout's last update is `wanted`, and the success there.

    Between two rates, the logarithm of the KL and the success are linear in the logarithm of the rate; beyond the last
    one the KL grows as rate^1.7.

    Args:
        table: The name of the third part's table.
        method: The method's key in `second.METHODS`.
        wanted: W in nats.
        found: The second part's counted runs of the regime.

    Returns:
        The prediction; None if there are no runs.
    """
    kls = last_kls(table, method, found)
    if not kls:
        return None
    rates, logs = np.log(list(kls)), np.log(list(kls.values()))
    at = math.log(wanted)
    if not logs[0] <= at <= logs[-1]:
        end = 0 if at < logs[0] else -1
        return Prediction(math.exp(rates[end] + (at - logs[end]) / EXPONENT), None)
    rate = float(np.interp(at, logs, rates))
    means = found.methods[method].means
    return Prediction(math.exp(rate), float(np.interp(rate, rates, [means[each] for each in kls])))


def losses(table: str, wanted: float, found: Contest) -> dict[str, float | None]:
    """Each method's predicted success minus that at its best constant rate; None where nothing is predicted."""
    differences: dict[str, float | None] = {}
    for method in third.REGIMES[table].methods:
        expected = predict(table, method, wanted, found)
        differences[method] = None
        if expected is not None and expected.success is not None:
            differences[method] = expected.success - max(found.methods[method].means.values())
    return differences
