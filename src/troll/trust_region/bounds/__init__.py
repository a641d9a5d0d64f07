"""How ε (`kl_bound`) varies over training: fixed, annealed or adaptive; and, in `per_token`, over a batch.

A `Bound` has a `value`, and `update` tells it after every optimiser step what the trust region did. It is plain Python:
the same numbers give the same bound on every process, and its state is JSON. To add a kind, write a class and name it
in `BOUNDS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from troll.trust_region.bounds.bound import Bound, BoundStatistics
from troll.trust_region.bounds.controllers import HoldKL, HoldProjectedFraction
from troll.trust_region.bounds.schedules import Cosine, Fixed, Linear

__all__ = ["BOUNDS", "Bound", "BoundStatistics", "make_bound"]

BOUNDS: dict[str, Callable[..., Bound]] = {
    bound.kind: bound for bound in (Fixed, Linear, Cosine, HoldProjectedFraction, HoldKL)
}


def make_bound(name: str, kl_bound: float, *, total_steps: int | None = None, **options: Any) -> Bound:
    """Makes the bound that is registered under a name.

    Args:
        name: `fixed`, `linear`, `cosine`, `hold_projected_fraction` or `hold_kl`.
        kl_bound: ε at the start, above 0, in nats.
        total_steps: Optimiser steps of the whole training, if known.
        **options: Numbers: `end` and `steps` for `linear` and `cosine`; `target`, `rate`, `smoothing`, `minimum` and
            `maximum` for the two controllers, `hold_projected_fraction` and `hold_kl`.

    Returns:
        The bound, whose `value` is `kl_bound` before the first step.

    Raises:
        ValueError: On an unknown name, an unknown or missing option, or a value out of its range.
    """
    if name not in BOUNDS:
        raise ValueError(f"bound must be one of {', '.join(BOUNDS)}, got {name!r}")
    if not kl_bound > 0:
        raise ValueError(f"kl_bound must be above 0, got {kl_bound}")
    parameters = inspect.signature(BOUNDS[name]).parameters.values()
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"options of the {name!r} bound must be of: {', '.join(known) or 'none'}; got {', '.join(unknown)}"
        )
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise ValueError(f"the {name!r} bound needs {', '.join(missing)}, got {', '.join(options) or 'no options'}")
    for option, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # YAML reads 1e-3, without a point, as text.
        if not number and not (value is None and known[option].default is None):
            raise ValueError(f"{option} must be a number, got {value!r}")
    return BOUNDS[name](kl_bound, total_steps, **options)
