"""The configuration of the laboratory's trainer."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from troll.settings import described, number, parse
from troll.trl import TrollConfig
from troll.trl.estimators import ESTIMATORS
from troll_lab.trl.estimators import LabEstimator

#: The range of each number, a key of `troll.settings.RANGES`.
NUMBERS: dict[str, str] = {
    "eval_temperature": "finite and at least 0",
    "generation_chunk_size": "an integer, at least 1",
    "resampling_rounds": "an integer, at least 0",
    "rollout_delay": "an integer, at least 0",
}


@dataclass(frozen=True)
class CriticSettings:
    """The settings of the estimator "gae", in `critic_kwargs`: its discounts, and PPO's critic.

    Attributes:
        gamma: Discount γ, in [0, 1].
        gae_lambda: λ, in [0, 1]: 0 uses the critic's value of the next token, 1 the whole return.
        whiten_advantages: Whether the advantages are whitened over the tokens of all processes.
        value_clip: How far a value may move from the rollout's, in units of reward, before its loss is clipped.
        model_name_or_path: The model from which the critic starts. None is the policy's model.
        learning_rate: The constant learning rate of the critic's AdamW.
        weight_decay: The weight decay of the critic's AdamW, for matrices only.
        max_grad_norm: The norm to which the critic's gradient is clipped, separately from the policy's.
        warmup_steps: Optimiser steps at the start in which only the critic is trained.
    """

    gamma: float = number(1.0, "in [0, 1]")
    gae_lambda: float = number(0.95, "in [0, 1]")
    whiten_advantages: bool = True
    value_clip: float = number(0.2, "finite and above 0")
    model_name_or_path: str | None = None
    learning_rate: float = number(1e-5, "finite and above 0")
    weight_decay: float = number(0.0, "finite and at least 0")
    max_grad_norm: float = number(1.0, "finite and above 0")
    warmup_steps: int = number(0, "an integer, at least 0")


@described
@dataclass
class LabConfig(TrollConfig):
    r"""`TrollConfig` with what changes a rollout or adds a network; `troll train` uses it.

    Args:
        advantage_estimator: How advantages are computed from rewards: "group", TRL's (GRPO, and Dr.GRPO and GSPO by
            TRL's own settings); "reinforce_plus_plus", whitened over the global batch; "reinforce_plus_plus_baseline",
            the same after the group's mean is subtracted; "rloo", leave-one-out; "rloo_tokens", the same for rewards
            of tokens; or "gae", PPO's, with a critic. "reinforce_plus_plus" and "gae" do not compare groups and also
            work with `num_generations=1`.
        critic_kwargs: γ, λ and the critic of "gae" as a JSON object, e.g. `{"learning_rate": 1e-4, "gamma": 0.99}`.
            See docs/estimators.md.
        generation_chunk_size: The number of completions that transformers generates in one call, which bounds the
            memory of its KV cache. None generates a whole rollout at once. It has no effect on vLLM.
        resampling_rounds: Groups whose rewards are all equal are replaced by groups of other prompts, in at most this
            many further rounds of generation, each as large as the rollout: the dynamic sampling of DAPO (arXiv
            2503.14476). Groups that cannot be replaced stay. 0 replaces none.
        rollout_delay: The age, in rollouts, of the weights that sample a rollout, as in asynchronous training. For
            experiments: it needs generation by transformers, and keeps `rollout_delay` + 1 copies of the trained
            weights. `anchor` "rollout" then needs no engine.
        eval_temperature: Sampling temperature of held-out completions. 0 is greedy and needs
            `num_generations_eval=1`. Default: as in training.

    Raises:
        ValueError: If a value is out of its range, or settings exclude each other; the message names both.
    """

    _VALID_DICT_FIELDS = [*TrollConfig._VALID_DICT_FIELDS, "critic_kwargs"]  # noqa: RUF012 (a field, if annotated)

    numbers = TrollConfig.numbers | NUMBERS
    laboratory = True

    # Again, with its own text.
    advantage_estimator: str = field(default="group", metadata={"choices": ESTIMATORS})
    critic_kwargs: dict[str, Any] | str | None = None
    generation_chunk_size: int | None = None
    resampling_rounds: int = 0
    rollout_delay: int = 0
    eval_temperature: float | None = None

    def _check_evaluation(self) -> None:
        if self.metric_for_best_model in ("loss", "eval_loss"):
            raise ValueError(
                "evaluations of LabTrainer have no loss, which says nothing about answers: set metric_for_best_model "
                "to another metric, such as 'pass@1' or 'reward'"
            )
        samples = self.num_generations_eval or self.num_generations or 1
        sampled = {"pass@1", f"pass@{samples}", f"mean@{samples}"} | ({f"maj@{samples}"} if samples > 1 else set())
        metric = (self.metric_for_best_model or "").removeprefix("eval_")
        if re.fullmatch(r"(pass|mean|maj)@\d+", metric) and metric not in sampled:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model!r} is not measured with num_generations_eval="
                f"{samples}: set it to one of {', '.join(sorted(sampled))}"
            )
        if self.eval_temperature is not None and self.use_vllm and "temperature" in (self.generation_kwargs or {}):
            raise ValueError(
                "the temperature of generation_kwargs would replace eval_temperature in vLLM: set temperature instead"
            )
        if self.eval_temperature == 0 and self.num_generations_eval != 1:
            raise ValueError(
                "eval_temperature=0 writes the same completion every time: set num_generations_eval=1, "
                "or a temperature above 0"
            )

    def _check_reward(self) -> None:
        super()._check_reward()
        if self.resampling_rounds:
            self._check_resampling()

    def _check_resampling(self) -> None:
        """Refuses resampling for estimators that learn from equal rewards, and with an engine's reports."""
        if not ESTIMATORS[self.advantage_estimator].needs_group:
            known = [name for name, estimator in ESTIMATORS.items() if estimator.needs_group]
            raise ValueError(
                f"resampling_rounds replaces groups with equal rewards, from which advantage_estimator "
                f"{self.advantage_estimator!r} learns: set it to 0, or use one of {', '.join(known)}"
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "resampling_rounds compares the weighted sums of the rewards: multi_objective_aggregation must be "
                f"'sum_then_normalize', got {self.multi_objective_aggregation!r}"
            )
        # With a delay, the training model samples and scores, and an engine reports nothing.
        if self.anchor == "rollout" and not self.rollout_delay:
            raise ValueError(
                "resampling_rounds moves completions between processes, and anchor='rollout' keeps what the engine "
                "reported on the process that asked: set resampling_rounds to 0, or anchor='old'"
            )

    def _check_generation(self) -> None:
        super()._check_generation()
        self._check_evaluation()
        _ = self.critic_settings  # finds wrong ones before training
        if self.critic_kwargs and not (self.own_estimator and self.own_estimator.needs_critic):
            warnings.warn(
                f"critic_kwargs ignored: advantage_estimator {self.advantage_estimator!r} has no critic", stacklevel=4
            )
        if self.save_on_each_node and self.own_estimator and self.own_estimator.needs_critic:
            raise ValueError(
                "save_on_each_node does not act on the critic, which the first process writes: set it to False, and "
                "save to a disk that all nodes share"
            )
        if self.generation_chunk_size and self.use_transformers_continuous_batching:
            raise ValueError(
                "generation_chunk_size does not act on use_transformers_continuous_batching, which makes its own "
                "batches: leave one of them out"
            )
        if self.rollout_delay and self.use_vllm:
            raise ValueError(
                "rollout_delay changes the weights of transformers' generation, and vLLM has its own weights: set "
                "use_vllm=False, or leave it out"
            )
        if self.rollout_delay and self.anchor == "rollout" and not self.scores_rollouts:
            raise ValueError(
                "anchor='rollout' with rollout_delay needs scores of the rollout, which TRL makes only if it has "
                "several updates: set updates_per_rollout to 2 or more"
            )

    @property
    def own_estimator(self) -> LabEstimator | None:
        """The estimator, if only `LabTrainer` can compute it."""
        estimator = ESTIMATORS[self.advantage_estimator]
        return estimator if isinstance(estimator, LabEstimator) else None

    @property
    def anchor_staleness(self) -> int:
        """Overrides the parent: with `anchor` "rollout", the old policy is as old as the rollout."""
        updates = self.updates_per_rollout or 0
        return self.rollout_delay * updates if self.anchor == "rollout" else 0

    @property
    def critic_settings(self) -> CriticSettings:
        """γ, λ and the critic of "gae"."""
        return parse(CriticSettings, self.critic_kwargs, "critic_kwargs", "the critic")
