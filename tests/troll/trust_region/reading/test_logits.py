"""Logits as a tensor: views read in place, picked rows, tiles, and logits that are given up for their gradient.

What is read from them is tested in test_read.py and test_capture.py.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import troll
from tests.troll.trust_region.policy.policies import assert_identical
from tests.troll.trust_region.reading.sources import Largest
from troll import Logits
from troll.trust_region.reading import logits as logits_module
from troll.trust_region.reading.read import read

B, T, V = 3, 8, 40


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ids(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def update(source: Logits, token_ids: Tensor) -> tuple[troll.SparsePolicy, list[Tensor], Tensor]:
    """A capture, what a step reads, and the gradient of something of all of it, with respect to the source's logits."""
    old = troll.capture(source, token_ids, top_k=6, mass_threshold=1e-3)
    new = read(source, old.token_ids, entropy=True)
    assert new.tail_entropy is not None
    outputs = [new.logits, new.tail_logit, new.tail_entropy]
    weights = torch.linspace(1, 2, token_ids.numel()).view(token_ids.shape)
    total = new.outcomes.masked_fill(new.outcomes.isinf(), 0.0).sum(-1) + new.log_probs[..., 0] + new.tail_entropy
    (gradient,) = torch.autograd.grad((weights * total).sum(), source.logits)
    return old, [x.detach() for x in outputs], gradient


def assert_same_update(actual: Any, expected: Any) -> None:
    assert_identical(actual[0], expected[0])
    for ours, theirs in zip([*actual[1], actual[2]], [*expected[1], expected[2]], strict=True):
        assert torch.equal(ours, theirs)


def transposed(like: Tensor) -> Tensor:
    """The same numbers, the batch in the second dimension of memory."""
    return like.transpose(0, 1).contiguous().transpose(0, 1)


VIEWS = {
    "aligned with labels": lambda x: torch.cat([x, torch.full_like(x[:, :1], 99.0)], 1)[:, :-1],
    "behind a prompt": lambda x: torch.cat([torch.full_like(x[:, :3], 99.0), x], 1)[:, 3:],
    "without padding of the vocabulary": lambda x: torch.cat([x, torch.full_like(x[..., :7], 99.0)], -1)[..., :V],
    "time first": transposed,
    "every second position": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every second entry": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "entries far apart": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "four dimensions": lambda x: transposed(x).unsqueeze(1).expand(B, 1, T, V),
    "one batch entry": lambda x: torch.stack([x, x + 1], 1)[:, 0],
}

#: Columns that lie apart are copied.
COPIED = ("every second entry", "entries far apart")


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("tile", [1, 5 * V, 2**24])
def test_view_is_read_like_its_copy(name, tile, monkeypatch):
    monkeypatch.setattr(logits_module, "TILE_LOGITS", tile)
    view = VIEWS[name](drawn(B, T, V)).requires_grad_()
    assert not view.is_contiguous()
    token_ids = ids(*view.shape[:-1])
    copy = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    assert_same_update(update(Logits(view), token_ids), update(Logits(copy), token_ids))


@pytest.mark.parametrize(
    ("name", "with_rows"), [("contiguous", False), ("contiguous", True), *((name, False) for name in VIEWS)]
)
def test_logits_are_read_without_a_copy(name, with_rows, monkeypatch):
    """Neither a copy of a view nor a float32 copy of bf16 logits; the backward pass makes their gradient, no more."""
    monkeypatch.setattr(logits_module, "TILE_LOGITS", 2 * V)
    whole = drawn(B, T, V, dtype=torch.bfloat16)
    view = (whole if name == "contiguous" else VIEWS[name](whole)).detach().requires_grad_()
    if with_rows:
        view = view.view(-1, V).detach().requires_grad_()
    source = Logits(view, rows=torch.arange(view[..., 0].numel() - 1).flip(0) if with_rows else None)
    largest = Largest()
    with largest:
        old = troll.capture(source, ids(*source.shape), top_k=2)
        new = read(source, old.token_ids, entropy=True)
    assert largest.elements >= 2 * V
    assert (largest.elements < B * T * V) == (name not in COPIED)
    largest.elements = 0
    with largest:
        assert new.tail_entropy is not None
        (new.logits[old.used].sum() + new.tail_entropy.sum()).backward()
    assert largest.elements == B * T * V


@pytest.mark.parametrize(
    ("tile", "index", "padded"), [(3 * V, torch.int64, False), (2**24, torch.int32, False), (3 * V, torch.int32, True)]
)
def test_rows_are_read_like_indexed_logits(tile, index, padded, monkeypatch):
    monkeypatch.setattr(logits_module, "TILE_LOGITS", tile)
    logits = drawn(23, V + 5 * padded)[:, :V].requires_grad_()
    for rows in (torch.tensor([20, 3, 4, 5, 22, 0, 11]), torch.zeros(0, dtype=torch.int64)):
        old, values, gradient = update(Logits(logits, 0.7, rows=rows.to(index)), ids(len(rows)))
        picked = logits.detach()[rows].requires_grad_()
        expected = update(Logits(picked, 0.7), ids(len(rows)))
        assert_same_update((old, values, gradient[rows]), expected)
        others = torch.ones(23, dtype=torch.bool).index_fill(0, rows, False)
        assert not gradient[others].any()
        assert (gradient[rows].abs().sum(-1) > 0).all()


def model_output(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Not a leaf, as a model's logits are not."""
    return drawn(*shape, V, dtype=dtype).requires_grad_() * 1.0


@pytest.mark.parametrize(
    ("shape", "rows"), [((23,), None), ((23,), [20, 3, 4, 5, 22, 0, 11]), ((B, T), None)], ids=["", "rows", "batch"]
)
@pytest.mark.parametrize(("tile", "dtype"), [(5 * V, torch.float32), (2**24, torch.bfloat16)])
def test_donated_logits_hold_their_gradient(shape, rows, tile, dtype, monkeypatch):
    monkeypatch.setattr(logits_module, "TILE_LOGITS", tile)
    rows = None if rows is None else torch.tensor(rows)
    kept, donated = model_output(*shape, dtype=dtype), model_output(*shape, dtype=dtype)
    token_ids = ids(*shape) if rows is None else ids(len(rows))
    expected = update(Logits(kept, rows=rows), token_ids)
    memory, version = donated.data_ptr(), donated._version
    actual = update(Logits(donated, rows=rows, donate=True), token_ids)
    assert_same_update(actual, expected)
    assert actual[2].data_ptr() == memory == donated.data_ptr()
    assert torch.equal(donated.detach(), expected[2])  # with rows, the other rows too are their gradient: 0
    assert donated._version > version
    assert kept._version == 0


def test_donated_logits_refuse_second_backward():
    logits = model_output(23)
    old = troll.capture(logits, ids(23), top_k=6)
    step = troll.trust_region_step(Logits(logits, donate=True), old)
    step.log_ratio.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="these logits were donated"):
        step.log_prob.sum().backward()


def test_donated_logits_fail_other_backward():
    """Autograd's own check, which a kernel's writes would pass by."""
    logits = model_output(23)
    old = troll.capture(logits, ids(23), top_k=6)
    other = logits.square().sum()
    troll.trust_region_step(Logits(logits, donate=True), old).log_ratio.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_capture_leaves_donated_logits():
    logits = drawn(23, V)
    before = logits.clone()
    assert_identical(troll.capture(Logits(logits, donate=True), ids(23)), troll.capture(logits, ids(23)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"scale": 2.0}, {"softcap": 5.0}], ids=str)
def test_donate_refuses_transforms(settings):
    with pytest.raises(ValueError, match=re.escape("donate=True takes logits as they are: temperature and scale 1")):
        Logits(drawn(5, V), donate=True, **settings)


@pytest.mark.parametrize(
    "part",
    [lambda x: x[:, :-1], lambda x: x[1:], lambda x: x[..., :-1], lambda x: x.transpose(0, 1), lambda x: x[:1]],
    ids=["positions", "batch", "vocabulary", "transposed", "first"],
)
def test_donate_refuses_view_of_part(part):
    with pytest.raises(ValueError, match="donate=True takes a whole tensor of logits, got a view of a part"):
        Logits(part(drawn(B, T, V)), donate=True)


def test_donate_takes_view_of_whole():
    logits = drawn(B, T, V)
    assert Logits(logits.view(-1, V), donate=True).donate


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("logits must be floating point (..., V)", {"logits": torch.zeros(2, 7).long()}),
        ("logits must be floating point (..., V)", {"logits": torch.tensor(0.0)}),
        ("temperature must be above 0", {"temperature": 0.0}),
        ("temperature must be above 0", {"temperature": float("nan")}),
        ("scale must be above 0", {"scale": -1.0}),
        ("softcap must be above 0", {"softcap": 0.0}),
        ("rows must be in [0, 2), got 2", {"rows": torch.tensor([0, 2])}),
        ("rows must be in [0, 2), got -1", {"rows": torch.tensor([-1])}),
        ("rows must be integers", {"rows": torch.tensor([0.5])}),
        ("rows must be integers", {"rows": torch.tensor([True, False])}),
        ("rows (N,) go with logits (L, V), got (1, 1) and (2, 7)", {"rows": torch.tensor([[1]])}),
        ("logits (L, V), got (1) and (2, 3, 7)", {"rows": torch.tensor([1]), "logits": torch.zeros(2, 3, 7)}),
    ],
    ids=range(12),
)
def test_logits_refuse_arguments_that_do_not_fit(message, arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        Logits(**{"logits": torch.zeros(2, 7), **arguments})
