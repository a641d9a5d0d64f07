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
from tests.troll.trust_region.reading.sources import KINDS, TRANSFORMS, Problem, long_way, support_of
from troll.trust_region.reading.read import read

pytestmark = pytest.mark.usefixtures("small_tiles")


def combined(problem: Problem, on_support: Tensor, tail: Tensor, entropy: Tensor | None = None) -> Tensor:
    """A number that depends on all outputs, each with a weight of its own."""
    weights = torch.linspace(-1, 2, on_support.numel(), dtype=torch.float64).view(on_support.shape)
    rows = torch.linspace(2, -1, tail.numel(), dtype=torch.float64).view(tail.shape)
    used = on_support > -torch.inf
    total = (weights * on_support.masked_fill(~used, 0.0)).sum() + (rows * tail).sum()
    return total if entropy is None else total + (rows * rows * entropy).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
def test_values_and_gradients_are_those_of_plain_torch(kind, transform, with_bias, with_rows, with_entropy):
    """The entropy's sums take another path through a tile, forward and backward."""
    problem = Problem(kind, transform=transform, bias=with_bias, rows=with_rows)
    ids = support_of(problem)
    policy = read(problem.source(), ids, entropy=with_entropy)
    *expected, entropy = long_way(problem.logits(), ids)
    found = [policy.log_probs, policy.tail_log_prob]
    assert (policy.tail_entropy is not None) == with_entropy
    if policy.tail_entropy is not None:
        expected, found = [*expected, entropy], [*found, policy.tail_entropy]
    # Sums of a thousand terms in float64, in another order.
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)
    gradients = (problem.gradients(combined(problem, *outputs)) for outputs in (found, expected))
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
        assert wanted.abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0], ids=["flat", "", "near-deterministic"])
def test_float32_at_any_spread(kind, spread):
    """Values, entropy and gradients (relative to the largest) to a few roundings of the largest numbers on the way."""
    problem = Problem(kind, dtype=torch.float32, spread=spread)
    ids = support_of(problem)
    policy = read(problem.source(), ids, entropy=True)
    assert policy.tail_entropy is not None
    assert policy.logits.dtype == policy.tail_logit.dtype == policy.tail_entropy.dtype == torch.float32
    exact = Problem(kind, dtype=torch.float64, spread=spread)
    for leaf, rounded in zip(exact.leaves, problem.leaves, strict=True):
        leaf.data = rounded.detach().double()
    expected = long_way(exact.logits(), ids)
    # Eight roundings of a logit, at most about 10 · spread, or of the total, at least log 1000 and often that.
    tolerance = 8 * 2.0**-23 * (5 + 10 * spread)
    for actual, wanted in zip((policy.log_probs, policy.tail_log_prob, policy.tail_entropy), expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)
    gradients = problem.gradients(combined(problem, policy.log_probs.double(), policy.tail_log_prob.double()))
    for ours, wanted in zip(gradients, exact.gradients(combined(exact, *expected[:2])), strict=True):
        assert (ours.double() - wanted).abs().max() <= within(tolerance) * wanted.abs().max()


LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, 1.0, -30.0, -300.0, -math.inf]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(LOGIT, min_size=1, max_size=12),
    slots=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
    with_entropy=st.booleans(),
)
def test_any_row(logits, slots, order, with_entropy):
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
def test_the_gradient_of_a_tiny_tail_keeps_its_digits(kind):
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
def test_the_entropy_of_a_near_deterministic_token_keeps_its_digits(kind):
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


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_vocabulary_has_no_part_in_it(kind, with_entropy):
    problem = Problem(kind, bias=True)
    masked = torch.arange(1000) >= 500
    at = problem.leaves[-1]
    at.data[..., masked] = -torch.inf
    ids = support_of(problem)
    policy = read(problem.source(), ids, entropy=with_entropy)
    on_support, tail, entropy = long_way(problem.logits(), ids)
    torch.testing.assert_close(policy.log_probs, on_support, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(policy.tail_log_prob, tail, rtol=1e-11, atol=1e-11)
    outputs = [policy.log_probs.exp()[..., 0].sum(), policy.tail_log_prob.sum()]
    if with_entropy:
        torch.testing.assert_close(policy.tail_entropy, entropy, rtol=1e-11, atol=1e-11)
        assert policy.tail_entropy is not None
        outputs.append(policy.tail_entropy.sum())
    for gradient in problem.gradients(sum(outputs)):  # type: ignore[arg-type]
        assert gradient.isfinite().all() and gradient.any()
    to_masked = problem.gradients(outputs[-1])[-1][..., masked]
    assert to_masked.abs().max() < 1e-300  # the entropy takes e^{−728} for 0 in float64


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution_are_nan_and_have_no_gradient(kind, with_entropy):
    problem = Problem(kind, shape=(6,))
    clean = read(problem.source(), support_of(problem), entropy=with_entropy)
    at = problem.leaves[0]
    at.data[1, 3] = torch.nan  # of a head, all logits of the row become NaN
    if kind == "logits":
        at.data[2, 500] = torch.inf
        at.data[4] = -torch.inf
    broken = [1, 2, 4] if kind == "logits" else [1]
    fine = [row for row in range(6) if row not in broken]
    policy = read(problem.source(), support_of(problem), entropy=with_entropy)
    assert policy.log_probs[broken][policy.used[broken]].isnan().all()
    assert policy.tail_log_prob[broken].isnan().all()
    # A head's rows are products of matrices of the same width: the same bits.
    assert torch.equal(policy.outcomes[fine], clean.outcomes[fine])
    outputs = policy.outcomes.masked_fill(policy.outcomes.isinf(), 0.0).sum(-1)
    if with_entropy:
        assert policy.tail_entropy is not None
        outputs = outputs + policy.tail_entropy
    gradients = problem.gradients(outputs[fine].sum())
    assert not gradients[0][broken].any()
    if kind == "logits":  # also where the gradient that arrives is not 0
        (all_rows,) = problem.gradients(outputs.sum())
        assert not all_rows[broken].any() and all_rows[fine].isfinite().all()
    assert gradients[0][fine].isfinite().all() and gradients[0][fine].abs().sum(-1).min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_support_of_everything_has_no_tail(kind):
    problem = Problem(kind, shape=(2,), size=9)
    ids = torch.stack([torch.arange(9), torch.arange(9).flip(0)])
    policy = read(problem.source(), ids, entropy=True)
    assert (policy.tail_log_prob == -torch.inf).all()
    assert policy.tail_entropy is not None and not policy.tail_entropy.any()
    expected = torch.log_softmax(problem.logits(), -1).gather(-1, ids)
    torch.testing.assert_close(policy.log_probs, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, 18, dtype=torch.float64).view(2, 9)
    ours = problem.gradients((weights * policy.log_probs).sum() + policy.tail_entropy.sum())
    for actual, wanted in zip(ours, problem.gradients((weights * expected).sum()), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (2, 3)])
def test_any_batch_shape(kind, shape):
    problem = Problem(kind, shape=shape, size=20)
    old = troll.capture(problem.source(), problem.token_ids, top_k=4)
    policy = troll.log_probs_at(problem.source(), old.token_ids)
    assert old.shape == old.slot.shape == old.log_prob.shape == policy.shape == policy.tail_log_prob.shape == shape
    assert old.token_ids.shape == old.log_probs.shape == policy.log_probs.shape == (*shape, 4)
    total = policy.logits[old.used].sum() + policy.tail_logit.sum()
    for gradient, leaf in zip(problem.gradients(total), problem.leaves, strict=True):
        assert gradient.shape == leaf.shape


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed_are_made(needed):
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
        (r"token_ids must be \(2, 3, 4\), got \(2, 2, 4\)", torch.zeros(2, 2, 4, dtype=torch.int64)),
        (r"token_ids must be \(2, 3, 3\), got \(2, 3\)", torch.zeros(2, 3, dtype=torch.int64)),
        (r"token_ids must be \(2, 3, K\), got \(\)", torch.tensor(0)),
        ("token_ids must be integers, got torch.float32", torch.zeros(2, 3, 1)),
        (r"token_ids must be in \[0, 7\), or -1 if unused, got 7", torch.full((2, 3, 1), 7)),
        (r"token_ids must be in \[0, 7\), or -1 if unused, got -2", torch.full((2, 3, 1), -2)),
    ],
    ids=range(6),
)
def test_ids_that_do_not_fit_are_refused(message, token_ids):
    with pytest.raises(ValueError, match=message):
        troll.log_probs_at(torch.zeros(2, 3, 7), token_ids)
