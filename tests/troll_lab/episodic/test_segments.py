"""Cuts and advantages against their closed forms."""

import pytest
import torch

from troll_lab.episodic import generalised_advantages, normalised, random_cuts, segment_advantages

EPISODES, STEPS = 3, 20


def random_episode(terminal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(EPISODES, STEPS, generator=generator, dtype=torch.float64)
    values = torch.randn(EPISODES, STEPS + 1, generator=generator, dtype=torch.float64)
    values[:, -1] = 0 if terminal else 1
    return rewards, values


@pytest.mark.parametrize(("steps", "points"), [(100, 25), (20, 20), (20, 2), (23, 7), (500, 25)])
def test_random_cuts_are_equally_spaced_between_start_and_end(steps: int, points: int) -> None:
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        cuts = random_cuts(steps, points, generator)
        lengths = cuts.diff()
        assert cuts[0] == 0 and cuts[-1] == steps
        assert (lengths > 0).all()
        assert points - 1 <= len(lengths) <= points + 1
        assert lengths[1:-1].unique().numel() <= 1
        seen.add(int(cuts[1]))
    length = steps // (points - 1)
    assert len(seen) >= min(length, 20)  # every phase comes up


@pytest.mark.parametrize("points", [1, 21])
def test_random_cuts_refuse_points_out_of_range(points: int) -> None:
    with pytest.raises(ValueError, match=f"points must be from 2 to the number of steps 20, got {points}"):
        random_cuts(20, points)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.01])
def test_segment_advantages_are_rewards_and_the_change_of_value(discount: float) -> None:
    rewards, values = random_episode()
    cuts = torch.tensor([0, 3, 4, 15, 20])
    found = segment_advantages(rewards, values, cuts, discount)
    for k, (start, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
        gained = sum(discount ** (t - start) * rewards[:, t] for t in range(start, end))
        expected = gained + discount ** (end - start) * values[:, end] - values[:, start]
        torch.testing.assert_close(found[:, k], expected)


@pytest.mark.parametrize("terminal", [True, False])
def test_generalised_advantages_at_full_decay_are_returns(terminal: bool) -> None:
    rewards, values = random_episode(terminal)
    found = generalised_advantages(rewards, values, 0.9, 1.0)
    for t in range(STEPS):
        ahead = sum(0.9 ** (i - t) * rewards[:, i] for i in range(t, STEPS)) + 0.9 ** (STEPS - t) * values[:, -1]
        torch.testing.assert_close(found[:, t], ahead - values[:, t])


def test_generalised_advantages_average_the_errors_ahead() -> None:
    rewards, values = random_episode()
    errors = rewards + 0.9 * values[:, 1:] - values[:, :-1]
    found = generalised_advantages(rewards, values, 0.9, 0.8)
    expected = sum(0.72**i * errors[:, 5 + i] for i in range(STEPS - 5))
    torch.testing.assert_close(found[:, 5], expected)


def test_normalised_has_mean_zero_and_standard_deviation_one() -> None:
    advantages = normalised(0.1 * random_episode()[0])
    assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantages.std(correction=0).item() == pytest.approx(1)
    assert not normalised(torch.full((4,), 3.0)).any()
