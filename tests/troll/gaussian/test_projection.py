"""What all projections promise: the bound, the gradient, and nothing moved where the bound is not active."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gaussian import bound_errors, gradient_error
from tests.troll.gaussian.pairs import (
    FAMILIES,
    PROJECTIONS,
    covariance,
    diagonal_as_full,
    exact_distances,
    pair,
    policies,
    spread,
    triangle,
    with_gradient,
)
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian

KINDS = (Gaussian, DiagonalGaussian)
every_projection = pytest.mark.parametrize("name", PROJECTIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_projection
@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        *((torch.float64, family) for family in FAMILIES),
        *((torch.float32, family) for family in ("near", "far", "very far", "new nearly singular")),
    ],
)
def test_projection_meets_its_bounds(name: str, dtype: torch.dtype, family: str) -> None:
    promised = 1e-9 if dtype == torch.float64 else 1e-3
    for d in (1, 2, 5, 20, 60):
        for seed in range(2):
            for bounds in ((0.05, 0.0005), (1.0, 0.1)):
                errors = bound_errors(name, *pair(family, d, seed, dtype), *bounds)
                assert all(error < promised for error in errors)


@every_projection
@pytest.mark.parametrize("bound", [5e-4, 0.05])
@pytest.mark.parametrize(("condition", "mean"), [(1e3, 0.0), (1e5, 0.0), (1.0, 1e3), (1.0, 1e5)])
def test_float32_is_limited_by_how_it_stores_a_policy(
    name: str, bound: float, condition: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding moves `L₀⁻¹L_q` by the condition number of L₀, and `L₀⁻¹(μ_q − μ₀)` by the means in deviations."""
    monkeypatch.setitem(FAMILIES, "rounded", (1.0, condition**2, condition**2))
    for d in (2, 5, 20):
        for seed in range(3):
            new, old = pair("rounded", d, seed)
            new, old = (Gaussian((p.mean + mean).float(), p.factor.float()) for p in (new, old))
            errors = bound_errors(name, new, old, bound, bound)
            assert all(error < 3 * 2**-24 * max(condition, mean) / bound**0.5 for error in errors)


@every_projection
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_projection_meets_its_bounds_in_any_units(name: str, scale: float) -> None:
    new, old = pair("far", 6, 0)
    new, old = (Gaussian(scale * p.mean, scale * p.factor) for p in (new, old))
    if name == "frobenius":
        bounds = (0.05 * scale**2, 0.0005 * scale**4)
    else:
        bounds = (0.05 * scale**2, 0.0005 * scale**2) if name == "wasserstein" else (0.05, 0.0005)
    projection = PROJECTIONS[name](new, old, *bounds)
    after = exact_distances(name, projection.policy, old)
    if name == "joint":
        assert sum(after) == pytest.approx(bounds[0], rel=1e-9)
    else:
        assert after == pytest.approx(bounds, rel=1e-9)


@every_projection
@every_kind
@pytest.mark.parametrize("bounds", [(0.05, 0.02), (0.05, torch.inf), (torch.inf, 0.02)])
def test_gradient_agrees_with_finite_differences(name: str, kind: type, bounds: tuple[float, float]) -> None:
    new, old = policies(kind, (2,), d=3)

    def projected(mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        policy = PROJECTIONS[name](kind(mean, root * triangle(kind, 3)), old, *bounds).policy
        return policy.mean, spread(policy)

    new = with_gradient(new)
    assert torch.autograd.gradcheck(projected, (new.mean, spread(new)), rtol=1e-6, atol=1e-7)


@every_projection
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_along_direction_by_differences(name: str, family: str) -> None:
    """Also where covariances are far apart or nearly singular."""
    for seed in range(2):
        assert gradient_error(name, family, 12, seed) < 1e-6


@every_projection
@every_kind
def test_states_inside_do_not_move_while_others_do(name: str, kind: type) -> None:
    new, old = policies(kind, (6,), d=3)
    bounds = torch.tensor([1e-3, torch.inf] * 3, dtype=torch.float64)
    new = with_gradient(new)
    projection = PROJECTIONS[name](new, old, bounds, bounds)
    assert projection.covariance_projected.tolist() == projection.mean_projected.tolist() == [True, False] * 3
    total = projection.policy.mean.sum() + spread(projection.policy).sum()
    grads = torch.autograd.grad(total, (new.mean, spread(new)))
    for got, had, grad in zip(
        (projection.policy.mean, spread(projection.policy)), (new.mean, spread(new)), grads, strict=True
    ):
        assert torch.equal(got[1::2], had[1::2]) and not torch.isclose(got[::2], had[::2]).all()
        assert torch.equal(grad[1::2], torch.ones_like(grad[1::2]))
    assert (projection.mean_multiplier > 0).tolist() == [True, False] * 3


@every_projection
@every_kind
def test_equal_policies_are_not_moved_by_the_smallest_bound(name: str, kind: type) -> None:
    new, _ = policies(kind, (5,), d=4)
    projection = PROJECTIONS[name](new, new, 1e-14, 1e-14)
    assert torch.equal(projection.policy.mean, new.mean) and torch.equal(spread(projection.policy), spread(new))


@every_projection
@every_kind
def test_projection_takes_any_batch_dimensions(name: str, kind: type) -> None:
    new, old = policies(kind, (2, 3, 4), d=3)
    whole = PROJECTIONS[name](new, old, 0.05, 0.02)
    assert whole.mean_before.shape == whole.covariance_before.shape == (2, 3, 4)
    for index in ((0, 0, 0), (1, 2, 3)):
        one = PROJECTIONS[name](
            kind(new.mean[index], spread(new)[index]), kind(old.mean[index], spread(old)[index]), 0.05, 0.02
        )
        torch.testing.assert_close(whole.policy.mean[index], one.policy.mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(spread(whole.policy)[index], spread(one.policy), rtol=1e-10, atol=1e-12)
    new, old = (kind(p.mean[:0], spread(p)[:0]) for p in (new, old))
    empty = PROJECTIONS[name](new, old, 0.05, 0.02)
    assert empty.policy.mean.shape == (0, 3, 4, 3)


@pytest.mark.parametrize("name", ["kl", "frobenius", "wasserstein"])
@every_kind
def test_projection_keeps_shared_covariance(name: str, kind: type) -> None:
    new, old = policies(kind, (5,), d=3)
    shared, old_shared = (kind(p.mean, spread(p)[0]) for p in (new, old))
    shared = with_gradient(shared)
    projection = PROJECTIONS[name](shared, old_shared, 0.05, 0.02)
    assert spread(projection.policy).shape == spread(shared).shape
    assert projection.covariance_projected.shape == () and projection.mean_projected.shape == (5,)
    repeated = PROJECTIONS[name](
        kind(new.mean, spread(new)[:1].expand_as(spread(new))), kind(old.mean, spread(old)[0]), 0.05, 0.02
    )
    torch.testing.assert_close(repeated.policy.mean, projection.policy.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(spread(repeated.policy)[3], spread(projection.policy), rtol=1e-10, atol=1e-12)
    (grad,) = torch.autograd.grad(spread(projection.policy).square().sum(), spread(shared))
    assert grad.shape == spread(shared).shape and grad.any()


@every_kind
def test_joint_projection_gives_each_state_a_covariance(kind: type) -> None:
    new, old = policies(kind, (5,), d=3)
    new, old = (kind(p.mean, spread(p)[0]) for p in (new, old))
    projection = gaussian.project_joint_kl(new, old, 0.05)
    assert spread(projection.policy).shape[:1] == (5,)
    torch.testing.assert_close(gaussian.kl(projection.policy, old), torch.full((5,), 0.05, dtype=torch.float64))


@every_projection
def test_diagonal_projection_is_full_one_of_diagonals(name: str) -> None:
    new, old = policies(DiagonalGaussian, (6,), d=4)
    new = with_gradient(new)
    diagonal = PROJECTIONS[name](new, old, 0.05, 0.02)
    full = PROJECTIONS[name](diagonal_as_full(new), diagonal_as_full(old), 0.05, 0.02)
    for got, expected in zip(vars(diagonal).values(), vars(full).values(), strict=True):
        if isinstance(got, Tensor):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(diagonal_as_full(diagonal.policy).factor, full.policy.factor, rtol=1e-9, atol=1e-12)
    grads = []
    for policy in (diagonal.policy, full.policy):
        values = policy.mean.sin().sum() + covariance(policy).diagonal(dim1=-2, dim2=-1).sin().sum()
        grads.append(torch.autograd.grad(values, (new.mean, new.scale)))
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-11)


@every_projection
@every_kind
def test_second_forward_keeps_gradients_of_first(name: str, kind: type) -> None:
    pairs = [policies(kind, (4,), d=3, seed=seed) for seed in range(3)]

    def one(new: Any, old: Any) -> tuple[Any, Tensor]:
        new = with_gradient(new)
        policy = PROJECTIONS[name](new, old, 0.05, 0.02).policy
        return new, policy.mean.sin().sum() + spread(policy).sin().sum()

    expected = [torch.autograd.grad(total, (new.mean, spread(new))) for new, total in (one(*p) for p in pairs)]
    together = [one(*p) for p in pairs]
    for (new, total), grads in reversed(list(zip(together, expected, strict=True))):
        again = torch.autograd.grad(total, (new.mean, spread(new)), retain_graph=True)
        twice = torch.autograd.grad(total, (new.mean, spread(new)))
        assert all(torch.equal(a, b) for a, b in zip(again + twice, grads * 2, strict=True))


@every_projection
@every_kind
def test_gradient_reaches_the_new_policy_only(name: str, kind: type) -> None:
    new, old = (with_gradient(p) for p in policies(kind, (4,), d=3))
    policy = PROJECTIONS[name](new, old, 0.05, 0.02).policy
    (policy.mean.sum() + spread(policy).sum()).backward()
    assert new.mean.grad is not None and spread(new).grad is not None
    assert old.mean.grad is None and spread(old).grad is None


@every_projection
@pytest.mark.parametrize(("scale", "projected"), [(2.0, True), (1.0, False)])
def test_projection_of_equal_eigenvalues_scales_old(name: str, scale: float, projected: bool) -> None:
    """All eigenvalues of the ratio are equal: the projection scales the old covariance, and the gradient is finite."""
    _, old = policies(Gaussian, (2,), d=5)
    new = with_gradient(Gaussian(old.mean, scale * old.factor))
    projection = PROJECTIONS[name](new, old, 0.05, 0.02)
    assert projection.covariance_projected.all() == projected
    ratio = projection.policy.factor / torch.where(old.factor == 0, 1.0, old.factor)
    torch.testing.assert_close(ratio.tril(), ratio[:, :1, :1].expand_as(ratio).tril(), rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(projection.policy.factor.sum(), (new.mean, new.factor), materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)


@every_projection
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    d=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    mean_bound=st.floats(1e-4, 3.0),
    covariance_bound=st.floats(1e-5, 1.0),
    size=st.floats(1e-3, 100.0),
)
def test_projection_is_inside_and_idempotent(
    name: str, d: int, seed: int, mean_bound: float, covariance_bound: float, size: float
) -> None:
    new, old = policies(Gaussian, (), d, seed)
    new = Gaussian(old.mean + size * (new.mean - old.mean), new.factor * size**0.5)
    once = PROJECTIONS[name](new, old, mean_bound, covariance_bound)
    mean, spread_after = exact_distances(name, once.policy, old)
    if name == "joint":
        assert mean + spread_after <= mean_bound * (1 + 1e-9)
    else:
        assert mean <= mean_bound * (1 + 1e-9)
        assert spread_after <= covariance_bound * (1 + 1e-9) + 1e-13 * float(covariance(old).trace())
    assert (once.policy.factor.diagonal() > 0).all() and not once.policy.factor.triu(1).any()
    # It is as far as it may be from the new policy, and no farther: a second projection finds nothing to do.
    twice = PROJECTIONS[name](once.policy, old, mean_bound * (1 + 1e-8), covariance_bound * (1 + 1e-8))
    torch.testing.assert_close(twice.policy.factor, once.policy.factor, rtol=1e-6, atol=1e-7)
    # A projection onto a larger ball, and then onto this one, is this one: both lie on one curve.
    detour = PROJECTIONS[name](new, old, 2 * mean_bound, 2 * covariance_bound).policy
    there = PROJECTIONS[name](detour, old, mean_bound, covariance_bound).policy
    torch.testing.assert_close(covariance(there), covariance(once.policy), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(there.mean, once.policy.mean, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(d=st.integers(1, 5), seed=st.integers(0, 10_000), joint=st.booleans())
def test_kl_projections_do_not_depend_on_coordinates(d: int, seed: int, joint: bool) -> None:
    (new, old), (change, _) = policies(Gaussian, (), d, seed), policies(Gaussian, (), d, seed + 1)

    def mapped(policy: Gaussian) -> Gaussian:
        return Gaussian(change.factor @ policy.mean + change.mean, change.factor @ policy.factor)

    name = "joint" if joint else "kl"
    after = mapped(PROJECTIONS[name](new, old, 0.05, 0.02).policy)
    before = PROJECTIONS[name](mapped(new), mapped(old), 0.05, 0.02).policy
    torch.testing.assert_close(before.mean, after.mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(before.factor, after.factor, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["frobenius", "wasserstein"])
def test_other_projections_do_not_depend_on_rotations(name: str) -> None:
    new, old = policies(Gaussian, (), 4)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))

    def turned(policy: Gaussian) -> Gaussian:
        root = torch.linalg.cholesky(rotation @ covariance(policy) @ rotation.mT)
        return Gaussian(rotation @ policy.mean, root)

    after = turned(PROJECTIONS[name](new, old, 0.05, 0.02).policy)
    before = PROJECTIONS[name](turned(new), turned(old), 0.05, 0.02).policy
    torch.testing.assert_close(before.mean, after.mean)
    torch.testing.assert_close(before.factor, after.factor)


@every_projection
def test_projection_refuses_bad_bounds(name: str) -> None:
    new, old = policies(Gaussian, (3,), 2)
    mean_name = "kl_bound" if name == "joint" else "mean_bound"
    with pytest.raises(ValueError, match=rf"{mean_name} must be above 0, got 0"):
        PROJECTIONS[name](new, old, 0, 1.0)
    with pytest.raises(ValueError, match=rf"{mean_name} must broadcast to \(3\), got \(2\)"):
        PROJECTIONS[name](new, old, torch.ones(2), 1.0)
    if name != "joint":
        with pytest.raises(ValueError, match=r"covariance_bound must be above 0, got nan"):
            PROJECTIONS[name](new, old, 1.0, float("nan"))


@every_projection
def test_projection_refuses_policies_that_do_not_fit(name: str) -> None:
    new, old = policies(Gaussian, (3,), 2)
    diagonal, _ = policies(DiagonalGaussian, (3,), 2)
    with pytest.raises(ValueError, match="of one kind, got Gaussian and DiagonalGaussian"):
        PROJECTIONS[name](new, diagonal, 1.0, 1.0)
    with pytest.raises(ValueError, match="one dimension, got 2 and 3"):
        PROJECTIONS[name](new, policies(Gaussian, (3,), 3)[1], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"one dtype, got torch.float64 and torch.float32"):
        PROJECTIONS[name](new, Gaussian(old.mean.float(), old.factor.float()), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"states of new and old must broadcast, got means \(3, 2\) and \(4, 2\)"):
        PROJECTIONS[name](new, policies(Gaussian, (4,), 2)[1], 1.0, 1.0)


def test_projection_survives_saving(tmp_path: Any) -> None:
    projection = gaussian.project_kl(*policies(Gaussian, (3,), 2), 0.05, 0.02)
    torch.save(projection, tmp_path / "projection.pt")
    loaded = torch.load(tmp_path / "projection.pt")
    assert torch.equal(loaded.policy.factor, projection.policy.factor)
    assert loaded != projection  # compares without raising
