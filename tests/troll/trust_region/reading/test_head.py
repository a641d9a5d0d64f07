"""The LM head that is never multiplied out: its tiles, precisions and parameters.

What is read from it is tested in test_read.py and test_capture.py.
"""

import contextlib
import re

import pytest
import torch
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region.policy.policies import assert_identical
from tests.troll.trust_region.reading.sources import Largest, Problem, long_way, support_of
from troll import LMHead
from troll.trust_region.reading import head as head_module
from troll.trust_region.reading.read import read

pytestmark = pytest.mark.usefixtures("small_tiles")


def test_head_makes_no_tensor_as_large_as_logits():
    problem = Problem("head", shape=(12,), dtype=torch.float32)
    largest = Largest(problem.leaves[1].shape)  # the weight's gradient
    with largest:
        old = troll.capture(problem.source(), problem.token_ids, top_k=8)
        step = troll.trust_region_step(problem.source(), old, entropy=True)
        (step.log_ratio + step.log_prob + step.regression).sum().backward()
    # Four whole rows of a capture, rounded up to blocks of 64; a step's tiles are smaller.
    assert 4 * 1000 <= largest.elements <= 4 * 1024 < 12 * 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_support_logits_are_float32(dtype):
    """As if the rounded operands were multiplied in float32: half precision would be off by 2⁻⁹ of 10."""
    problem = Problem("head", dtype=dtype, bias=True)
    policy = read(problem.source(), support_of(problem, 40))
    hidden, weight, bias = (x.detach().double() for x in problem.leaves)
    logits = hidden @ weight.t() + bias
    ids = policy.token_ids
    exact = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    assert policy.logits.dtype == torch.float32
    # 16 products and a bias, each sum of at most 20 rounded.
    torch.testing.assert_close(policy.logits.double(), exact, rtol=0, atol=17 * 20 * 2.0**-24)
    # Of the rest, logits of at most 16 are rounded to half precision: by half a unit in the last place, and once more
    # where the bias is added.
    expected = logits.scatter(-1, ids.clamp(min=0), -torch.inf).logsumexp(-1)
    ids_of_zero = (ids == -1).any(-1)  # their id was taken for 0 in the line above
    difference = (policy.tail_logit - expected).abs()[~ids_of_zero]
    assert difference.max() <= within(2 * 16 * torch.finfo(dtype).eps / 2)


def test_equal_half_precision_heads_have_no_divergence():
    """The rounded logits outside the support are the same in capture and step, and so are the exact ones on it."""
    problem = Problem("head", dtype=torch.bfloat16, shape=(50,))
    for threshold in (0.0, 1e-5, 0.3):
        old = troll.capture(problem.source(), problem.token_ids, top_k=8, mass_threshold=threshold)
        step = troll.trust_region_step(problem.source(), old)
        # The square of a rounding of numbers of at most 16.
        assert step.kl_before.max() <= within((16 * 2.0**-23) ** 2)


def test_head_gradients_accumulate_in_float32():
    """Over 20 tiles of tokens: in bf16 the sum would stand still once it is 256 times a summand."""
    problem = Problem("head", shape=(100,), dtype=torch.bfloat16, bias=True)
    policy = read(problem.source(), torch.zeros(100, 1, dtype=torch.int64))
    gradients = problem.gradients(policy.tail_log_prob.sum())
    assert all(x.dtype == torch.bfloat16 for x in gradients)
    exact = [x.detach().double().requires_grad_() for x in problem.leaves]
    _, tail, _ = long_way(exact[0] @ exact[1].t() + exact[2], torch.zeros(100, 1, dtype=torch.int64))
    expected = torch.autograd.grad(tail.sum(), exact)
    for ours, wanted in zip(gradients, expected, strict=True):
        # A tile's gradients are rounded to bf16, as are the logits of at most 16 that they are made of; and the result.
        error = (ours.double() - wanted).norm() / wanted.norm()
        assert error <= within(16 * 2.0**-9)


@pytest.mark.parametrize("autocast", [True, False])
def test_head_product_follows_autocast(autocast):
    problem = Problem("head", dtype=torch.float32)
    ids = support_of(problem)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        policy = read(problem.source(), ids)
        logits = problem.leaves[0] @ problem.leaves[1].t()
    gradients = problem.gradients(policy.tail_log_prob.sum())
    assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
    _, tail, _ = long_way(logits.double(), ids)
    # The same rounded products outside; on the support, which is 6 of 1,000, unrounded ones.
    torch.testing.assert_close(policy.tail_log_prob.double(), tail, rtol=0, atol=2e-3 if autocast else 1e-5)
    assert all(x.dtype == torch.float32 for x in gradients)


def test_head_computes_every_product_under_autocast(monkeypatch):
    """Float32 weights and hidden states under bf16 autocast are TRL's default: a product in float32 would be slow."""
    problem = Problem("head", dtype=torch.float32)
    operands = []
    original = head_module._product_into

    def product_into(out: Tensor, first: Tensor, second: Tensor, *, add: bool) -> None:
        operands.append((out.dtype, first.dtype, second.dtype))
        original(out, first, second, add=add)

    monkeypatch.setattr(head_module, "_product_into", product_into)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        old = troll.capture(problem.source(), problem.token_ids)
        step = troll.trust_region_step(problem.source(), old)
    step.log_ratio.sum().backward()  # outside autocast, as training loops do
    assert set(operands) == {(torch.float32, torch.bfloat16, torch.bfloat16)}


def test_head_ignores_autocast_in_float64():
    problem = Problem("head")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = troll.capture(problem.source(), problem.token_ids)
    assert_identical(under, troll.capture(problem.source(), problem.token_ids))


def test_head_takes_strided_hidden_states():
    problem = Problem("head", shape=(4, 5))
    hidden, weight = problem.leaves
    longer = torch.cat([hidden, hidden[:, :1]], 1).detach().requires_grad_()
    old = troll.capture(problem.source(), problem.token_ids)
    assert_identical(troll.capture(LMHead(longer[:, :-1], weight), problem.token_ids), old)
    policy = read(LMHead(longer[:, :-1], weight), old.token_ids)
    (gradient,) = torch.autograd.grad(policy.tail_log_prob.sum(), longer)
    (expected,) = torch.autograd.grad(read(problem.source(), old.token_ids).tail_log_prob.sum(), hidden)
    assert torch.equal(gradient[:, :-1], expected)
    assert not gradient[:, -1].any()


def test_head_gathers_sharded_parameters_for_backward():
    """A shard has nothing in it outside: only what is entered brings the weight back."""
    problem = Problem("head", bias=True)
    hidden, weight, bias = problem.leaves
    expected_old = troll.capture(problem.source(), problem.token_ids)
    expected = problem.gradients(read(problem.source(), expected_old.token_ids).tail_log_prob.sum())
    whole = weight.detach().clone(), bias.detach().clone()
    uses = 0

    @contextlib.contextmanager
    def gathered(*parameters: Tensor | None):
        nonlocal uses
        assert parameters[0] is weight and parameters[1] is bias
        uses += 1
        weight.data, bias.data = whole
        yield
        weight.data, bias.data = weight.new_empty(0), bias.new_empty(0)

    with gathered(weight, bias):
        source = LMHead(hidden, weight, bias, gathered=gathered)
        old = troll.capture(source, problem.token_ids)
    assert_identical(old, expected_old)
    assert weight.numel() == 0 and uses == 2
    weight.data, bias.data = whole
    policy = read(source, old.token_ids)
    assert weight.numel() == 0 and uses == 3
    actual = torch.autograd.grad(policy.tail_log_prob.sum(), [hidden, weight, bias])
    assert uses == 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("weight must be (V, 16)", {"weight": torch.zeros(1000, 15)}),
        ("weight must be (V, 16)", {"weight": torch.zeros(16)}),
        ("weight must be (V, 16)", {"weight": torch.zeros(0, 16)}),
        ("bias must be (1000)", {"bias": torch.zeros(3)}),
        ("bias must be (1000)", {"bias": torch.zeros(1000, 1)}),
        ("hidden must be floating point (..., H)", {"hidden": torch.zeros(3, 16).long()}),
        ("hidden must be floating point (..., H)", {"hidden": torch.tensor(0.0)}),
        ("temperature must be above 0", {"temperature": 0.0}),
        ("rows (N,) go with hidden (L, H), got (1) and (3, 1, 16)", {"rows": torch.tensor([0]), "hidden": "3-D"}),
    ],
    ids=range(9),
)
def test_head_refuses_tensors_that_do_not_fit(message, change):
    if isinstance(change.get("hidden"), str):
        change = change | {"hidden": torch.zeros(3, 1, 16)}
    arguments = {"hidden": torch.zeros(3, 16), "weight": torch.zeros(1000, 16)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        LMHead(**arguments)
