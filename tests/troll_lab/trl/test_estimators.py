"""Estimators of tokens against closed forms on small batches made by hand."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.trl.test_estimators import NAN, close, float64
from troll.trl.estimators import ESTIMATORS
from troll_lab.trl import estimators

OF_TOKENS = {name: of_tokens for name, each in ESTIMATORS.items() if (of_tokens := getattr(each, "of_tokens", None))}


# Two groups of three completions, at two positions. The second has a completion without a reward.
WORTHS = [[1.0, 1], [1, 0], [0, 0.5], [2, 2], [NAN, NAN], [5, 2]]


def test_rloo_tokens_is_the_distance_from_the_others():
    close(estimators.rloo_tokens(float64(WORTHS), 3), [[0.5, 0.75], [0.5, -0.75], [-1, 0], [-3, 0], [0, 0], [3, 0]])


@pytest.mark.parametrize("estimator", OF_TOKENS)
def test_unscored_and_equal_tokens_have_no_advantage(estimator):
    of_tokens = OF_TOKENS[estimator]
    assert of_tokens(torch.full((6, 2), NAN), 3).tolist() == [[0.0, 0.0]] * 6
    assert of_tokens(torch.full((6, 2), 0.1), 3).abs().max() < within(1e-6)
    lonely = torch.tensor([[3.0], [NAN]])
    assert of_tokens(lonely, 2).tolist() == [[0.0], [0.0]]


def test_the_reward_is_at_the_last_token_of_the_policy():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = [[0, 0, 5.0, 0], [0, 0, 6, 0], [0, 0, 0, 7], [0, 0, 0, 0]]
    close(estimators.terminal_rewards(torch.tensor([5.0, 6, 7, 8]), mask), expected)


def naive_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k} of one sequence without a mask."""
    r, v = rewards.tolist(), [*values.tolist(), 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]


@pytest.mark.parametrize(("gamma", "lam"), list(product([0, 0.5, 0.95, 1], repeat=2)))
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma, lam):
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 8, generator=generator) < 0.7
    mask[0], mask[1] = True, False
    advantages, returns = estimators.gae(
        rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, NAN), mask, gamma, lam
    )
    for i, row in enumerate(mask):  # a masked token is no step: the naive loop does not even see it
        close(advantages[i][row], naive_gae(rewards[i][row], values[i][row], gamma, lam))
    close(returns[mask], (advantages + values)[mask])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_token_advantages_leave_out_what_has_no_reward():
    rewards, values = float64([1, NAN]), float64([[0.5, 0.25, 9], [3, 3, 3]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, returns, counted = estimators.token_advantages(rewards, values, mask, whitened=False)
    close(advantages, [[0.5, 0.75, 0], [0, 0, 0]])
    close(returns, [[1, 1, 0], [0, 0, 0]])
    assert counted.tolist() == [[True, True, False], [False, False, False]]
    close(estimators.token_advantages(rewards, values, mask)[0], [[-1, 1, 0], [0, 0, 0]])
