"""The settings for verl's users, checked on the driver before a worker starts."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from troll.settings import VLLM_LEAST_TEMPERATURE, check_number
from troll.trust_region.checks import check_choice
from troll.trust_region.constraint import CONSTRAINTS
from troll.trust_region.loss import RATIO_LEVELS
from troll.trust_region.policy.truncation import Truncation
from troll.trust_region.step import PULLS
from troll.verl.seam.training import FSDPActorConfig, McoreActorConfig, MegatronEngine, PolicyLossConfig, assign

#: How our engines' names begin in verl's registry, so that no other engine takes their place if they are missing.
BACKEND_PREFIX = "troll_"

#: The plugin that verl loads in every process, so that its vLLM servers report.
PLUGIN = "troll.verl.plugin"

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
_ROLLOUT = "actor_rollout_ref.rollout"

_NUMBERS = {
    "kl_bound": "above 0",
    "regression_weight": "finite and at least 0",
    "top_k": "an integer, at least 1",
    "mass_threshold": "in [0, 1)",
}
_CHOICES = {"pull": PULLS, "constraint": CONSTRAINTS, "ratio_level": RATIO_LEVELS, "anchor": ("old", "rollout")}


@dataclass
class TrollPolicyLossConfig(PolicyLossConfig):
    """verl's policy loss with a trust region instead of the clip; `actor_rollout_ref.actor.policy_loss`.

    Args:
        loss_mode: verl's name of the policy loss: "troll".
        kl_bound: ε > 0, in nats: the bound on KL(q ‖ p) of every token. Infinity, with which nothing is projected, is
            allowed with `pull` "proximal" only.
        pull: The term that pulls the network: "projection", KL(p̃ ‖ ⌊q⌋), outside the ball only; or "proximal", KL(p ‖
            p̃), at every token.
        regression_weight: α ≥ 0, the weight of the pull.
        top_k: K, the largest number of tokens of the old policy to keep.
        mass_threshold: δ in [0, 1): fewer tokens are kept where they already cover 1 − δ of the mass.
        constraint: The tokens that share one multiplier: with "token", each has its own; with "sequence", those of a
            sequence.
        ratio_level: "token"; or "sequence", the mean of log q/p over the sequence (GSPO).
        anchor: "old", the network when the rollout is scored; or "rollout", the inference engine's distribution.
        kl_target: The KL to the old policy, not to the reference model, that the learning rate follows: that of a
            response, the sum over its tokens, in nats, that is wanted in the last of eight updates on a rollout
            ([KLTarget][troll.KLTarget]). None leaves the rate to verl.

    The configuration group sets the fields from `uses_v1_trainer` on: settings of verl that are checked here.

    Raises:
        ValueError: If a value is out of its range, or TROLL cannot work with the trainer.
    """

    loss_mode: str = "troll"
    kl_bound: float = 0.05
    pull: str = "projection"
    regression_weight: float = 1.0
    top_k: int = 64
    mass_threshold: float = 1e-5
    constraint: str = "token"
    ratio_level: str = "token"
    anchor: str = "old"
    kl_target: float | None = None
    uses_v1_trainer: bool = True
    experimental_rollout: Any = None
    bypass_mode: bool = False
    distills: bool = False
    kl_in_reward: bool = False
    rollout_log_probs: bool = True
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_temperature: float = 1.0
    rollout_repetition_penalty: float = 1.0
    rollout_engine_kwargs: Any = None
    rollout_name: str | None = None
    rollout_is_disaggregated: bool = False
    rollout_full_determinism: bool = False
    rollout_logprobs_mode: str = "processed_logprobs"
    trainer_mode: str = "sync"
    train_batch_size: int = 1
    mini_batch_size: int = 1
    epochs: int = 1
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True

    def __post_init__(self) -> None:
        if self.loss_mode != "troll":
            raise ValueError(
                f"{_LOSS}.loss_mode must be troll with +troll=..., got {self.loss_mode!r}: leave the "
                "group out to train with verl's own loss"
            )
        for name, takes in _NUMBERS.items():
            check_number(f"{_LOSS}.{name}", getattr(self, name), takes)
        if math.isinf(self.kl_bound) and self.pull != "proximal":
            raise ValueError(f"{_LOSS}.kl_bound must be finite unless pull=proximal, got {self.kl_bound}")
        for name, known in _CHOICES.items():
            check_choice(f"{_LOSS}.{name}", getattr(self, name), known)
        self._check_sampling()
        self._check_trainer()
        if self.anchor == "rollout":
            self._check_rollout()
        if self.kl_target is not None:
            self._check_kl_target()

    @property
    def updates_per_rollout(self) -> int:
        """The updates that are made between two transfers of the weights to the rollout."""
        return math.ceil(self.train_batch_size / self.mini_batch_size) * self.epochs

    @property
    def rounding(self) -> float:
        """The largest advantage that rounding can make of equal rewards, relative to the rewards.

        verl divides it by a standard deviation of 0 plus 1e-6 in GRPO, and by 1e-4 at least where it whitens.
        """
        return 0.2 if self.adv_estimator.startswith("grpo") and self.norm_adv_by_std_in_grpo else 2**-9

    @property
    def batches_per_rollout(self) -> int:
        """The batches of these updates: verl's separate_async takes each mini-batch as a batch of its own."""
        return self.updates_per_rollout // self.epochs if self.trainer_mode == "separate_async" else 1

    @property
    def truncation(self) -> Truncation | None:
        """The rollout's truncation of the policy; None if there is none."""
        # As vLLM's kernels on a GPU have it, where verl runs it.
        kept = Truncation(max(self.rollout_top_k, 0), self.rollout_top_p, ties="exact")
        return None if kept.keeps_all else kept

    def _check_sampling(self) -> None:
        """Refuses settings with which the old policy is not the one that verl samples from, or compares."""
        if self.truncation is not None and self.kl_in_reward:
            raise ValueError(
                "algorithm.use_kl_in_reward compares whole policies, and with rollout.top_p or rollout.top_k the old "
                f"log-probabilities are those on the kept tokens: set {_ACTOR}.use_kl_loss=True instead"
            )
        if not self.rollout_temperature >= VLLM_LEAST_TEMPERATURE:
            raise ValueError(
                f"{_ROLLOUT}.temperature must be at least {VLLM_LEAST_TEMPERATURE}, the lowest that vLLM samples "
                f"at, got {self.rollout_temperature}"
            )
        if self.rollout_repetition_penalty != 1:
            raise ValueError(
                f"{_ROLLOUT}.repetition_penalty changes what is sampled and cannot be a part of the old policy: set it "
                f"to 1, got {self.rollout_repetition_penalty}"
            )
        if self.rollout_name == "sglang" and self.rollout_top_p < 1 and self.rollout_top_k > 0:
            raise ValueError(
                f"{_ROLLOUT}.top_p and top_k keep other tokens in SGLang than in the old policy, since SGLang's top_p "
                "is a share of the whole policy, not of what top_k keeps: set one of them, or rollout.name=vllm"
            )
        if self._engine_setting("logits_processors"):
            raise ValueError(
                f"{_ROLLOUT}.engine_kwargs has logits_processors, which change what is sampled and cannot be a part of "
                "the old policy: leave them out"
            )

    def _engine_setting(self, name: str) -> Any:
        """A setting that is handed to the rollout's engine past verl; None if there is none."""
        return ((self.rollout_engine_kwargs or {}).get(self.rollout_name) or {}).get(name)

    def _check_trainer(self) -> None:
        if not self.uses_v1_trainer:
            raise ValueError("verl's legacy trainer drops fields that TROLL needs: set trainer.use_v1=True")
        if self.experimental_rollout is not None:
            raise ValueError(
                "verl's fully_async_policy and one_step_off_policy drop fields of the batch that TROLL needs: use "
                "verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async"
            )
        if self.distills:
            raise ValueError("TROLL takes the hook of the engine that distils: set distillation.enabled=False")
        if self.bypass_mode and self.anchor == "old":
            raise ValueError(
                "algorithm.rollout_correction.bypass_mode=True leaves out the pass that captures the old policies: set "
                f"it to False, or {_LOSS}.anchor=rollout"
            )

    def _check_rollout(self) -> None:
        if not (self.bypass_mode and self.rollout_log_probs):
            raise ValueError(
                f"{_LOSS}.anchor=rollout takes the place of the old-policy pass: set "
                "algorithm.rollout_correction.bypass_mode=True and actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        mode = self._engine_setting("logprobs_mode") or self.rollout_logprobs_mode
        if mode != "processed_logprobs":
            raise ValueError(
                f"{_LOSS}.anchor=rollout needs log-probabilities at the sampling temperature: set "
                f"{_ROLLOUT}.logprobs_mode=processed_logprobs, and none in its engine_kwargs, not {mode}"
            )
        if self.rollout_full_determinism:
            raise ValueError(
                f"{_LOSS}.anchor=rollout needs requests with ids of their own, and {_ROLLOUT}.full_determinism=True "
                "may give several the same: set it to False, or anchor=old"
            )
        if self.rollout_is_disaggregated or self.rollout_name in ("sglang", "trtllm"):
            raise ValueError(
                f"{_LOSS}.anchor=rollout needs a rollout that reports its distributions: set "
                "actor_rollout_ref.rollout.name=vllm without disaggregation, or anchor=old"
            )
        import troll.verl.seam.rollout  # noqa: F401 (raises if verl lacks something)

        if self.rollout_name == "vllm" and PLUGIN not in sys.modules:
            raise ValueError(
                f"{_LOSS}.anchor=rollout needs {PLUGIN}, which verl has not loaded: leave "
                "VERL_USE_EXTERNAL_PLUGINS at auto, and install troll-rl on every machine (a checkout by pip too)"
            )

    def _check_kl_target(self) -> None:
        """Refuses updates that say nothing about the learning rate, or whose age a worker does not know."""
        check_number(f"{_LOSS}.kl_target", self.kl_target, "finite and above 0")
        if self.updates_per_rollout == 1:
            raise ValueError(
                f"{_LOSS}.kl_target needs at least two updates per rollout, got one: in the first update on a rollout "
                "the policy is still the old one, and its KL says nothing about the learning rate. Lower "
                f"{_ACTOR}.ppo_mini_batch_size ({self.mini_batch_size}) below data.train_batch_size "
                f"({self.train_batch_size}), or raise {_ACTOR}.ppo_epochs"
            )
        if self.anchor == "rollout" and self.trainer_mode != "sync":
            raise ValueError(
                f"{_LOSS}.kl_target with anchor=rollout needs the age of every sample, which verl's workers do not "
                f"know with trainer.v1.trainer_mode={self.trainer_mode}: set anchor=old, whose KL is to the network "
                "that scored the rollout, or trainer_mode=sync"
            )


class _TrollActor:
    """The part that the actors' configurations share; verl's own are the other base class."""

    engine: Any
    policy_loss: Any
    optim: Any
    strategy: str
    use_prefix_grouper: bool
    ppo_epochs: int
    ppo_mini_batch_size: int
    loss_agg_mode: str
    loss_scale_factor: int | None

    #: The values of `strategy` that have an engine.
    strategies: tuple[str, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Checked before the fields are filled, since the configuration of another engine has other fields.
        strategy = kwargs.get("strategy", cls.strategies[0])
        if strategy not in cls.strategies:
            raise ValueError(
                f"{_ACTOR}.strategy must be {' or '.join(cls.strategies)} with this group, got {strategy!r}: "
                "+troll=fsdp goes with model_engine=dp, and +troll=megatron with model_engine=megatron"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if not isinstance(self.policy_loss, TrollPolicyLossConfig):
            raise ValueError(
                f"{_LOSS}._target_ must be troll.verl.TrollPolicyLossConfig, got "
                f"{type(self.policy_loss).__name__}: select both with +troll=..."
            )
        if self.use_prefix_grouper:
            raise ValueError(f"TROLL needs every token's logits: set {_ACTOR}.use_prefix_grouper=False")
        if self.policy_loss.kl_target is not None and not self.optim.lr > 0:
            raise ValueError(
                f"{_LOSS}.kl_target begins its search at {_ACTOR}.optim.lr, which must be above 0, got {self.optim.lr}"
            )
        # The worker looks up the engine by this name, and passes it only this configuration.
        assign(self.engine, strategy=BACKEND_PREFIX + self.strategy, trust_region=self.policy_loss)

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Mapping[str, Any] | None = None) -> None:
        """Runs verl's checks on the driver, and warns if the trust region can never do anything."""
        super().validate(n_gpus, train_batch_size, model_config)  # type: ignore[misc]
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            warnings.warn(
                f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each micro-batch, "
                f"so the gradient depends on its size: set {_ACTOR}.loss_scale_factor to data.max_response_length",
                stacklevel=2,
            )
        if self.policy_loss.anchor == "rollout" or self.ppo_epochs > 1 or train_batch_size > self.ppo_mini_batch_size:
            return
        warnings.warn(
            "one update per rollout: old and new policy are always equal, and TROLL changes nothing: lower "
            f"{_ACTOR}.ppo_mini_batch_size ({self.ppo_mini_batch_size}) below data.train_batch_size "
            f"({train_batch_size}), or raise {_ACTOR}.ppo_epochs",
            stacklevel=2,
        )


@dataclass
class TrollFSDPActorConfig(_TrollActor, FSDPActorConfig):
    """verl's FSDP actor, with the engine that captures and projects; `actor_rollout_ref.actor`.

    Raises:
        ValueError: If these settings leave no logits to project; says what to set instead.
    """

    strategies = ("fsdp", "fsdp2")


@dataclass
class TrollMcoreActorConfig(_TrollActor, McoreActorConfig):
    """verl's Megatron actor, with the engine that captures and projects; `actor_rollout_ref.actor`.

    Raises:
        ValueError: If these settings leave no logits to project; says what to set instead.
    """

    strategies = ("megatron",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_loss.kl_target is not None and not self.optim.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                f"{_LOSS}.kl_target keeps the rate that it has found in the scheduler's checkpoint, which verl would "
                f"not load: set {_ACTOR}.optim.use_checkpoint_opt_param_scheduler=True"
            )
        if MegatronEngine is None:
            raise ValueError(
                "+troll=megatron needs verl's Megatron engine, which cannot be imported here, as verl warns: "
                "pip install 'verl[megatron]', or choose +troll=fsdp"
            )
        if self.megatron.dynamic_context_parallel:
            raise ValueError(
                "TROLL needs the same processes to share every sequence: set "
                f"{_ACTOR}.megatron.dynamic_context_parallel=False"
            )
