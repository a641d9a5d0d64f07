"""Estimators of advantages that need a critic, or rewards of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from troll.trl.estimators import Estimator, Reduce, less_the_others, register_estimator, whiten

#: `(worths (N, T), num_generations) -> advantages (N, T)`, of the same completions. The worth of a token is its
#: weighted reward, and after a completion's end the completion's reward; it is NaN where a completion could not be
#: scored, and the advantages are then 0.
TokenAdvantages = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class LabEstimator(Estimator):
    """An estimator that `LabTrainer` computes.

    Attributes:
        laboratory: True, so that other trainers refuse it.
        of_tokens: Computes the advantages of single tokens; None if rewards with a method `of_tokens` are refused.
        needs_critic: Whether token advantages are computed from a critic's values, by `token_advantages`.
    """

    laboratory: bool = True
    of_tokens: TokenAdvantages | None = None
    needs_critic: bool = False


def rloo_tokens(worths: Tensor, num_generations: int) -> Tensor:
    """RLOO at each position: A_it = w_it − 1/(n − 1) Σ_{j ≠ i} w_jt, in units of the reward.

    Arguments and result are those of `TokenAdvantages`. If all tokens of a completion have its reward, this is `rloo`.
    """
    return less_the_others(worths.view(-1, num_generations, worths.shape[1])).view_as(worths)


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards of tokens, (B, T): that of a completion at its last token under the mask, 0 elsewhere.

    Args:
        rewards: (B,), one for each completion.
        mask: (B, T), 1 for the tokens of the policy; a row without any gets no reward.
    """
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask.bool()
    is_last = (positions == positions.amax(dim=1, keepdim=True)) & mask.bool()
    return torch.where(is_last, rewards.unsqueeze(1), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns, (B, T) each, 0 where the mask is 0.

        δ_t = r_t + γ V_{t+1} − V_t,   A_t = δ_t + γ λ A_{t+1},   R_t = A_t + V_t

    where t + 1 is the next token under the mask: padding and the tokens of tools are not steps of the policy. After the
    last token both V and A are 0, since the episode is over.

    Args:
        rewards: (B, T), r_t of each token.
        values: (B, T), V_t before each token.
        mask: (B, T), 1 for the tokens of the policy. Rewards and values may be NaN elsewhere.
        gamma: Discount γ, in [0, 1].
        lam: λ in [0, 1]: 0 is the one-step temporal difference, 1 the whole return minus the value.
    """
    acts = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(acts[:, t], advantage, next_advantage)
        next_value = torch.where(acts[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(acts[:, t], advantage, 0.0)
    return advantages, torch.where(acts, advantages + values, 0.0)


def token_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    whitened: bool = True,
    reduce: Reduce = lambda tensor: tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's advantages (arXiv 1707.06347): GAE from a reward at the last token, whitened over the global batch.

    Args:
        rewards: (B,) of this process's completions, NaN where one could not be scored.
        values: (B, T), the critic's values before each token.
        mask: (B, T), 1 for the tokens of the policy.
        gamma: Discount γ, in [0, 1].
        lam: GAE's λ, in [0, 1].
        whitened: Whether the advantages get mean 0 and variance 1 over the tokens of all processes.
        reduce: Sums a tensor over processes.

    Returns:
        Advantages A_t; the critic's targets R_t = A_t + V_t, with A_t before whitening; and the mask of the policy's
        tokens in completions that have a reward. Each is (B, T), and the first two are 0 outside of that mask.
    """
    mask = mask.bool() & ~rewards.isnan().unsqueeze(1)
    advantages, returns = gae(terminal_rewards(rewards, mask), values, mask, gamma, lam)
    if whitened:
        advantages = whiten(advantages, mask, reduce)
    return advantages, returns, mask


register_estimator("rloo_tokens", LabEstimator(of_tokens=rloo_tokens, needs_group=True))
register_estimator("gae", LabEstimator(needs_critic=True))
