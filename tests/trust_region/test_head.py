"""The fused head against the same mathematics on full logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import troll
from troll.trust_region import head as head_module
from troll.trust_region import tiles as tiles_module
from troll.trust_region.head import Head, top_from_hidden
from troll.trust_region.policy import SparsePolicy

TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap (Gemma 2)": {"softcap": 5.0, "temperature": 1.3},
    "scale (Cohere, Granite)": {"logit_scale": 0.25},
    "all, and a bias": {"softcap": 8.0, "temperature": 0.6, "logit_scale": 1.7, "bias": True},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder."""
    monkeypatch.setattr(head_module, "TOKEN_TILE", 5)
    monkeypatch.setattr(head_module, "CAPTURE_TOKEN_TILE", 4)
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 300)


def problem(
    shape: tuple[int, ...] = (3, 4), size: int = 1000, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, 16, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(size, 16, generator=generator, dtype=torch.float64)
    bias = torch.randn(size, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(size, shape, generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), token_ids


def full_logits(hidden: Tensor, weight: Tensor, *, bias=None, temperature=1.0, logit_scale=1.0, softcap=None) -> Tensor:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = (logits.double() if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def keywords_of(transform: str, bias: Tensor) -> dict[str, Any]:
    keywords = dict(TRANSFORMS[transform])
    return keywords | {"bias": bias} if keywords.pop("bias", False) else keywords


def assert_same_policy(actual: SparsePolicy, expected: SparsePolicy, tolerance: float) -> None:
    assert torch.equal(actual.token_ids, expected.token_ids)
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.tail_log_prob, expected.tail_log_prob, rtol=tolerance, atol=tolerance)
    assert (actual.tail, actual.vocab_size, actual.mass_threshold) == (
        expected.tail,
        expected.vocab_size,
        expected.mass_threshold,
    )


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("mass_threshold", [0.0, 1e-2])
def test_capture_is_that_of_full_logits(transform, tail, mass_threshold):
    hidden, weight, bias, token_ids = problem()
    keywords = keywords_of(transform, bias)
    capture: dict[str, Any] = {"top_k": 8, "mass_threshold": mass_threshold, "tail": tail}
    actual = SparsePolicy.from_hidden(hidden, weight, token_ids, **capture, **keywords)
    expected = SparsePolicy.from_logits(full_logits(hidden, weight, **keywords), token_ids, **capture)
    assert_same_policy(actual, expected, 1e-10)


@pytest.mark.parametrize("k", [1, 3, 64, 256, 1000])
@pytest.mark.parametrize("size", [1000, 1024, 301])
@pytest.mark.parametrize("levels", [None, 3])
def test_the_top_is_that_of_a_stable_sort(k, size, levels):
    """With `levels`, logits take three values only, and almost everything ties."""
    k = min(k, size)
    hidden = torch.eye(7, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(size, 7, generator=generator)
    if levels:
        weight = torch.randint(levels, (size, 7), generator=generator).float()
    weight[::5, 3] = -torch.inf
    weight[1:, 4] = -torch.inf
    logits = weight.t().contiguous()
    token_ids = torch.arange(7) * (size // 7)

    # inf * 0 would be NaN in a matrix product.
    def product(rows: Tensor, tile_weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(tile_weight.t()[rows.argmax(-1)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "_matrix_product", product)
        top = top_from_hidden(hidden, Head(weight), token_ids, k)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(top.ids, expected.indices[:, :k])
    assert torch.equal(top.logits, expected.values[:, :k])
    torch.testing.assert_close(top.log_total.squeeze(-1), logits.logsumexp(-1))
    rest = logits.scatter(-1, top.ids, -torch.inf).scatter(-1, token_ids.unsqueeze(-1), -torch.inf)
    torch.testing.assert_close(top.log_rest.squeeze(-1), rest.logsumexp(-1))


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kl_bound", [1e-3, 0.05, torch.inf])
def test_step_and_gradients_are_those_of_full_logits(transform, tail, kl_bound):
    hidden, weight, bias, token_ids = problem()
    keywords = keywords_of(transform, bias)
    old = SparsePolicy.from_logits(
        full_logits(hidden, weight, **keywords), token_ids, top_k=8, mass_threshold=1e-2, tail=tail
    )
    leaves = [hidden + 0.1, weight * 1.02, bias * 1.01]
    results = []
    for fused in (True, False):
        hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        if "bias" in keywords:
            keywords["bias"] = bias
        if fused:
            step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old, kl_bound, **keywords)
        else:
            step = troll.trust_region_log_probs(full_logits(hidden, weight, **keywords), token_ids, old, kl_bound)
        weights = torch.linspace(-1, 1, step.log_probs.numel(), dtype=torch.float64).view(step.log_probs.shape)
        ((step.log_probs + 0.3 * step.new_log_probs) * weights + step.regression).sum().backward()
        grads = [leaf.grad for leaf in (hidden, weight, bias) if leaf.grad is not None]
        results.append((step, grads))
    (actual, actual_grads), (expected, expected_grads) = results
    for name in ("log_probs", "new_log_probs", "regression", "kl_before", "kl_after", "multiplier", "projected"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-8, atol=1e-10)
    assert len(actual_grads) == len(expected_grads) == (3 if "bias" in keywords else 2)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-7, atol=1e-9)


def test_half_precision_is_computed_in_float32():
    hidden, weight, _, token_ids = problem(dtype=torch.bfloat16)
    old = SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=16)
    assert_same_policy(old, SparsePolicy.from_logits(hidden @ weight.t(), token_ids, top_k=16), 1e-5)
    hidden.requires_grad_()
    step = troll.trust_region_log_probs_from_hidden(hidden, weight * 1.1, token_ids, old)
    step.log_probs.sum().backward()
    assert old.log_probs.dtype == step.log_probs.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_a_tiny_tail_is_resolved():
    """1 − Σ would be exactly 0 from 1e-7 on; the complement's own log-sum-exp is not."""
    weight = torch.zeros(1000, 1)
    weight[7] = 70.0
    old = SparsePolicy.from_hidden(torch.ones(1, 1), weight, torch.tensor([7]), top_k=1)
    expected = torch.log(torch.tensor(999.0)) - 70.0
    torch.testing.assert_close(old.tail_log_prob[0], expected, rtol=1e-6, atol=0)
    step = troll.trust_region_log_probs_from_hidden(torch.ones(1, 1), weight, torch.tensor([7]), old)
    assert step.kl_before.item() == 0


def test_no_tensor_of_tokens_by_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, token_ids = problem(shape=(12,), dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and weight.shape[-1] not in tensor.shape:  # not a slice of the head
                    largest = max(largest, tensor.numel())
            return out

    hidden.requires_grad_()
    weight.requires_grad_()
    with Watch():
        old = SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=8)
        step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old)
        step.log_probs.sum().backward()
    assert 0 < largest <= 5 * 330 < hidden.shape[0] * weight.shape[0]


def test_rows_that_are_no_distribution_are_nan_and_have_no_gradient():
    hidden, weight, _, token_ids = problem(shape=(4,))
    old = SparsePolicy.from_hidden(hidden, weight, token_ids)
    broken = hidden.clone()
    broken[1] = torch.nan
    broken.requires_grad_()
    step = troll.trust_region_log_probs_from_hidden(broken, weight * 1.1, token_ids, old)
    assert step.kl_before.isnan().tolist() == [False, True, False, False]
    step.log_probs[[0, 2, 3]].sum().backward()
    assert broken.grad is not None and broken.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_any_batch_shape(shape):
    hidden, weight, _, token_ids = problem(shape=shape)
    old = SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=4)
    step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old)
    assert old.shape == step.log_probs.shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4, 15)}, "hidden must be"),
        ({"lm_head_weight": torch.zeros(16)}, "lm_head_weight must be"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "hidden must be"),
        ({"token_ids": torch.full((3, 4), 1000)}, "token_ids must be in"),
        ({"bias": torch.zeros(3)}, "bias must be"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"softcap": -1.0}, "softcap must be above 0"),
        ({"top_k": 0}, "top_k must be"),
        ({"token_ids": torch.zeros(3, 4)}, "token_ids must be integers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_named(change, message):
    hidden, weight, _, token_ids = problem(dtype=torch.float32)
    arguments = {"hidden": hidden, "lm_head_weight": weight, "token_ids": token_ids} | change
    with pytest.raises(ValueError, match=message):
        SparsePolicy.from_hidden(**arguments)


def test_another_vocabulary_is_refused():
    hidden, weight, _, token_ids = problem(dtype=torch.float32)
    old = SparsePolicy.from_hidden(hidden, weight, token_ids)
    with pytest.raises(ValueError, match="lm_head_weight must have 1000 rows, got 999"):
        troll.trust_region_log_probs_from_hidden(hidden, weight[:-1], token_ids, old)


def exact_entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, -1)
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0)).sum(-1)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_entropy_and_its_gradient_are_those_of_full_logits(transform, scale):
    """From flat to near-deterministic."""
    hidden, weight, bias, token_ids = problem(scale=scale)
    keywords = keywords_of(transform, bias)
    old = SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=8, **keywords)
    gradients = []
    for fused in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        rows, head, _ = leaves
        arguments: dict[str, Any] = keywords | ({"bias": leaves[2]} if "bias" in keywords else {})
        if fused:
            step = troll.trust_region_log_probs_from_hidden(
                rows, head, token_ids, old, torch.inf, entropy=True, **arguments
            )
            assert step.entropy is not None
            log_probs, entropy = step.log_probs, step.entropy
        else:
            logits = full_logits(rows, head, **arguments)
            log_probs = torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
            entropy = exact_entropy(logits)
        (0.3 * log_probs.sum() + (entropy * torch.linspace(-1, 2, 12).view(3, 4)).sum()).backward()
        gradients.append([entropy.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_entropy_without_gradient_costs_the_backward_nothing():
    hidden, weight, _, token_ids = problem()
    old = SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=8)
    hidden.requires_grad_()
    step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old, entropy=True)
    (with_entropy,) = torch.autograd.grad(step.log_probs.sum(), hidden)
    step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old)
    assert step.entropy is None
    (without,) = torch.autograd.grad(step.log_probs.sum(), hidden)
    assert torch.equal(with_entropy, without)


def test_entropy_of_a_near_deterministic_token_keeps_its_digits():
    """1 − p is 1e-6, of which the likely token's log p keeps one digit in float32; the others' sum is exact."""
    size = 1000
    hidden = torch.eye(1, dtype=torch.float32)
    weight = torch.full((size, 1), -20.723266)  # 999 tokens of 1e-9
    weight[7] = 0.0
    old = SparsePolicy.from_hidden(hidden, weight, torch.tensor([7]), top_k=1)
    step = troll.trust_region_log_probs_from_hidden(hidden, weight, torch.tensor([7]), old, entropy=True)
    assert step.entropy is not None
    exact = exact_entropy(hidden.double() @ weight.double().t())
    torch.testing.assert_close(step.entropy.double(), exact, rtol=1e-2, atol=0)


def test_masked_vocabulary_has_no_part_in_the_entropy():
    hidden, weight, _, token_ids = problem(dtype=torch.float32)
    bias = torch.zeros(len(weight))
    bias[500:] = -torch.inf
    token_ids = token_ids % 500
    old = SparsePolicy.from_hidden(hidden, weight, token_ids, bias=bias)
    hidden.requires_grad_()
    weight.requires_grad_()
    step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old, bias=bias, entropy=True)
    assert step.entropy is not None
    torch.testing.assert_close(step.entropy, exact_entropy(hidden @ weight[:500].t()), rtol=1e-5, atol=1e-6)
    grad_hidden, grad_weight = torch.autograd.grad(step.entropy.sum(), (hidden, weight))
    assert grad_hidden.isfinite().all() and grad_weight.isfinite().all()
    assert (grad_weight[500:] == 0).all()


@pytest.mark.parametrize("mass_threshold", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("seed", range(3))
def test_leaving_out_the_new_support_moves_a_floored_kl_by_little(mass_threshold, seed):
    """The bound that `OwnSupport` states, over policies that put about the threshold outside the old support."""
    generator = torch.Generator().manual_seed(seed)
    tokens, size, width = 200, 400, 400
    old_logits = 4 * torch.randn(tokens, size, generator=generator, dtype=torch.float64)
    sharper = torch.empty(tokens, 1, dtype=torch.float64).uniform_(0.7, 1.5, generator=generator)
    new_logits = sharper * old_logits + 0.1 * torch.randn(tokens, size, generator=generator, dtype=torch.float64)
    token_ids = old_logits.argmax(-1)
    old = SparsePolicy.from_logits(old_logits, token_ids, top_k=300, mass_threshold=mass_threshold, tail="floor")
    identity = torch.eye(size, width, dtype=torch.float64)
    exact = troll.trust_region_log_probs(new_logits, token_ids, old)
    fused = troll.trust_region_log_probs_from_hidden(new_logits, identity, token_ids, old)
    difference = (fused.kl_before - exact.kl_before).abs()
    outside = old.on_support(new_logits).tail_log_prob.exp()
    few = outside <= mass_threshold
    assert 20 < few.sum() < tokens - 20, "both kinds must occur"
    bound = mass_threshold * (1 + exact.kl_before).clamp(min=math.log(mass_threshold / 1e-12))
    assert difference[few].max() > 0
    assert (difference <= bound)[few].all()
    assert difference[~few].max() < 1e-9, "with the new support, nothing is approximated"


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_decides_in_what_the_product_is_computed(autocast):
    hidden, weight, _, token_ids = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        old = SparsePolicy.from_hidden(hidden, weight, token_ids)
        leaf = hidden.clone().requires_grad_()
        step = troll.trust_region_log_probs_from_hidden(leaf, weight, token_ids, old)
        logits = hidden @ weight.t()
    (gradient,) = torch.autograd.grad(step.log_probs.sum(), leaf)
    assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(step.new_log_probs, expected, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == torch.float32


def test_under_autocast_every_product_is_computed_in_its_dtype(monkeypatch):
    """Float32 weights and hidden states under bf16 autocast are TRL's default: a product in float32 would be slow."""
    hidden, weight, _, token_ids = problem(dtype=torch.float32)
    operands = []
    original = head_module._add_matrix_product

    def add(total: Tensor, first: Tensor, second: Tensor) -> None:
        operands.append((total.dtype, second.dtype))
        original(total, first, second)

    monkeypatch.setattr(head_module, "_add_matrix_product", add)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        old = SparsePolicy.from_hidden(hidden, weight, token_ids)
        step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old)
    step.log_probs.sum().backward()
    assert set(operands) == {(torch.float32, torch.bfloat16)}
