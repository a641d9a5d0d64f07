"""Advantage estimators: pure functions from rewards to advantages, each under its name in `ESTIMATORS`.

To add one, write a function like `rloo`, and register it: `register_estimator("mine", Estimator(mine))`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from troll.settings import same_origin

#: The smallest variance to divide by, so that a batch of equal rewards has advantages of zero, not scaled rounding
#: errors.
MIN_VARIANCE = 1e-8

#: Sums a small tensor over processes.
Reduce = Callable[[Tensor], Tensor]

#: `(rewards (N,), num_generations, token_counts (N,)) -> advantages (N,)`, all of the global batch, group by group. A
#: reward is NaN where a completion could not be scored, and its advantage then 0; a group is the `num_generations`
#: completions of a prompt; token counts are of the tokens in the loss.
SequenceAdvantages = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Estimator:
    """An entry of `ESTIMATORS`.

    Attributes:
        of_sequences: Computes the advantages of whole completions; None if TRL does, or a trainer of its own.
        needs_group: Whether a prompt needs at least two completions.
        laboratory: Whether only `troll_lab.trl.LabTrainer` can compute it.
    """

    of_sequences: SequenceAdvantages | None = None
    needs_group: bool = False
    laboratory: bool = False


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
    return whiten(_below_largest(rewards), torch.where(rewards.isnan(), 0, token_counts))


def reinforce_plus_plus_baseline(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): r − mean of the group, whitened as `reinforce_plus_plus`.

    Arguments and result are those of `SequenceAdvantages`, with at least 2 completions of a prompt.
    """
    grouped = _below_largest(rewards).view(-1, num_generations)
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
    return reinforce_plus_plus(centred, num_generations, token_counts)


def _below_largest(rewards: Tensor) -> Tensor:
    """Rewards minus the largest: of equal ones exactly 0, where `whiten` would multiply a mean's rounding by 1e4."""
    return rewards - rewards.nan_to_num(nan=-torch.inf).max()


def rloo(rewards: Tensor, num_generations: int, token_counts: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): A_i = r_i − 1/(n − 1) Σ_{j ≠ i} r_j, over the n scored completions of a prompt.

    Arguments and result are those of `SequenceAdvantages`, with at least 2 completions of a prompt. A completion
    without another scored one in its group also has advantage 0.
    """
    return less_the_others(rewards.view(-1, num_generations)).flatten()


def less_the_others(grouped: Tensor) -> Tensor:
    """Each entry of (G, n, ...) minus the mean of the others along n; 0 where it is NaN or has no others."""
    others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    mean_of_others = (grouped.nansum(dim=1, keepdim=True) - grouped) / others
    return (grouped - mean_of_others).masked_fill(grouped.isnan() | (others < 1), 0.0)


#: The estimators by name. "group" is TRL's own: GRPO, or with other settings of TRL Dr.GRPO and GSPO.
ESTIMATORS: dict[str, Estimator] = {
    "group": Estimator(needs_group=True),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, needs_group=True),
    "rloo": Estimator(rloo, needs_group=True),
}


def register_estimator(name: str, estimator: Estimator) -> None:
    """Makes `advantage_estimator=name` select an estimator, in every configuration that is made from now on.

    Args:
        name: Its name. One that is taken is an error, unless its function is of the same module, such as one that is
            reloaded, or a notebook: the last registration counts.
        estimator: The estimator.

    Raises:
        ValueError: If another module's estimator has the name.
    """
    earlier = ESTIMATORS.get(name)
    if earlier is not None and earlier != estimator and not same_origin(earlier.of_sequences, estimator.of_sequences):
        raise ValueError(f"estimator {name!r} is registered already: choose another name")
    ESTIMATORS[name] = estimator


def check_estimator(name: str, *, laboratory: bool) -> None:
    """Raises ValueError unless an estimator has this name; with `laboratory`, also one that only `LabTrainer` takes."""
    known = [each for each, estimator in ESTIMATORS.items() if laboratory or not estimator.laboratory]
    if name not in known:
        more = "" if laboratory else "; LabConfig and LabTrainer of troll_lab.trl have more"
        raise ValueError(f"advantage_estimator must be one of {', '.join(known)}, got {name!r}{more}")
