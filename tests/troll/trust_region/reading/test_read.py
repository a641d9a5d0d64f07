"""Log-probabilities on a support and of everything else, from either source, against the same by plain torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import array, tensor
from tests.troll.trust_region.reading.sources import KINDS, Problem, support_of
from troll.trust_region.kernels import KERNELS_VARIABLE
from troll.trust_region.reading.read import read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.usefixtures("small_tiles")


def combined(problem: Problem, on_support: Tensor, tail: Tensor, entropy: Tensor | None = None) -> Tensor:
    """A number that depends on all outputs, each with a weight of its own."""
    weights = torch.linspace(-1, 2, on_support.numel(), dtype=torch.float64).view(on_support.shape)
    rows = torch.linspace(2, -1, tail.numel(), dtype=torch.float64).view(tail.shape)
    used = on_support > -torch.inf
    total = (weights * on_support.masked_fill(~used, 0.0)).sum() + (rows * tail).sum()
    return total if entropy is None else total + (rows * rows * entropy).sum()


LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, 1.0, -30.0, -300.0, -math.inf]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(LOGIT, min_size=1, max_size=12),
    slots=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
    with_entropy=st.booleans(),
)
def test_read_of_any_row_is_the_reference(logits, slots, order, with_entropy):
    row = np.array(logits)
    assume(reference.is_finite_row(row))
    ids = order.sample(range(len(row)), min(slots, len(row)))
    z = tensor(row).requires_grad_()
    padded = torch.tensor(ids + [-1] * (slots - len(ids)))
    policy = read(troll.Logits(z), padded, entropy=with_entropy)
    log_probs, tail = reference.on_support(row, ids)
    np.testing.assert_allclose(array(policy.log_probs)[: len(ids)], log_probs, rtol=within(1e-13), atol=within(1e-13))
    assert (policy.log_probs[len(ids) :] == -math.inf).all()
    assert policy.tail_log_prob.item() == pytest.approx(tail, rel=1e-13, abs=1e-13)
    if with_entropy:
        assert policy.tail_entropy is not None
        rest = row[reference.complement(len(row), ids)]
        log_w = reference.log_softmax(rest[rest > -np.inf]) if (rest > -np.inf).any() else np.zeros(0)
        assert policy.tail_entropy.item() == pytest.approx(-float(np.sum(np.exp(log_w) * log_w)), abs=1e-12)
    (policy.log_probs.exp().sum() + policy.tail_log_prob.exp()).backward()
    # The probabilities add up to 1, whatever the logits are.
    assert z.grad is not None and z.grad.abs().max() <= within(1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_tiny_tail_keeps_digits(kind):
    """∂L/∂log p̃(tail)/p̃(tail) is 1e10 here: added to and taken off a logit of the support, it would leave nothing."""
    size, tail = 50, -23.0
    z = torch.zeros(1, size)
    z[0, 3] = math.log(size - 1) - tail
    leaves = [torch.ones(1, 1).requires_grad_(), z.t().clone().requires_grad_()]
    leaf = z.clone().requires_grad_()
    source = troll.LMHead(leaves[0], leaves[1]) if kind == "head" else troll.Logits(leaf)
    policy = troll.log_probs_at(source, torch.tensor([[3]]))
    (-policy.tail_log_prob).sum().backward()
    gradient = leaves[1].grad.t() if kind == "head" else leaf.grad  # type: ignore[union-attr]
    # ∂ log p̃(tail)/∂z is 1 − p̃(tail) in equal shares on the tail, and −p̃(3) = −1 on the support.
    expected = torch.full((1, size), -1.0 / (size - 1))
    expected[0, 3] = 1.0
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_of_near_deterministic_token_keeps_digits(kind):
    """1 − p is 1e-6, of which the likely token's log p keeps one digit in float32; the others' sum is exact."""
    weight = torch.full((1000, 1), -20.723266)  # 999 tokens of 1e-9
    weight[7] = 0.0
    hidden = torch.ones(1, 1)
    source = troll.LMHead(hidden, weight) if kind == "head" else troll.Logits(hidden @ weight.t())
    policy = read(source, torch.tensor([[7]]), entropy=True)
    assert policy.tail_entropy is not None
    assert policy.tail_entropy.item() == pytest.approx(math.log(999.0), rel=1e-5)
    old = troll.capture(source, torch.tensor([7]), top_k=1)
    entropy = troll.trust_region_step(source, old, entropy=True).entropy
    log_probs = torch.log_softmax(weight.double().t(), -1)
    assert entropy is not None
    assert entropy.item() == pytest.approx(-float((log_probs.exp() * log_probs).sum()), rel=1e-2)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_read_of_broken_rows_has_no_gradient(with_entropy, kernels, monkeypatch):
    if kernels == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv(KERNELS_VARIABLE, kernels)
    leaf = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    leaf[1, 3], leaf[2, 50], leaf[4] = torch.nan, torch.inf, -torch.inf
    policy = read(
        troll.Logits(leaf.requires_grad_()), torch.tensor([[3, 7, -1]] * 5, device=DEVICE), entropy=with_entropy
    )
    assert policy.outcomes[[1, 2, 4]].isnan().any(-1).all()
    total = policy.logits[:, :2].sum() + policy.tail_logit.sum()
    (gradient,) = torch.autograd.grad(total if policy.tail_entropy is None else total + policy.tail_entropy.sum(), leaf)
    assert not gradient[[1, 2, 4]].any() and gradient.isfinite().all() and gradient[[0, 3]].any()


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_read_makes_only_needed_gradients(needed):
    problem = Problem("head", bias=True)
    ids = support_of(problem)
    policy = read(problem.source(), ids)
    expected = problem.gradients(combined(problem, policy.log_probs, policy.tail_log_prob))
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(problem.leaves, needed, strict=True)]
    policy = read(troll.LMHead(leaves[0], leaves[1], leaves[2]), ids)
    combined(problem, policy.log_probs, policy.tail_log_prob).backward()
    for leaf, wanted, gradient in zip(leaves, needed, expected, strict=True):
        assert (leaf.grad is not None) == wanted
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("message", "token_ids"),
    [
        (r"token_ids must be \(2, 3, 4\)", torch.zeros(2, 2, 4, dtype=torch.int64)),
        (r"token_ids must be \(2, 3, 3\)", torch.zeros(2, 3, dtype=torch.int64)),
        (r"token_ids must be \(2, 3, K\)", torch.tensor(0)),
        ("token_ids must be integers", torch.zeros(2, 3, 1)),
        (r"token_ids must be in \[0, 7\), or -1 if unused", torch.full((2, 3, 1), 7)),
        (r"token_ids must be in \[0, 7\), or -1 if unused", torch.full((2, 3, 1), -2)),
        ("token_ids must differ in a row, got 3 twice", torch.full((2, 3, 2), 3)),
    ],
    ids=range(7),
)
def test_log_probs_at_refuses_ids_that_do_not_fit(message, token_ids):
    with pytest.raises(ValueError, match=message):
        troll.log_probs_at(torch.zeros(2, 3, 7), token_ids)
