"""A rollout's advantages in place of TRL's, and PPO's critic."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from troll.trl.advantages.critic import Critic
from troll.trl.advantages.estimators import ESTIMATORS, combine_rewards, token_advantages
from troll.trl.seam import add_metrics, loss_mask, replace_logged_advantages, sequences

#: The keys under which TRL's buffer carries the critic's values and targets, and the mask of both, (B, T) each.
VALUES, RETURNS, VALUE_MASK = "troll_values", "troll_returns", "troll_value_mask"


class Advantages:
    """Computes the advantages of `TrollConfig.advantage_estimator`; every method runs on every process.

    It changes one entry of a rollout, `advantages`; "gae" makes it (B, T), which TRL's loss accepts. The critic of
    "gae" is trained together with the policy, in the same updates, by an optimiser of its own.

    Args:
        trainer: The `TrollTrainer`, with its model loaded.
        given: The `model` argument of the trainer: a name, or a model.
    """

    def __init__(self, trainer: Any, given: Any) -> None:
        self._trainer, self._args, self._accelerator = trainer, trainer.args, trainer.accelerator
        self._estimator = ESTIMATORS[trainer.args.advantage_estimator]
        self._rewards = torch.empty(0)
        #: PPO's critic; None for the other estimators.
        self.critic: Critic | None = None
        if self._estimator.needs_critic:
            with torch.random.fork_rng(devices=[]):  # so that other estimators with this seed have the same rollouts
                self.critic = _critic(trainer, given)

    def observe(self, rewards_per_function: Tensor, weights: Tensor) -> None:
        """Keeps the (N, F) rewards of all processes' rollout, and the (F,) weights of the functions."""
        self._rewards = combine_rewards(rewards_per_function, weights)

    def put_into(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the estimator's advantages, and with the targets of its critic; TRL's table has them too."""
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
