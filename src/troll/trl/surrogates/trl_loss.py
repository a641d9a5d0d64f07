"""What a surrogate needs of TRL's own loss: its type, and its clip or none."""

from __future__ import annotations

import warnings
from typing import Any

from trl import GRPOConfig

from troll.trl.surrogates import SURROGATES
from troll.trust_region.loss import Aggregation

#: How TRL's `loss_type` aggregates over tokens, in the core's names; "dapo" divides by the tokens of the whole
#: generation batch.
AGGREGATION: dict[str, Aggregation] = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length"}
LOSS_TYPES = (*AGGREGATION, "dapo")
#: Loss types that work only with TRL's clip.
CLIP_LOSS_TYPES = ("luspo",)
#: The largest ratio of "cispo" if `epsilon_high` is not set: ScaleRL's (arXiv 2510.13786), which TRL recommends.
CISPO_LARGEST_RATIO = 5.0


def settle_loss(args: Any) -> None:
    """Sets the fields of TRL's loss that a configuration's surrogate needs, and warns of values that it replaces.

    `TrollConfig.__post_init__` calls it, so that the warnings name the line that makes the configuration.

    Raises:
        ValueError: If the surrogate and the loss type do not go together, or the surrogate does not use `delta`.
    """
    surrogate = SURROGATES[args.surrogate]
    known = (*LOSS_TYPES, *CLIP_LOSS_TYPES) if surrogate.clips and surrogate.terms is None else LOSS_TYPES
    if args.loss_type not in (*known, surrogate.sets.get("loss_type")):
        remedy = f"use one of {', '.join(known)}"
        if args.loss_type in SURROGATES:  # which sets it
            remedy = f"set surrogate={args.loss_type!r} and leave loss_type out"
        elif args.loss_type in CLIP_LOSS_TYPES:
            remedy += ", or surrogate='clip'"
        raise ValueError(f"loss_type {args.loss_type!r} does not go with surrogate {args.surrogate!r}: {remedy}")
    if args.delta is not None and not surrogate.clips:
        raise ValueError(
            f"delta is a part of TRL's clip, which surrogate {args.surrogate!r} does not use: leave it unset, or "
            "set surrogate='clip'"
        )
    if args.surrogate == "cispo":
        args.epsilon_high = CISPO_LARGEST_RATIO if args.epsilon_high is None else args.epsilon_high
        if not args.epsilon_high >= 1:
            raise ValueError(
                "with surrogate 'cispo', epsilon_high is the largest ratio itself, and must be at least 1, got "
                f"{args.epsilon_high}: leave it out for {CISPO_LARGEST_RATIO}"
            )
    default = {name: entry.default for name, entry in GRPOConfig.__dataclass_fields__.items()}
    for name, value in surrogate.sets.items():
        given = getattr(args, name)
        if given not in (value, default[name]):
            warnings.warn(f"{name}={given!r} is now {value!r}: surrogate {args.surrogate!r} sets it", stacklevel=4)
        setattr(args, name, value)
    unread = [name for name in ("epsilon", "epsilon_high") if name not in surrogate.fields]
    ignored = [name for name in unread if getattr(args, name) != default[name]]
    if ignored:
        warnings.warn(f"{' and '.join(ignored)} ignored: surrogate {args.surrogate!r} does not use them", stacklevel=4)
    # A clip that is off has no range; a GRPOTrainer, which would turn it on, fails in its first loss.
    vars(args).update(dict.fromkeys(unread))
