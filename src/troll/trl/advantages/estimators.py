"""Advantage estimators: pure functions from rewards to advantages, under one name each in `ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Variances below this count as this: a batch of equal rewards has advantages of zero, not of rounding errors.
MIN_VARIANCE = 1e-8

#: Sums a small tensor over processes.
Reduce = Callable[[Tensor], Tensor]

#: ``(rewards (N,), num_generations, token_counts (N,)) -> advantages (N,)``, all of the global batch, group by group.
SequenceAdvantages = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Estimator:
    """How advantages are made.

    Args:
        of_sequences: The advantages of whole completions, or None where they come from elsewhere.
        needs_critic: Whether they are of tokens, from a critic's values: see `token_advantages`.
        needs_group: Whether a prompt needs two completions or more.
    """

    of_sequences: SequenceAdvantages | None = None
    needs_critic: bool = False
    needs_group: bool = False


def combine_rewards(rewards_per_function: Tensor, weights: Tensor) -> Tensor:
    """The reward of each completion: r_i = Σ_f w_f r_if over the functions that scored it.

    Args:
        rewards_per_function: (N, F), NaN where a function returned None.
        weights: (F,)

    Returns:
        (N,), NaN where no function scored the completion.
    """
    rewards = (rewards_per_function * weights.to(rewards_per_function)).nansum(dim=1)
    return rewards.masked_fill(rewards_per_function.isnan().all(dim=1), torch.nan)


def whiten(values: Tensor, mask: Tensor, reduce: Reduce | None = None, shift_mean: bool = True) -> Tensor:
    """Values with mean 0 and variance 1 under the mask: (x − mean) / √max(var, 1e-8), with var = mean of (x − mean)².

    Args:
        values: Any shape; what is not under the mask may be NaN.
        mask: Of the same shape: 0 and 1, or any weights that are not negative.
        reduce: Sums a tensor over processes, where each of them holds a part of the values. It is called twice in
            each of them, also where the mask is empty.
        shift_mean: False keeps the mean: only the deviations from it are scaled.

    Returns:
        Like `values`, with 0 where the mask is 0.
    """
    reduce = reduce or _keep
    weights = mask.to(values.dtype)
    values = values.masked_fill(weights == 0, 0.0)
    # Two passes, since E[x²] − E[x]² loses a variance that is small against the mean.
    total, weight = reduce(torch.stack([(weights * values).sum(), weights.sum()]))
    weight = torch.where(weight > 0, weight, 1.0)
    mean = total / weight
    variance = reduce((weights * (values - mean) ** 2).sum()) / weight
    whitened = (values - mean) * variance.clamp(min=MIN_VARIANCE).rsqrt()
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(weights == 0, 0.0)


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def reinforce_plus_plus(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): A_i = (r_i − mean) / std over all tokens of the global batch, without groups.

    A completion's tokens share its reward, so the mean and the standard deviation over tokens are those over
    completions, weighted with their numbers of tokens. The paper's KL penalty in the reward is
    `TrollConfig.kl_in_reward`.

    Args:
        rewards: (N,) of the global batch, NaN where a completion could not be scored.
        num_generations: Completions per prompt. Not used.
        token_counts: (N,), how many tokens of a completion take part in the loss.

    Returns:
        (N,), 0 for completions without a reward or without tokens.
    """
    return whiten(rewards, torch.where(rewards.isnan(), 0, token_counts))


def reinforce_plus_plus_baseline(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): A' = r − mean of the group, whitened as above.

    Args:
        rewards: (N,) of the global batch, group by group, NaN where a completion could not be scored.
        num_generations: Completions per prompt, at least 2.
        token_counts: (N,), how many tokens of a completion take part in the loss.

    Returns:
        (N,), 0 for completions without a reward or without tokens.

    Raises:
        ValueError: If `num_generations` is below 2 or does not divide the number of rewards.
    """
    grouped = _grouped(rewards, num_generations)
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
    return reinforce_plus_plus(centred, num_generations, token_counts)


def rloo(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): A_i = r_i − 1/(n − 1) Σ_{j ≠ i} r_j, over the n scored completions of a prompt.

    Args:
        rewards: (N,) of the global batch, group by group, NaN where a completion could not be scored.
        num_generations: Completions per prompt, at least 2.
        token_counts: (N,) Not used.

    Returns:
        (N,), 0 for completions without a reward, and for those that no other of the group can be compared with.

    Raises:
        ValueError: If `num_generations` is below 2 or does not divide the number of rewards.
    """
    grouped = _grouped(rewards, num_generations)
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    mean_of_others = (grouped.nansum(dim=1, keepdim=True) - grouped) / others
    return (grouped - mean_of_others).masked_fill(grouped.isnan() | (others < 1), 0.0).flatten()


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    if num_generations < 2:
        raise ValueError(f"num_generations must be at least 2 for a group baseline, got {num_generations}")
    if rewards.numel() % num_generations:
        raise ValueError(
            f"rewards must hold whole groups of num_generations={num_generations}, got {rewards.numel()} rewards"
        )
    return rewards.view(-1, num_generations)


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each completion's reward at its last token under the mask, 0 elsewhere.

    Args:
        rewards: (B,)
        mask: (B, T), 1 for the tokens of the policy; a row may be empty, and then has no reward.

    Returns:
        (B, T)
    """
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask.bool()
    is_last = (positions == positions.amax(dim=1, keepdim=True)) & mask.bool()
    return torch.where(is_last, rewards.unsqueeze(1), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438).

        δ_t = r_t + γ V_{t+1} − V_t,   A_t = δ_t + γ λ A_{t+1},   R_t = A_t + V_t

    where t + 1 is the next token under the mask: padding and the tokens of tools are no steps of the policy. After the
    last one both V and A are 0, since the episode is over.

    Args:
        rewards: (B, T)
        values: (B, T), V before each token.
        mask: (B, T), 1 for the tokens of the policy. What is elsewhere may be NaN.
        gamma: Discount γ, in [0, 1].
        lam: λ in [0, 1]: 0 is the one-step temporal difference, 1 the whole return less the value.

    Returns:
        Advantages and returns, (B, T) each, 0 where the mask is 0.

    Raises:
        ValueError: If γ or λ are outside [0, 1], or the shapes differ.
    """
    for name, number in {"gamma": gamma, "lam": lam}.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            "rewards, values and mask must have one shape (B, T), got "
            f"{tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    acts = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(acts[:, t], advantage, next_advantage)
        next_value = torch.where(acts[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(acts[:, t], advantage, 0.0)
    return advantages, torch.where(acts, advantages + values, 0.0)


@dataclass(frozen=True)
class TokenAdvantages:
    """What PPO trains on, (B, T) each.

    Args:
        advantages: Of the policy; 0 outside of `mask`.
        returns: The critic's targets R_t = A_t + V_t, with A_t as it was before whitening; 0 outside of `mask`.
        mask: Tokens of the policy in completions that have a reward.
    """

    advantages: Tensor
    returns: Tensor
    mask: Tensor


def token_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    whitened: bool = True,
    reduce: Reduce | None = None,
) -> TokenAdvantages:
    """PPO's advantages (arXiv 1707.06347): GAE from a reward at the last token, whitened over the global batch.

    Args:
        rewards: (B,) of this process's completions, NaN where one could not be scored.
        values: (B, T), the critic's values before each token.
        mask: (B, T), 1 for the tokens of the policy.
        gamma: Discount γ.
        lam: GAE's λ.
        whitened: Whether the advantages get mean 0 and variance 1 over the tokens of all processes.
        reduce: Sums a tensor over processes.

    Raises:
        ValueError: As `gae`.
    """
    mask = mask.bool() & ~rewards.isnan().unsqueeze(1)
    advantages, returns = gae(terminal_rewards(rewards, mask), values, mask, gamma, lam)
    if whitened:
        advantages = whiten(advantages, mask, reduce)
    return TokenAdvantages(advantages, returns, mask)


#: By name. "group" is TRL's own (GRPO; with other settings of TRL it is Dr.GRPO and GSPO), which is left as it is.
ESTIMATORS: dict[str, Estimator] = {
    "group": Estimator(needs_group=True),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, needs_group=True),
    "rloo": Estimator(rloo, needs_group=True),
    "gae": Estimator(needs_critic=True),
}
