"""What a head keeps for its backward pass, with Triton."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import troll
from troll.trust_region.kernels import KERNELS_VARIABLE
from troll.trust_region.reading import head as head_module
from troll.trust_region.reading.read import read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HIDDEN = 700, 16

pytestmark = pytest.mark.usefixtures("small_tiles")


class Problem:
    """Hidden states, the weights of an old and a new head, and tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(2, 3, HIDDEN, generator=generator).to(DEVICE, dtype)
        old = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        new = old + 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.old, self.new = old.to(DEVICE, dtype), new.to(DEVICE, dtype)
        self.sampled = torch.randint(VOCABULARY, (2, 2), generator=generator).to(DEVICE)

    def source(self, weight: Tensor, hidden: Tensor | None = None) -> troll.LMHead:
        """Every row but a sequence's last."""
        return troll.LMHead((self.hidden if hidden is None else hidden)[:, :-1], weight)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_head_computes_kept_tiles_once(dtype, kept, monkeypatch):
    """Of three tiles; a second backward pass computes all of them, since the first one overwrites what is kept."""
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    monkeypatch.setattr(head_module, "TOKEN_TILE", 4)
    # Room for the first and half of the next; the third, a remainder, would fit where the second does not.
    monkeypatch.setattr(head_module, "KEPT", 1.5 * kept * 4 * 320 * dtype.itemsize / (VOCABULARY * HIDDEN))
    products: list[tuple[Any, ...]] = []
    original: Any = head_module._HeadReading._product

    def product(self: Any, *arguments: Any) -> Tensor:
        products.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(head_module._HeadReading, "_product", product)
    problem = Problem(dtype)
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


def test_head_keeps_no_tile_without_backward(monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    asked: list[Any] = []
    monkeypatch.setattr(head_module._HeadReading, "keep", lambda self, needed: asked.append(needed))
    problem = Problem(torch.float32)
    source = problem.source(problem.new.clone().requires_grad_())
    with torch.no_grad():
        read(source, problem.sampled.unsqueeze(-1))
    assert not asked
    monkeypatch.undo()
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    monkeypatch.setattr(head_module, "TOKEN_TILE", 3)  # of 4 tokens
    node: Any = read(source, problem.sampled.unsqueeze(-1)).tail_logit.grad_fn
    assert not node.next_functions[0][0].kept


@pytest.mark.parametrize(("trained", "setting"), [("hidden", None), ("weight", None), ("weight", "1"), ("weight", "0")])
def test_head_keeps_tiles_of_trained_weight(trained, setting, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    monkeypatch.delenv(head_module.KEEP_TILES_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(head_module.KEEP_TILES_VARIABLE, setting)
    monkeypatch.setattr(head_module, "TOKEN_TILE", 4)
    problem = Problem(torch.float32)
    hidden, weight = (
        x.clone().requires_grad_(name == trained)
        for name, x in zip(("hidden", "weight"), (problem.hidden, problem.new), strict=True)
    )
    policy = read(problem.source(weight, hidden), problem.sampled.unsqueeze(-1))
    node: Any = policy.tail_logit.grad_fn
    assert bool(node.next_functions[0][0].kept) == (trained == "weight" and setting != "0")
