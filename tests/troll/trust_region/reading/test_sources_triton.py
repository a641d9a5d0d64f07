"""Whole captures and steps with `TROLL_KERNELS=triton` against torch's, from both sources."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import troll
from tests.troll.trust_region.reading.sources import KINDS
from troll.trust_region.kernels import VARIABLE
from troll.trust_region.reading import head as head_module
from troll.trust_region.reading.read import read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: No logit comes close to the cap, where an ulp of the hyperbolic tangent decides which of many is the larger.
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "all": {"temperature": 0.7, "scale": 0.5, "softcap": 30.0}}
VOCABULARY, HIDDEN = 700, 16

#: Logits up to 30, each off by a few roundings of 2⁻²⁴ of that and a tanh of 3e-7; three times as much.
TOLERANCE = 3 * 30 * (3e-7 + 4 * 2.0**-24)

pytestmark = pytest.mark.usefixtures("small_tiles")


class Problem:
    """Two policies over one vocabulary; of the logits, every row but a sequence's last."""

    def __init__(self, kind: str, dtype: torch.dtype, settings: str = "plain") -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind, self.settings = kind, SETTINGS[settings]
        self.hidden = torch.randn(2, 4, HIDDEN, generator=generator).to(DEVICE, dtype)
        self.hidden[0, 1] *= 4  # nearly deterministic
        old = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        new = old + 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.old, self.new = old.to(DEVICE, dtype), new.to(DEVICE, dtype)
        self.sampled = torch.randint(VOCABULARY, (2, 3), generator=generator).to(DEVICE)

    def source(self, weight: Tensor, hidden: Tensor | None = None) -> Any:
        hidden = self.hidden if hidden is None else hidden
        if self.kind == "logits":
            return troll.Logits((hidden @ weight.t())[:, :-1], **self.settings)
        return troll.LMHead(hidden[:, :-1], weight, **self.settings)

    def step(self, old: troll.SparsePolicy, **keywords: Any) -> tuple[troll.TrustRegionStep, tuple[Tensor, ...]]:
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.new)]
        made = troll.trust_region_step(self.source(leaves[1], leaves[0]), old, kl_bound=0.05, **keywords)
        loss = (made.log_ratio + made.regression - 0.3 * made.log_prob).sum()
        return made, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 3)]
)
def test_tiles_that_are_kept_are_not_computed_again(dtype, kept, monkeypatch):
    """Of three tiles; a second backward pass computes all of them, since the first one overwrites what is kept."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(head_module, "TOKEN_TILE", 6)
    # Room for the first and half of the next; the third, a remainder, would fit where the second does not.
    monkeypatch.setattr(head_module, "KEPT", 1.5 * kept * 6 * 320 * dtype.itemsize / (VOCABULARY * HIDDEN))
    products: list[slice] = []
    original = head_module._HeadReading._product

    def product(self: Any, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        products.append(columns)
        return original(self, hidden, weight, columns)

    monkeypatch.setattr(head_module._HeadReading, "_product", product)
    problem = Problem("head", dtype)
    old = troll.capture(problem.source(problem.old), problem.sampled, top_k=9)
    leaves = [x.clone().requires_grad_() for x in (problem.hidden, problem.new)]
    products.clear()
    made = troll.trust_region_step(problem.source(leaves[1], leaves[0]), old, kl_bound=0.05)
    loss = (made.log_ratio + made.regression).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert len(products) == 6 - kept
    second = torch.autograd.grad(loss, leaves)
    assert len(products) == 9 - kept
    assert all(map(torch.equal, first, second))


def test_no_tile_is_kept_without_a_backward_pass_or_with_many_tokens(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    asked: list[Any] = []
    monkeypatch.setattr(head_module._HeadReading, "keep", lambda self, needed: asked.append(needed))
    problem = Problem("head", torch.float32)
    source = problem.source(problem.new.clone().requires_grad_())
    with torch.no_grad():
        read(source, problem.sampled.unsqueeze(-1))
    assert not asked
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(head_module, "TOKEN_TILE", 5)  # of 6 tokens
    node: Any = read(source, problem.sampled.unsqueeze(-1)).tail_logit.grad_fn
    assert not node.next_functions[0][0].kept


@pytest.mark.parametrize(("trained", "setting"), [("hidden", None), ("weight", None), ("weight", "1"), ("weight", "0")])
def test_tiles_are_kept_for_a_trained_weight_unless_turned_off(trained, setting, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv(head_module.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(head_module.VARIABLE, setting)
    monkeypatch.setattr(head_module, "TOKEN_TILE", 6)
    problem = Problem("head", torch.float32)
    hidden, weight = (
        x.clone().requires_grad_(name == trained)
        for name, x in zip(("hidden", "weight"), (problem.hidden, problem.new), strict=True)
    )
    policy = read(problem.source(weight, hidden), problem.sampled.unsqueeze(-1))
    node: Any = policy.tail_logit.grad_fn
    assert bool(node.next_functions[0][0].kept) == (trained == "weight" and setting != "0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 9])
def test_capture(top_k, dtype, settings, kind, monkeypatch):
    problem = Problem(kind, dtype, settings)
    policies = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv(VARIABLE, kernels)
        policies.append(troll.capture(problem.source(problem.old), problem.sampled, top_k=top_k))
    expected, actual = policies
    assert torch.equal(actual.token_ids, expected.token_ids) and torch.equal(actual.slot, expected.slot)
    for name in ("log_probs", "tail_log_prob"):
        got, want = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step(dtype, settings, kind, monkeypatch):
    problem = Problem(kind, dtype, settings)
    monkeypatch.setenv(VARIABLE, "torch")
    old = troll.capture(problem.source(problem.old), problem.sampled, top_k=9)
    expected, expected_grads = problem.step(old)
    monkeypatch.setenv(VARIABLE, "triton")
    actual, grads = problem.step(old)
    assert actual.projected.any() and torch.equal(actual.projected, expected.projected)
    for name in ("log_ratio", "regression", "log_prob", "kl_before", "kl_after"):
        got, want = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE)  # of two log-probabilities
    for grad, want in zip(grads, expected_grads, strict=True):
        # Tiles of gradients are rounded to their dtype by the kernel, which the interpreter does by cutting off.
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 20 * TOLERANCE
        assert grad.dtype == dtype and (grad - want).float().norm() <= 3 * rounding * want.float().norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_policies_have_ratio_one(dtype, kind, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    problem = Problem(kind, dtype, "all")
    problem.new = problem.old
    old = troll.capture(problem.source(problem.old), problem.sampled, top_k=9)
    made, _ = problem.step(old)
    # What the design promises: a capture's tiles have other sizes than a step's, and are added up in another order.
    assert (made.log_ratio.abs() <= 4 * 2.0**-23 * old.log_prob.abs().clamp(min=1)).all() and not made.projected.any()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_donated_logits_hold_their_gradient(kernels, monkeypatch):
    """Which goes on to what they were made of."""
    problem = Problem("logits", torch.bfloat16)
    logits = (problem.hidden @ problem.new.t())[:, :-1].reshape(-1, VOCABULARY).contiguous()
    old = troll.capture(problem.source(problem.old), problem.sampled, top_k=9).view((6,))
    monkeypatch.setenv(VARIABLE, kernels)
    gradients: list[Tensor] = []
    for donate in (False, True):
        leaf = logits.clone().requires_grad_()
        given = leaf * 1
        troll.trust_region_step(troll.Logits(given, donate=donate), old).log_ratio.sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        assert torch.equal(given, logits) != donate
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution_do_not_change_others(kind, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    problem = Problem(kind, torch.float32)
    old = troll.capture(problem.source(problem.old), problem.sampled, top_k=9)
    problem.hidden[1, 2] = torch.nan
    broken = troll.capture(problem.source(problem.old), problem.sampled, top_k=9)
    assert broken.tail_log_prob.isnan().nonzero().tolist() == [[1, 2]] and broken.log_prob[1, 2].isnan()
    made, _ = problem.step(old)
    assert made.log_ratio.isnan().nonzero().tolist() == [[1, 2]]
    leaf = problem.hidden.clone().requires_grad_()
    step = troll.trust_region_step(problem.source(problem.new, leaf), old)
    (gradient,) = torch.autograd.grad(step.log_ratio.nansum(), leaf)
    if kind == "head":
        assert gradient.isfinite().all() and gradient.any(-1).sum() == 5
