"""Configuration of the TRL trainer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from trl import GRPOConfig

from troll.settings import check_number, described, parse
from troll.trl.estimators import ESTIMATORS, check_estimator
from troll.trl.kl_target import check_target
from troll.trl.ranges import CHOICES, MAY_BE_NONE, NUMBERS, NUMBERS_OF_SURROGATES
from troll.trl.sampling import settle_config
from troll.trl.surrogates import SURROGATES, check_surrogate, settings_read
from troll.trl.surrogates.trl_loss import settle_loss
from troll.trust_region.checks import check_choice
from troll.trust_region.constraint import CONSTRAINTS, REDUCTIONS, Reduction, Scope
from troll.trust_region.policy.truncation import Truncation
from troll.trust_region.step import PULLS, Pull

Anchor = Literal["old", "rollout"]

#: The default number of updates per rollout.
UPDATES_PER_ROLLOUT = 8


class _One(int):
    """The number 1, which passes TRL's check `num_generations < 2`.

    There is no plainer way. TRL refuses 1 in the middle of its `__post_init__`, for any estimator, without a setting
    that allows it, and the checks before divide a rollout by the number, and those after must run. Another number that
    passes would have to divide the rollout, which has a size only once TRL has counted the processes, and may be 1. A
    rollout of twice the size would pass where the real one does not, and would be in the messages of what is refused.
    """

    def __lt__(self, other: int) -> bool:
        return other != 2 and super().__lt__(other)


@described
@dataclass
class TrollConfig(GRPOConfig):
    r"""`GRPOConfig` with a trust region instead of a clip.

    Every field of `trl.GRPOConfig` keeps its meaning, with two exceptions. A rollout is used for eight updates instead
    of one (`updates_per_rollout`). And TRL's clip is on only with `surrogate` "clip": any other surrogate sets
    `epsilon` and `epsilon_high` to None (except "cispo", which uses the latter) and refuses `delta` and the loss type
    "luspo". The loss types "cispo", "sapo" and "vespo" are surrogates.

    The old policy follows `temperature`, `top_k`, `top_p` and `min_p`, which may also be in `generation_kwargs`. Other
    settings that change what the sampler draws from are refused. See docs/trl.md for those in the model's files, and
    for None.

    Args:
        updates_per_rollout: Optimiser updates made with each rollout. It sets TRL's `steps_per_generation` to
            `updates_per_rollout * gradient_accumulation_steps / num_iterations`. Default: 8, unless
            `steps_per_generation`, `generation_batch_size` or `num_iterations` is set: it is then computed from those,
            and is None if an update uses several rollouts or a part of one. With 1, the old and the new policy are
            equal in every update.
        surrogate: The method that keeps an update near the old policy: "troll"; "regression", TROLL's regression term
            with the raw ratio; "kl_penalty"; "clip", TRL's (`epsilon`, `epsilon_high`, `delta` for the dual clip);
            "cispo", "sapo" or "vespo", TRL's loss types; "none"; or one of your own, once it is registered. Fields that
            only other surrogates read are ignored. See docs/surrogates.md.
        surrogate_kwargs: The surrogate's own settings as a JSON object, e.g. `{"weight": 0.3}` for "kl_penalty". See
            docs/surrogates.md.
        kl_target: The KL to the old policy, not to the reference model: that of a completion, the sum over its tokens,
            in nats, that is wanted in the last of eight updates on a rollout. The learning rate follows it, with any
            surrogate: `learning_rate` is only where the search begins, at a hundredth of it, and the schedule
            multiplies what is found. 0.1 is a start. It needs two updates on a rollout, in bfloat16 four, and
            float32 for completions of more than some 400 tokens. Default: None, the rate is `learning_rate`. See
            docs/trl.md.
        kl_bound: ε, the largest KL divergence (nats) of a token's distribution from the old policy's.
        pull: The term that pulls the network: "projection", KL(p̃ ‖ ⌊q⌋), to the projected policy, outside the ball
            only; or "proximal", KL(p ‖ p̃), to the old policy, at every token. With "proximal" and an infinite
            `kl_bound`, "troll" is "kl_penalty".
        regression_weight: α, the weight of the pull.
        support_top_k: K, how many tokens of the old policy are kept per position (`top_k` is TRL's, for sampling). With
            `truncated_ratio`, all tokens of the sampler's kept set are kept.
        mass_threshold: δ: fewer than `support_top_k` tokens are kept where they already cover 1 − δ of the mass.
        disable_dropout: Whether all dropout is set to 0. TRL's setting, but true by default: with dropout, the network
            would differ between scoring and update, and the difference would be projected.
        constraint: The tokens that share one multiplier: with "token", each has its own; with "sequence", those of a
            sequence, so that the mean of their KL divergences meets the bound.
        constraint_reduction: "mean", or "sum" of the KL divergences of the tokens that share a multiplier.
        truncated_ratio: With truncated sampling (`top_p`, `top_k`, `min_p`), whether both policies are restricted to
            the tokens that the sampler kept and renormalised, for ratios and divergences. Default: true for surrogates
            that need whole distributions; the others use TRL's ratio, of the whole policies. See docs/trl.md.
        anchor: The centre of the trust region: "old", the training network when the batch was scored; or "rollout", the
            engine that generated it, whose top-K log-probabilities then replace the scoring pass. "rollout" also
            switches vLLM's importance correction off, which would count the mismatch twice.
        advantage_estimator: How advantages are computed from rewards: "group", TRL's (GRPO, and Dr.GRPO and GSPO by
            TRL's own settings); "reinforce_plus_plus", whitened over the global batch; "reinforce_plus_plus_baseline",
            the same after the group's mean is subtracted; "rloo", leave-one-out; or another from
            `troll.trl.register_estimator`. "reinforce_plus_plus" does not compare groups and also works with
            `num_generations=1`.
        kl_in_reward: Whether `beta` penalises the reward instead of the loss, as `RLOOTrainer` does: a completion's
            reward is r − β Σ_t (log p(o_t) − log p_ref(o_t)) with the old policy p, and the loss has no KL term. It
            needs `beta` above 0, and "rloo", "reinforce_plus_plus" or "reinforce_plus_plus_baseline".
        diagnostics_steps: Optimiser steps from one measurement of `trust_region/diagnostics/*` to the next; 0 measures
            none. See docs/diagnostics.md.

    Raises:
        ValueError: If a value is out of its range, or settings exclude each other; the message names both.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (a field, if it were annotated)
        *GRPOConfig._VALID_DICT_FIELDS,
        "surrogate_kwargs",
    ]

    #: The range of each number, a key of `RANGES`.
    numbers = NUMBERS
    #: Whether it has settings, and takes estimators, that only `troll_lab.trl.LabTrainer` reads.
    laboratory = False

    updates_per_rollout: int | None = None
    surrogate: str = field(default="troll", metadata={"choices": SURROGATES})
    surrogate_kwargs: dict[str, Any] | str | None = None
    kl_target: float | None = None
    kl_bound: float = 0.05
    pull: Pull = "projection"
    regression_weight: float = 1.0
    support_top_k: int = 64
    mass_threshold: float = 1e-5
    disable_dropout: bool = True
    constraint: Scope = "token"
    constraint_reduction: Reduction = "mean"
    truncated_ratio: bool | None = None
    anchor: Anchor = "old"
    advantage_estimator: str = field(default="group", metadata={"choices": ESTIMATORS})
    kl_in_reward: bool = False
    diagnostics_steps: int = 0

    def __post_init__(self) -> None:
        if self.epsilon is None:  # in a copy, which may have another surrogate
            self.epsilon = GRPOConfig.epsilon
        self._check_values()
        self._set_steps_per_generation()
        # A copy of a configuration has both, which TRL has set itself and would refuse.
        batch = self.generation_batch_size
        if self.steps_per_generation is not None:
            self.generation_batch_size = None
        # TRL refuses one completion of a prompt because its own estimator compares several.
        single = self.num_generations == 1 and not ESTIMATORS[self.advantage_estimator].needs_group
        if single:
            self.num_generations = _One(1)
        super().__post_init__()
        if single:
            self.num_generations = 1
        if "num_steps" in (getattr(self.accelerator_config, "gradient_accumulation_kwargs", None) or {}):
            raise ValueError(
                "accelerator_config's gradient_accumulation_kwargs.num_steps would change the number of updates on a "
                "rollout after it has been settled: set gradient_accumulation_steps instead"
            )
        self._settle_updates(batch)
        settings_read(self)  # finds wrong ones of the surrogate
        if not self.samples_as_trl:
            settle_config(self)
        settle_loss(self)
        if self.advantage_estimator != "group" and self.scale_rewards != GRPOConfig.scale_rewards:
            warnings.warn(
                f"scale_rewards ignored: advantage_estimator {self.advantage_estimator!r} does not use it", stacklevel=3
            )
        self._check_reward()
        self._check_generation()
        if self.kl_target is not None:
            check_target(self)
        if self.anchor == "rollout":
            self.vllm_importance_sampling_correction = False

    # Each setting by itself, before TRL computes with it

    def _check_values(self) -> None:
        check_surrogate(self.surrogate)
        check_estimator(self.advantage_estimator, laboratory=self.laboratory)
        choices: dict[str, Collection[object]] = {
            "pull": PULLS,
            "constraint": CONSTRAINTS,
            "constraint_reduction": REDUCTIONS,
            "anchor": get_args(Anchor),
            **CHOICES,
        }
        for name, known in choices.items():
            check_choice(name, getattr(self, name), known)
        fields = SURROGATES[self.surrogate].fields
        read = {name: takes for name, takes in NUMBERS_OF_SURROGATES.items() if name in fields}
        for name, takes in (self.numbers | read).items():
            if name not in self.__dataclass_fields__:  # versions of TRL differ
                continue
            may_be_none = name in MAY_BE_NONE or self.__dataclass_fields__[name].default is None
            if getattr(self, name) is not None or not may_be_none:
                check_number(name, getattr(self, name), takes)
        for weight in self.reward_weights or ():
            check_number("each of reward_weights", weight, "finite")

    # The updates of a rollout

    def _set_steps_per_generation(self) -> None:
        """Resolves `updates_per_rollout`, before TRL sets its default of one update."""
        updates = self.updates_per_rollout
        theirs = self.steps_per_generation is not None or self.generation_batch_size is not None
        if theirs or (updates is None and self.num_iterations != 1):
            return
        updates = updates or UPDATES_PER_ROLLOUT
        if updates < self.num_iterations:  # TRL would read the same completions several times in one update
            raise ValueError(
                f"updates_per_rollout must be at least num_iterations={self.num_iterations}, the passes over a "
                f"rollout, got {updates}"
            )
        passes = updates * self.gradient_accumulation_steps
        self.steps_per_generation, rest = divmod(passes, self.num_iterations)
        if rest:
            raise ValueError(
                f"updates_per_rollout={updates} with gradient_accumulation_steps={self.gradient_accumulation_steps} "
                f"takes {passes} passes over a rollout, which num_iterations={self.num_iterations} does not divide"
            )

    def _settle_updates(self, batch: int | None) -> None:
        """Checks that the sizes of a rollout agree, `generation_batch_size` as it was given among them."""
        if batch not in (None, self.generation_batch_size):
            raise ValueError(
                f"generation_batch_size={batch} disagrees with steps_per_generation={self.steps_per_generation}, which "
                f"makes {self.generation_batch_size} completions: leave one of them out"
            )
        updates, rest = divmod(self.rollout_steps, self.gradient_accumulation_steps)
        if self.updates_per_rollout not in (None, updates) or (self.updates_per_rollout and rest):
            raise ValueError(
                f"updates_per_rollout={self.updates_per_rollout} disagrees with steps_per_generation="
                f"{self.steps_per_generation}, num_iterations={self.num_iterations} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, which make {self.rollout_steps} passes a rollout and "
                f"{self.gradient_accumulation_steps} an update: leave one of them out"
            )
        self.updates_per_rollout = None if rest else updates

    # Settings that exclude each other

    def _check_reward(self) -> None:
        """Checks that the rewards can be combined as the estimator and `kl_in_reward` need them."""
        if self.advantage_estimator != "group" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"advantage_estimator {self.advantage_estimator!r} takes the weighted sum of the rewards: "
                f"multi_objective_aggregation must be 'sum_then_normalize', got {self.multi_objective_aggregation!r}"
            )
        if not self.kl_in_reward:
            return
        if ESTIMATORS[self.advantage_estimator].of_sequences is None:  # no reward of a completion to subtract it from
            known = [name for name, estimator in ESTIMATORS.items() if estimator.of_sequences is not None]
            raise ValueError(
                f"kl_in_reward needs advantage_estimator {', '.join(known[:-1])} or {known[-1]}, "
                f"got {self.advantage_estimator!r}"
            )
        if self.always_on_policy:
            raise ValueError(
                "kl_in_reward needs scores of the rollout, which are made only for off-policy updates: set "
                "updates_per_rollout to 2 or more"
            )
        if not self.beta > 0:
            raise ValueError(
                f"kl_in_reward weights the KL to the reference with beta, which must be above 0, got {self.beta}"
            )
        if self.truncation is not None:
            raise ValueError(
                "kl_in_reward compares whole policies, and the old log-probabilities are those on the tokens that "
                "top_p, top_k or min_p kept: set truncated_ratio=False, or leave kl_in_reward out"
            )

    def _check_generation(self) -> None:
        """Checks that the settings of generation go together."""
        always_on_policy = self.use_vllm and self.always_on_policy
        if self.truncation is not None and always_on_policy and self.vllm_importance_sampling_correction:
            raise ValueError(
                "with one update per rollout TRL scores whole policies, and compares them with vLLM's, which top_p, "
                "top_k or min_p truncates: set updates_per_rollout to 2 or more, anchor='rollout', or "
                "vllm_importance_sampling_correction=False"
            )
        if self.use_transformers_continuous_batching and (self.eval_strategy != "no" or self.eval_on_start):
            raise ValueError(
                "use_transformers_continuous_batching leaves the model in training mode, and an evaluation would read "
                "the rollout of the training: set eval_strategy='no' and eval_on_start=False, or use_vllm=True instead"
            )
        if self.neftune_noise_alpha and self.reads_policies:
            raise ValueError(
                "neftune_noise_alpha adds noise to every forward pass in training mode, by which the policy differs "
                "between scoring and update, and the trust region would project it: leave it out"
            )
        if self.use_vllm and "logprobs" in (self.generation_kwargs or {}):
            raise ValueError(
                "with logprobs in generation_kwargs TRL takes the log-probability of the most likely token for that of "
                "the sampled one: leave it out of generation_kwargs"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' divides by max_completion_length, which must not be None")
        if self.use_transformers_continuous_batching and (self.bf16 or self.fp16):
            dtype = "bf16" if self.bf16 else "fp16"
            raise ValueError(
                f"use_transformers_continuous_batching with {dtype}=True casts the trained weights themselves to "
                f"{dtype}, which loses small updates: set {dtype}=False or use_vllm=True instead"
            )

    def with_sampling(self, unset: dict[str, Any]) -> TrollConfig:
        """The configuration with these values for the settings of the sampler that are None; itself if none changes.

        Raises:
            ValueError: If they do not go with the other settings.
        """
        changes = {k: v for k, v in unset.items() if getattr(self, k) is None and v is not None}
        if not changes:
            return self
        changed = copy.copy(self)  # not by `replace`, with which transformers would set up devices and back ends anew
        vars(changed).update(changes)
        changed._check_reward()
        changed._check_generation()
        return changed

    @property
    def own_settings(self) -> Any:
        """The surrogate's own settings, an instance of `Surrogate.own`."""
        return parse(
            SURROGATES[self.surrogate].own, self.surrogate_kwargs, "surrogate_kwargs", f"surrogate {self.surrogate!r}"
        )

    @property
    def reads_policies(self) -> bool:
        """Whether updates need distributions in addition to the sampled tokens' log-probabilities."""
        needed = self.truncation is not None or self.kl_target is not None
        return SURROGATES[self.surrogate].needs_policies(self.own_settings) or needed

    @property
    def anchor_staleness(self) -> int:
        """The updates between the old policy and the first update on its rollout, where both are not the same."""
        return 0

    @property
    def samples_as_trl(self) -> bool:
        """Whether sampling is left as TRL has it: with its clip and its ratio, which are not about the sampler."""
        surrogate = SURROGATES[self.surrogate]
        clips_as_trl = surrogate.clips and surrogate.terms is None
        return clips_as_trl and self.anchor == "old" and not self.truncated_ratio

    @property
    def truncation(self) -> Truncation | None:
        """The sampler's truncation; None if there is none, or if ratios are of the whole policies.

        Settings that are None count as keeping all tokens. The trainer replaces them by what the sampler does.
        """
        wanted = self.truncated_ratio
        if wanted is None:
            wanted = SURROGATES[self.surrogate].needs_policies(self.own_settings)
        kept = Truncation(
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            min_p_first=self.use_vllm,
            # vLLM's kernels on a GPU keep exactly k tokens.
            ties="exact" if self.use_vllm and torch.cuda.is_available() else "all",
        )
        return kept if wanted and not kept.keeps_all else None

    @property
    def rollout_steps(self) -> int:
        """Forward-backward passes for which one rollout is used."""
        assert self.steps_per_generation is not None  # set by the parent
        return self.steps_per_generation * self.num_iterations

    @property
    def scores_rollouts(self) -> bool:
        """Whether TRL scores rollouts. It does not if each update takes whole rollouts."""
        return self.gradient_accumulation_steps % self.rollout_steps != 0

    @property
    def always_on_policy(self) -> bool:
        """Whether every update sees a fresh rollout, so that old and new policy are equal and TROLL is the identity."""
        return self.anchor == "old" and not self.scores_rollouts
