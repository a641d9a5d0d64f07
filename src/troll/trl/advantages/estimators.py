"""Advantage estimators: pure functions from rewards to advantages, each under its name in `ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: The smallest variance to divide by, so that a batch of equal rewards has advantages of zero, not scaled rounding
#: errors.
MIN_VARIANCE = 1e-8

#: Sums a small tensor over processes.
Reduce = Callable[[Tensor], Tensor]

#: `(rewards (N,), num_generations, token_counts (N,)) -> advantages (N,)`, all of the global batch, group by group. A
#: reward is NaN where a completion could not be scored, and its advantage then 0; a group is the `num_generations`
#: completions of a prompt; token counts are of the tokens in the loss.
SequenceAdvantages = Callable[[Tensor, int, Tensor], Tensor]

#: `(worths (N, T), num_generations) -> advantages (N, T)`, of the same completions. The worth of a token is its
#: weighted reward, and after a completion's end the completion's reward; it is NaN where a completion could not be
#: scored, and the advantages are then 0.
TokenAdvantages = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Estimator:
    """An entry of `ESTIMATORS`.

    Attributes:
        of_sequences: Computes the advantages of whole completions; None if TRL or a critic does.
        of_tokens: Computes the advantages of single tokens; None if rewards with a method `of_tokens` are refused.
        needs_critic: Whether token advantages are computed from a critic's values, by `token_advantages`.
        needs_group: Whether a prompt needs at least two completions.
    """

    of_sequences: SequenceAdvantages | None = None
    of_tokens: TokenAdvantages | None = None
    needs_critic: bool = False
    needs_group: bool = False


def combine_rewards(rewards_per_function: Tensor, weights: Tensor) -> Tensor:
    """The reward of each completion, (N,): r_i = Σ_f w_f r_if over the functions that scored it, NaN if none did.

    Args:
        rewards_per_function: (N, F), NaN where a function returned None.
        weights: (F,), the weights of the functions.
    """
    rewards = (rewards_per_function * weights.to(rewards_per_function)).nansum(dim=1)
    return rewards.masked_fill(rewards_per_function.isnan().all(dim=1), torch.nan)


def whiten(values: Tensor, mask: Tensor, reduce: Reduce = lambda tensor: tensor) -> Tensor:
    """Values with mean 0 and variance 1 under the mask: (x − mean) / √max(var, 1e-8), with var = mean of (x − mean)².

    Args:
        values: Any shape; may be NaN where the mask is 0, and is 0 there in the result.
        mask: Of the same shape: 0 and 1, or any weights that are not negative.
        reduce: Sums a tensor over processes, if each of them holds a part of the values. Each process calls it twice,
            even if its mask is empty.
    """
    weights = mask.to(values.dtype)
    values = values.masked_fill(weights == 0, 0.0)
    # Two passes, since E[x²] − E[x]² loses a variance that is small against the mean.
    total, weight = reduce(torch.stack([(weights * values).sum(), weights.sum()]))
    weight = torch.where(weight > 0, weight, 1.0)
    mean = total / weight
    variance = reduce((weights * (values - mean) ** 2).sum()) / weight
    return ((values - mean) * variance.clamp(min=MIN_VARIANCE).rsqrt()).masked_fill(weights == 0, 0.0)


def reinforce_plus_plus(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): A_i = (r_i − mean) / std over all tokens of the global batch, without groups.

    A completion's tokens share its reward, so the mean and the standard deviation over tokens are those over
    completions, weighted with their numbers of tokens. The paper's KL penalty in the reward is
    `TrollConfig.kl_in_reward`. Arguments and result are those of `SequenceAdvantages`; a completion without tokens also
    has advantage 0.
    """
    return whiten(rewards, torch.where(rewards.isnan(), 0, token_counts))


def reinforce_plus_plus_baseline(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): r − mean of the group, whitened as `reinforce_plus_plus`.

    Arguments and result are those of `SequenceAdvantages`, with at least 2 completions of a prompt.
    """
    grouped = rewards.view(-1, num_generations)
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
    return reinforce_plus_plus(centred, num_generations, token_counts)


def rloo(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): A_i = r_i − 1/(n − 1) Σ_{j ≠ i} r_j, over the n scored completions of a prompt.

    Arguments and result are those of `SequenceAdvantages`, with at least 2 completions of a prompt. A completion
    without another scored one in its group also has advantage 0.
    """
    return _less_the_others(rewards.view(-1, num_generations)).flatten()


def rloo_tokens(worths: Tensor, num_generations: int) -> Tensor:
    """RLOO at each position: A_it = w_it − 1/(n − 1) Σ_{j ≠ i} w_jt, in units of the reward.

    Arguments and result are those of `TokenAdvantages`. If all tokens of a completion have its reward, this is `rloo`.
    """
    return _less_the_others(worths.view(-1, num_generations, worths.shape[1])).view_as(worths)


def group_tokens(worths: Tensor, num_generations: int) -> Tensor:
    """DECS (arXiv 2509.25827): A_it = (w_it − mean_t) / (std_t + 1e-6) over a prompt's scored completions.

    Mean and standard deviation, with n − 1, are of the worths at position t. Where one completion of n differs from the
    others by β, its advantage is (n − 1)/√n for any β well above 1e-6. Arguments and result are those of
    `TokenAdvantages`.
    """
    grouped = worths.double().view(-1, num_generations, worths.shape[1])  # rounding errors would be divided by 1e-6
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    std = (centred.square().sum(dim=1, keepdim=True) / others.clamp(min=1)).sqrt()
    return (centred / (std + 1e-6)).view_as(worths).to(worths)


def _less_the_others(grouped: Tensor) -> Tensor:
    """Each entry of (G, n, ...) minus the mean of the others along n; 0 where it is NaN, or there are no others."""
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    mean_of_others = (grouped.nansum(dim=1, keepdim=True) - grouped) / others
    return (grouped - mean_of_others).masked_fill(grouped.isnan() | (others < 1), 0.0)


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


#: The estimators by name. "group" is TRL's own: GRPO, or with other settings of TRL Dr.GRPO and GSPO.
ESTIMATORS: dict[str, Estimator] = {
    "group": Estimator(needs_group=True),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, needs_group=True),
    "rloo": Estimator(rloo, needs_group=True),
    "rloo_tokens": Estimator(of_tokens=rloo_tokens, needs_group=True),
    "group_tokens": Estimator(of_tokens=group_tokens, needs_group=True),
    "gae": Estimator(needs_critic=True),
}
