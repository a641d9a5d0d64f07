"""Movement primitives against their own differential equation, and what a trajectory must satisfy."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from troll_lab.episodic import ProDMP

MAKES = {
    "short": {"num_bases": 5, "num_steps": 100, "time_step": 0.02},
    "long": {"num_bases": 10, "num_steps": 250, "time_step": 0.02, "alpha": 10.0, "alpha_phase": 2.0},
    "one basis": {"num_bases": 1, "num_steps": 20, "time_step": 0.1},
    "coarse": {"num_bases": 3, "num_steps": 8, "time_step": 0.25},
    "stiff": {"num_bases": 4, "num_steps": 50, "time_step": 0.02, "alpha": 200.0},
}


def random_start(joints: int, primitive: ProDMP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (joints * (primitive.num_bases + 1), joints, joints)
    weights, position, velocity = torch.randn(sum(sizes), generator=generator, dtype=torch.float64).split(sizes)
    return weights, position, velocity


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_trajectory_solves_its_differential_equation(make: dict) -> None:
    primitive = ProDMP(**make)
    weights, start, velocity = random_start(1, primitive)
    scaled = (weights * primitive.weight_scale).numpy()
    goal = start.item() + scaled[-1]
    alpha, tau = primitive.alpha, primitive.tau

    def motion(t: float, state: np.ndarray) -> list[float]:
        y, speed = state
        push = primitive.forcing(torch.tensor(t, dtype=torch.float64)).numpy() @ scaled[:-1]
        return [speed, (alpha * (alpha / 4 * (goal - y) - tau * speed) + push) / tau**2]

    expected = solve_ivp(
        motion,
        (0, tau),
        [start.item(), velocity.item()],
        method="DOP853",
        t_eval=primitive.times.numpy().clip(max=tau),
        rtol=1e-12,
        atol=1e-12,
    )
    position, speed = primitive.trajectory(weights, start, velocity)
    np.testing.assert_allclose(position[:, 0].numpy(), expected.y[0], atol=1e-8)
    np.testing.assert_allclose(speed[:, 0].numpy(), expected.y[1], atol=1e-8 * max(1.0, abs(expected.y[1]).max()))


def test_zero_weights_stay_at_rest() -> None:
    primitive = ProDMP(num_bases=4, num_steps=30, time_step=0.05)
    start = torch.tensor([[0.3, -1.0], [2.0, 0.0]], dtype=torch.float64)
    position, speed = primitive.trajectory(torch.zeros(2, 10, dtype=torch.float64), start, torch.zeros_like(start))
    assert torch.equal(position, start.unsqueeze(1).expand(2, 31, 2))
    assert not speed.any()


def test_trajectory_is_linear_in_its_weights_joint_by_joint() -> None:
    primitive = ProDMP(num_bases=3, num_steps=40, time_step=0.05)
    weights, start, velocity = random_start(2, primitive)
    position, _ = primitive.trajectory(weights, start, velocity)
    initial, _ = primitive.initial(start, velocity)
    torch.testing.assert_close(position[:, 1], initial[:, 1] + primitive.position_basis @ weights[4:])
    doubled, _ = primitive.trajectory(2 * weights, start, velocity)
    torch.testing.assert_close(doubled - initial, 2 * (position - initial))


def test_each_weight_moves_a_joint_by_at_most_one() -> None:
    primitive = ProDMP(num_bases=6, num_steps=100, time_step=0.02)
    largest = primitive.position_basis.abs().amax(0)
    torch.testing.assert_close(largest[:-1], torch.ones(6, dtype=torch.float64))
    assert 0.99 < largest[-1] <= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_bases", 0), ("num_steps", 0), ("time_step", 0.0), ("alpha", -1.0), ("alpha_phase", float("nan"))],
)
def test_arguments_that_are_not_above_zero_are_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {"num_bases": 2, "num_steps": 10, "time_step": 0.1, name: value}
    with pytest.raises(ValueError, match=f"{name} must be above 0 and finite, got {value}"):
        ProDMP(**settings)


def test_trajectory_is_that_of_mp_pytorch() -> None:
    # mp-pytorch 0.1.4, with a basis_bandwidth_factor of 1 and a relative goal, gave these numbers every 0.2 s. It sums
    # over steps of 1.25 ms. Halving them moved positions by 1.8e-5 and velocities by 1.2e-4, a quarter of the halving
    # before, so a third of that is left.
    positions = [0.2, 1.920361, 1.820669, 1.731833, 1.746116, 1.769678]
    velocities = [-1.0, 2.59699, -1.12598, 0.00656, 0.13355, 0.02596]
    primitive = ProDMP(4, 50, 0.02, alpha=25.0, alpha_phase=3.0)
    weights = torch.tensor([300.0, -200.0, 100.0, 400.0, 1.5], dtype=torch.float64) / primitive.weight_scale
    start, start_velocity = (torch.tensor([x], dtype=torch.float64) for x in (0.2, -1.0))
    found, found_velocities = primitive.trajectory(weights, start, start_velocity)
    torch.testing.assert_close(found[::10, 0].tolist(), positions, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_velocities[::10, 0].tolist(), velocities, atol=1e-4, rtol=0)
