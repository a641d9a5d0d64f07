"""Advantages of single tokens: from a critic's values, or from rewards of tokens."""

from __future__ import annotations

from typing import Any

import torch

from troll.trl.estimators import combine_rewards
from troll.trl.seam import add_metrics, loss_mask, replace_logged_advantages, sequences, tokenizer_of
from troll_lab.trl.critic import Critic
from troll_lab.trl.estimators import TokenAdvantages, token_advantages
from troll_lab.trl.resampling import equal_groups
from troll_lab.trl.token_rewards import all_worths, places_of_token_rewards, token_worths

#: The keys under which TRL's buffer carries the critic's values and targets, and the mask of both, (B, T) each.
VALUES, RETURNS, VALUE_MASK = "troll_values", "troll_returns", "troll_value_mask"


def with_critic(trainer: Any, critic: Critic, rolled_out: dict[str, Any]) -> dict[str, Any]:
    """A rollout with the advantages and targets of a critic; TRL's table shows a completion's mean advantage.

    Args:
        trainer: The `LabTrainer` that makes the rollout.
        critic: Its critic.
        rolled_out: This process's part of the rollout.
    """
    settings, mask = trainer.args.critic_settings, loss_mask(rolled_out)
    ids, attention_mask = sequences(rolled_out)
    values = critic.values(ids, attention_mask, mask.shape[1], trainer.args.per_device_train_batch_size)
    rewards = combine_rewards(trainer.rollout_rewards, trainer.reward_weights)
    advantages, returns, counted = token_advantages(
        trainer.of_rows(rewards),
        values,
        mask,
        settings.gamma,
        settings.gae_lambda,
        whitened=settings.whiten_advantages,
        reduce=trainer.accelerator.reduce,
    )
    means = advantages.sum(-1) / counted.sum(-1).clamp(min=1)
    replace_logged_advantages(trainer, trainer.accelerator.gather(means))
    return rolled_out | {"advantages": advantages, VALUES: values, RETURNS: returns, VALUE_MASK: counted}


def with_token_rewards(trainer: Any, of_tokens: TokenAdvantages, rolled_out: dict[str, Any]) -> dict[str, Any]:
    """A rollout with the (B, T) advantages of its tokens' rewards; TRL's table shows a completion's mean advantage.

    Args:
        trainer: The `LabTrainer` that makes the rollout.
        of_tokens: The estimator.
        rolled_out: This process's part of the rollout.
    """
    mask, gather = loss_mask(rolled_out), trainer.accelerator.gather
    rewards = trainer.of_rows(trainer.rollout_rewards)
    places = places_of_token_rewards(trainer.reward_funcs, trainer.reward_weights)
    given = token_worths(trainer.reward_funcs, places, rewards, trainer.judged, tokenizer_of(trainer))
    width = int(gather(torch.tensor([mask.shape[1]], device=mask.device)).max())
    worths = gather(all_worths(rewards, trainer.reward_weights, given, width))
    size = trainer.args.num_generations
    if places:
        by_position = worths.view(-1, size, width).transpose(1, 2).flatten()
        equal = equal_groups(by_position, size).view(-1, width).all(1)
        add_metrics(trainer, {"token_rewards/equal_groups": float(equal.float().mean())})
    advantages = trainer.of_rows(of_tokens(worths, size))[:, : mask.shape[1]] * mask
    means = advantages.sum(-1) / mask.sum(-1).clamp(min=1)
    replace_logged_advantages(trainer, gather(means))
    return rolled_out | {"advantages": advantages}
