"""The policy over movements, and the density of its segments against torch's dense distributions."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from troll.gaussian import Gaussian, factor_from
from troll_lab.episodic import MovementPolicy, ProDMP, sample, segment_log_prob

JOINTS, EPISODES = 3, 4
PRIMITIVE = ProDMP(num_bases=3, num_steps=40, time_step=0.05)
CUTS = torch.tensor([0, 5, 12, 33, 40])


def random_policy(shared: bool) -> tuple[Gaussian, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    d = JOINTS * 4
    batch = () if shared else (EPISODES,)
    mean, weights = torch.randn(2, EPISODES, d, generator=generator, dtype=torch.float64)
    factor = factor_from(0.3 * torch.randn(*batch, d, d, generator=generator, dtype=torch.float64))
    return Gaussian(mean, factor), weights


@pytest.mark.parametrize("shared", [True, False])
def test_segment_log_prob_is_that_of_a_dense_normal(shared: bool) -> None:
    """And so is its gradient in the policy."""
    policy, weights = random_policy(shared)
    leaves = policy.mean.requires_grad_(), policy.factor.requires_grad_()
    found = segment_log_prob(policy, PRIMITIVE, weights, CUTS, noise=1e-3)
    assert found.shape == (EPISODES, len(CUTS) - 1)
    covariance = (policy.factor @ policy.factor.mT).expand(EPISODES, -1, -1)
    for k in range(len(CUTS) - 1):
        # The basis as a matrix: a row for each end and joint, a column for each weight.
        rows = [torch.kron(torch.eye(JOINTS), PRIMITIVE.position_basis[end]) for end in CUTS[k : k + 2]]
        dense = torch.cat(rows).double()
        normal = MultivariateNormal(
            policy.mean @ dense.mT, dense @ covariance @ dense.mT + 1e-3 * torch.eye(2 * JOINTS, dtype=torch.float64)
        )
        expected = normal.log_prob(weights @ dense.mT)
        torch.testing.assert_close(found[:, k], expected, rtol=1e-9, atol=1e-9)
        ours, theirs = (torch.autograd.grad(of.sum(), leaves, retain_graph=True) for of in (found[:, k], expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("contextual", [False, True])
def test_policy_has_its_initial_scale_and_is_nearly_at_rest(contextual: bool) -> None:
    torch.manual_seed(0)
    network = MovementPolicy(5, 8, hidden=16, scale=0.3, contextual_covariance=contextual)
    policy = network(torch.randn(6, 5, dtype=torch.float64))
    assert policy.factor.shape == ((6, 8, 8) if contextual else (8, 8))
    near = 0.05 if contextual else 1e-12
    torch.testing.assert_close(
        policy.factor, (0.3 * torch.eye(8, dtype=torch.float64)).expand_as(policy.factor), rtol=0, atol=near
    )
    assert policy.mean.abs().max() < 0.05


def test_sample_has_the_mean_and_covariance_of_the_policy() -> None:
    policy, _ = random_policy(shared=True)
    one = Gaussian(policy.mean[:1].expand(200_000, -1), policy.factor)
    drawn = sample(one, torch.Generator().manual_seed(0))
    covariance = policy.factor @ policy.factor.mT
    bound = 6 * covariance.diagonal().max() / 200_000**0.5
    assert (drawn.mean(0) - policy.mean[0]).abs().max() < bound
    assert (drawn.T.cov() - covariance).abs().max() < 2 * bound


def test_write_back_sets_a_shared_covariance_only() -> None:
    shared, contextual = (MovementPolicy(2, 3, contextual_covariance=value) for value in (False, True))
    contexts = torch.zeros(2, 2, dtype=torch.float64)
    target = factor_from(torch.tensor([[0.1, 0, 0], [0.5, -0.2, 0], [0.3, 0.1, 0]], dtype=torch.float64))
    shared.write_back(Gaussian(shared(contexts).mean.detach(), target))
    torch.testing.assert_close(shared(contexts).factor, target)
    before = contextual(contexts).factor.detach()
    contextual.write_back(Gaussian(contextual(contexts).mean.detach(), target.expand(2, 3, 3)))
    assert torch.equal(contextual(contexts).factor, before)
