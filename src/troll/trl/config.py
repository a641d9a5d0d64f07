"""Configuration of the TRL trainer."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

from trl import GRPOConfig

from troll.trust_region.dual import SOLVERS
from troll.trust_region.policy import TAILS, Tail

#: How TRL's `loss_type` aggregates over tokens, in the core's names; "dapo" divides by the tokens of the whole
#: generation batch. The other loss types bring a surrogate of their own, with no clip to replace.
AGGREGATION = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length"}
LOSS_TYPES = (*AGGREGATION, "dapo")


@dataclass
class TrollConfig(GRPOConfig):
    r"""`GRPOConfig` with a trust region instead of a clip.

    Everything of [`~trl.GRPOConfig`] keeps its meaning, but for `epsilon`, `epsilon_high` (there is no clip: they are
    ignored) and `delta` (refused). Note that `top_k` remains TRL's sampling parameter; the number of tokens kept of
    the old policy is `support_top_k`.

    Args:
        kl_bound: ε, the largest KL divergence (nats) of a token's distribution from the old policy's.
        regression_weight: α, the weight of KL(p̃ ‖ ⌊q⌋), which pulls the network to the projected policy.
        support_top_k: K, how many tokens of the old policy are kept per position.
        mass_threshold: δ: fewer are kept where they already cover 1 − δ of the probability mass.
        tail: What happens to the rest: "bucket", one more outcome with its exact mass, or "floor", the paper's code.
        solver: "newton", or "bracket", the paper's.

    Raises:
        ValueError: On a value out of its range, a `loss_type` without a clip to replace, or a `delta`.
    """

    kl_bound: float = field(
        default=0.05,
        metadata={"help": "Largest KL divergence (nats) of a token's distribution from the old policy's."},
    )
    regression_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of the term that pulls the network to the projected policy."},
    )
    support_top_k: int = field(
        default=64,
        metadata={"help": "Tokens of the old policy kept per position (`top_k` is TRL's, for sampling)."},
    )
    mass_threshold: float = field(
        default=1e-5,
        metadata={"help": "Fewer tokens are kept where they already cover 1 - mass_threshold of the mass."},
    )
    tail: Tail = field(
        default="bucket",
        metadata={"help": "Treatment of the other tokens."},
    )
    solver: str = field(
        default="newton",
        metadata={"help": "Solver of the dual problem.", "choices": list(SOLVERS)},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Dropout changes the policy between scoring and update, which the trust region would see."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kl_bound > 0:
            raise ValueError(f"kl_bound must be above 0, got {self.kl_bound}")
        if not 0 <= self.regression_weight < math.inf:
            raise ValueError(f"regression_weight must be finite and at least 0, got {self.regression_weight}")
        if self.support_top_k < 1:
            raise ValueError(f"support_top_k must be at least 1, got {self.support_top_k}")
        if not 0 <= self.mass_threshold < 1:
            raise ValueError(f"mass_threshold must be in [0, 1), got {self.mass_threshold}")
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r}")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {self.solver!r}")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type {self.loss_type!r} has no clip that a trust region could replace; "
                f"use one of {', '.join(LOSS_TYPES)}"
            )
        if self.delta is not None:
            raise ValueError("delta clips the ratio a second time, and TROLL has no clip: leave it unset")
        default = {name: GRPOConfig.__dataclass_fields__[name].default for name in ("epsilon", "epsilon_high")}
        ignored = [name for name, value in default.items() if getattr(self, name) != value]
        if ignored:
            warnings.warn(f"{' and '.join(ignored)} ignored: kl_bound takes the place of the clip", stacklevel=3)

    @property
    def rollout_steps(self) -> int:
        """Forward-backward passes for which one rollout is used."""
        assert self.steps_per_generation is not None  # set by the parent
        return self.steps_per_generation * self.num_iterations

    @property
    def always_on_policy(self) -> bool:
        """Whether every update sees a fresh rollout, so that old and new policy are equal and TROLL is the identity."""
        return self.gradient_accumulation_steps % self.rollout_steps == 0
