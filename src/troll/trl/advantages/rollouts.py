"""Replaces the advantages of a rollout, and trains PPO's critic."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from troll.trl.advantages.critic import Critic
from troll.trl.advantages.estimators import ESTIMATORS, combine_rewards, token_advantages
from troll.trl.advantages.token_rewards import Judged, ask, needed, speaking, worths_of
from troll.trl.checks import tokenizer_of
from troll.trl.resampling import equal_groups
from troll.trl.seam import add_metrics, loss_mask, replace_logged_advantages, sequences

#: The keys under which TRL's buffer carries the critic's values and targets, and the mask of both, (B, T) each.
VALUES, RETURNS, VALUE_MASK = "troll_values", "troll_returns", "troll_value_mask"


class Advantages:
    """Computes the advantages of `TrollConfig.advantage_estimator`; every method runs on every process.

    It changes one entry of a rollout, `advantages`. With "gae" and the estimators of tokens this entry is (B, T), which
    TRL's loss accepts. The critic of "gae" is trained together with the policy, in the same updates, by its own
    optimiser.

    Args:
        trainer: The `TrollTrainer`, with its model loaded.
        given: The `model` argument of the trainer: a name, or a model.

    Raises:
        ValueError: If a reward has a method `of_tokens`, and the estimator is for whole completions.
    """

    def __init__(self, trainer: Any, given: Any) -> None:
        self._trainer, self._args, self._accelerator = trainer, trainer.args, trainer.accelerator
        self._estimator = ESTIMATORS[trainer.args.advantage_estimator]
        self._per_function = self._rewards = torch.empty(0)
        self._judged = Judged((), (), ())
        #: The indices of the reward functions with a method `of_tokens`.
        self.speaking = speaking(trainer.reward_funcs, trainer.reward_weights)
        if self.speaking and self._estimator.of_tokens is None:
            known = " or ".join(name for name, estimator in ESTIMATORS.items() if estimator.of_tokens is not None)
            raise ValueError(
                f"reward {trainer.reward_func_names[self.speaking[0]]!r} has of_tokens, which advantage_estimator "
                f"{self._args.advantage_estimator!r} cannot use: set advantage_estimator to {known}, or its weight in "
                "reward_weights to 0"
            )
        #: PPO's critic; None for the other estimators.
        self.critic: Critic | None = None
        if self._estimator.needs_critic:
            with torch.random.fork_rng(devices=[]):  # so that other estimators with this seed have the same rollouts
                self.critic = _critic(trainer, given)

    def observe(self, rewards_per_function: Tensor, judged: Judged) -> None:
        """Keeps the (N, F) rewards of all processes' rollout, and this process's completions."""
        self._per_function, self._judged = rewards_per_function, judged
        self._rewards = combine_rewards(rewards_per_function, self._trainer.reward_weights)

    def put_into(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """Puts the estimator's advantages and the critic's targets into a rollout; TRL's table shows the advantages."""
        mask, conversations = loss_mask(rolled_out), self._trainer.conversations
        if self.critic is not None:
            ids, attention_mask = sequences(rolled_out)
            values = self.critic.values(ids, attention_mask, mask.shape[1], self._args.per_device_train_batch_size)
            settings = self._args.critic_settings
            advantages, returns, counted = token_advantages(
                conversations.of_rows(self._rewards),
                values,
                mask,
                settings.gamma,
                settings.gae_lambda,
                whitened=settings.whiten_advantages,
                reduce=self._accelerator.reduce,
            )
            means = advantages.sum(-1) / counted.sum(-1).clamp(min=1)
            replace_logged_advantages(self._trainer, self._accelerator.gather(means))
            return rolled_out | {"advantages": advantages, VALUES: values, RETURNS: returns, VALUE_MASK: counted}
        if self._estimator.of_tokens is not None:
            return rolled_out | {"advantages": self._of_tokens(mask)}
        if self._estimator.of_sequences is None:  # TRL's own
            return rolled_out
        token_counts = conversations.of_samples(mask.sum(-1))
        rewards = self._rewards
        if self._args.kl_in_reward:
            token_kl = (rolled_out["old_per_token_logps"] - rolled_out["ref_per_token_logps"]) * mask
            kl = conversations.of_samples(token_kl.sum(-1))
            rewards = rewards - self._args.beta * kl
            add_metrics(self._trainer, {"kl": float(kl.sum() / token_counts.sum().clamp(min=1))})
        advantages = self._estimator.of_sequences(rewards, self._args.num_generations, token_counts)
        replace_logged_advantages(self._trainer, advantages)
        return rolled_out | {"advantages": conversations.of_rows(advantages)}

    def _of_tokens(self, mask: Tensor) -> Tensor:
        """The (B, T) advantages of this process's tokens, from their rewards."""
        trainer, gather = self._trainer, self._accelerator.gather
        rewards = trainer.conversations.of_rows(self._per_function)
        said = ask(trainer.reward_funcs, self.speaking, rewards, self._judged, tokenizer_of(trainer))
        width = int(gather(torch.tensor([mask.shape[1]], device=mask.device)).max())
        worths = gather(worths_of(rewards, trainer.reward_weights, said, width))
        size = self._args.num_generations
        if self.speaking:
            by_position = worths.view(-1, size, width).transpose(1, 2).flatten()
            equal = equal_groups(by_position, size).view(-1, width).all(1)
            add_metrics(trainer, {"token_rewards/equal_groups": float(equal.float().mean())})
            total, count = self._accelerator.reduce(needed(rewards, said), reduction="sum").tolist()
            if count:
                add_metrics(trainer, {"token_rewards/needed_share": total / count})
                if trainer.resampling is not None:
                    trainer.resampling.adapt(total / count)
        assert self._estimator.of_tokens is not None
        everywhere = self._estimator.of_tokens(worths, size)
        advantages = trainer.conversations.of_rows(everywhere)[:, : mask.shape[1]] * mask
        means = advantages.sum(-1) / mask.sum(-1).clamp(min=1)
        replace_logged_advantages(trainer, gather(means))
        return advantages

    def train_critic(self, inputs: dict[str, Any]) -> None:
        """Runs the critic, if there is one, forward and backward on a micro-batch."""
        if self.critic is not None:
            self.critic.train_on(*sequences(inputs), inputs[RETURNS], inputs[VALUES], inputs[VALUE_MASK])


def _critic(trainer: Any, given: Any) -> Critic:
    args, policy = trainer.args, trainer.model
    other = args.critic_settings.model_name_or_path
    # The critic's weights are float32 for any policy, so that small steps do not get lost. The policy's revision and
    # quantisation belong to its own repository.
    left_out = {"dtype", "device_map"} | ({"revision", "quantization_config"} if other else set())
    return Critic(
        trainer.accelerator,
        other or (given if isinstance(given, str) else policy),
        args,
        peft_config=policy.peft_config[policy.active_adapter] if is_peft_model(policy) else None,
        model_init_kwargs={
            name: value for name, value in (args.model_init_kwargs or {}).items() if name not in left_out
        },
    )
