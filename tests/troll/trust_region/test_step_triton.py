"""The kernels of a step beyond the matrix: rows that are no distribution, tiny bounds, shapes, and who computes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import troll
from tests.troll.trust_region.cases import bounds, pairs, tensor
from troll import PolicyOnSupport, SparsePolicy, TrustRegionStep
from troll.trust_region import step_triton
from troll.trust_region.kernels import KERNELS_VARIABLE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = ("log_ratio", "regression", "log_prob", "kl_before", "kl_after", "multiplier", "entropy")


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")


def policies(
    family: str, rows: int, size: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[PolicyOnSupport, SparsePolicy]:
    """A new policy with an entropy, whose leaves are its logits, on the slots of an old one."""
    old_logits, new_logits = (tensor(x, dtype).to(DEVICE) for x in pairs(family, rows, size))
    old = troll.capture(old_logits, old_logits.argmax(-1), top_k=size - 1, mass_threshold=0.0)
    return leaves(troll.log_probs_at(new_logits, old.token_ids), torch.ones(rows, dtype=dtype, device=DEVICE)), old


def leaves(new: PolicyOnSupport, entropy: Tensor | None) -> PolicyOnSupport:
    logits, tail = (x.detach().clone().requires_grad_() for x in (new.logits, new.tail_logit))
    return dataclasses.replace(new, logits=logits, tail_logit=tail, tail_entropy=entropy)


def gradients(step: TrustRegionStep, new: PolicyOnSupport, **arriving: Tensor) -> list[Tensor]:
    outputs = [(weight * getattr(step, name)).sum() for name, weight in arriving.items()]
    return list(torch.autograd.grad(sum(outputs), [new.logits, new.tail_logit]))


def test_step_without_gradient_and_entropy_is_the_same():
    new, old = policies("peaked", 2)
    expected = troll.trust_region_step(new, old)
    plain = leaves(new, None)
    with torch.no_grad():
        quiet = troll.trust_region_step(plain, old)
    made = troll.trust_region_step(plain, old)
    assert made.entropy is None and made.log_ratio.requires_grad and not quiet.log_ratio.requires_grad
    assert not (made.kl_before.requires_grad or made.multiplier.requires_grad)
    for one in (made, quiet):
        assert all(torch.equal(getattr(one, name), getattr(expected, name)) for name in FLOATS if name != "entropy")


@pytest.mark.filterwarnings("ignore:overflow")  # of a step that is not taken
@pytest.mark.parametrize("family", ["flat", "near_deterministic"])
def test_bounds_below_float32_end_the_search(family):
    """No promise is made below 1e-3, but every value and gradient is finite."""
    kl_bound = tensor(bounds(5, low=1e-14, high=1e-6), torch.float32).to(DEVICE)
    new, old = policies(family, 5)
    step = troll.trust_region_step(new, old, kl_bound)
    assert step.projected.sum() > 3
    ones = torch.ones(5, device=DEVICE)
    assert all(x.isfinite().all() for x in gradients(step, new, log_ratio=ones, regression=ones))
    assert all(getattr(step, name).isfinite().all() for name in FLOATS)
    assert (step.kl_after <= kl_bound * (1 + 1e-3))[step.projected].all()


@pytest.mark.parametrize(("family", "size", "seed", "row"), [("masked", 7, 2, 5), ("nearly_disjoint", 33, 3, 8)])
def test_search_meets_bound_where_newton_overshoots(family, size, seed, row):
    """The bracket's upper end is needed for these policies."""
    old_logits, new_logits = (tensor(x[[row]], torch.float32).to(DEVICE) for x in pairs(family, 10, size, seed=seed))
    kl_bound = tensor(bounds(10, seed=seed)[[row]], torch.float32).to(DEVICE)
    old = troll.capture(old_logits, old_logits.argmax(-1), top_k=size - 1, mass_threshold=0.0)
    step = troll.trust_region_step(new_logits, old, kl_bound)
    assert step.projected.any()
    torch.testing.assert_close(step.kl_after[step.projected], kl_bound[step.projected], rtol=1e-3, atol=0)


def test_bounds_broadcast_over_shapes_and_strides():
    new, old = policies("peaked", 6)
    kl_bound = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    expected = troll.trust_region_step(leaves(new, None), old, kl_bound.repeat(2))
    strided = new.logits.detach().view(2, 3, -1).movedim(-1, 0).contiguous().movedim(0, -1)
    tail = new.tail_logit.detach().view(2, 3).T.contiguous().T
    shaped = PolicyOnSupport(new.token_ids.view(2, 3, -1), strided, tail, new.vocab_size)
    made = troll.trust_region_step(shaped, old.view((2, 3)), kl_bound)
    for name in ("log_ratio", "regression", "kl_after", "projected"):
        assert torch.equal(getattr(made, name), getattr(expected, name).view(2, 3)), name
    assert torch.equal(troll.trust_region_step(shaped, old.view((2, 3)), 0.1).log_ratio[:, 1], made.log_ratio[:, 1])


@pytest.mark.parametrize(
    ("where", "value", "pull"),
    [
        ("logits", math.nan, "projection"),
        ("logits", math.inf, "projection"),
        ("tail_logit", math.nan, "projection"),
        ("log_probs", math.nan, "proximal"),
        ("bound", 0.0, "projection"),
    ],
)
def test_broken_row_is_nan_without_gradient(where, value, pull, monkeypatch):
    """Whatever arrives at it; and nothing of it gets into other rows."""
    new, old = policies("peaked", 3)
    # A bound on a GPU is not looked at before, one on a CPU is.
    monkeypatch.setattr(step_triton, "broadcast_bound", lambda bound, shape, like: bound)
    numbers: Any = {"bound": torch.full((3,), 0.05, device=DEVICE)} | vars(new) | {"log_probs": old.log_probs}
    clean = troll.trust_region_step(new, old, numbers["bound"], pull=pull)
    at = (1, int(old.slot[1]) - 1) if numbers[where].dim() == 2 else (1,)
    numbers[where].data[at] = value
    step = troll.trust_region_step(new, old, numbers["bound"], pull=pull)
    assert all(getattr(step, name)[1].isnan() for name in FLOATS) and not step.projected[1]
    fine = torch.tensor([0, 2], device=DEVICE)
    assert all(torch.equal(getattr(step, name)[fine], getattr(clean, name)[fine]) for name in FLOATS)
    nothing = torch.tensor([1.0, math.nan, 1.0], device=DEVICE)
    for gradient in gradients(step, new, log_ratio=nothing, regression=nothing, entropy=nothing):
        assert not gradient[1].any() and gradient[fine].isfinite().all()


def test_gradient_ignores_nan_at_pull_that_is_constant():
    """A masked token may bring NaN to the regression of a token that is not projected."""
    new, old = policies("nearly_equal", 2)
    step = troll.trust_region_step(new, old, math.inf)
    found = gradients(step, new, regression=torch.full((2,), math.nan, device=DEVICE))
    assert not step.projected.any() and not any(x.any() for x in found)


def test_tail_without_mass_ignores_its_entropy():
    new, old = policies("flat", 2)
    new.tail_logit.data[:] = -math.inf
    expected = troll.trust_region_step(dataclasses.replace(new, tail_entropy=torch.zeros(2, device=DEVICE)), old)
    nan = leaves(new, torch.full((2,), math.nan, device=DEVICE))
    step = troll.trust_region_step(nan, old)
    assert step.entropy is not None and expected.entropy is not None
    assert torch.equal(step.entropy, expected.entropy) and step.entropy.isfinite().all()
    of_logits, of_tail = gradients(step, nan, entropy=torch.ones(2, device=DEVICE))
    assert of_logits.isfinite().all() and not of_tail.any()
