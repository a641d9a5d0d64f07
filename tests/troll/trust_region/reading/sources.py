"""Both sources of the same logits, and the same logits by plain torch, for the tests of what is read from them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll import LMHead, Logits
from troll.trust_region.reading.source import LogitsSource

KINDS = ("logits", "head")

TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap (Gemma 2)": {"softcap": 5.0, "temperature": 1.3},
    "scale (Cohere, Granite)": {"scale": 0.25},
    "all": {"softcap": 8.0, "temperature": 0.6, "scale": 1.7},
}

HIDDEN = 16


def plainly(raw: Tensor, temperature: float = 1.0, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """The logits that a transform with these settings makes, differentiable."""
    z = raw * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


class Problem:
    """What a source is made of, in float64 or less, and the same logits the long way."""

    def __init__(
        self,
        kind: str,
        *,
        shape: tuple[int, ...] = (3, 4),
        size: int = 1000,
        dtype: torch.dtype = torch.float64,
        bias: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind, self.shape = kind, torch.Size(shape)
        hidden = torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)
        weight = torch.randn(size, HIDDEN, generator=generator, dtype=torch.float64) / 2
        tensors = [hidden, weight] if kind == "head" else [hidden @ weight.t()]
        if bias:
            tensors.append(torch.randn(size, generator=generator, dtype=torch.float64))
        self.leaves = [x.to(dtype).requires_grad_() for x in tensors]
        likeliest = self.logits().argmax(-1)
        anything = torch.randint(size, self.shape, generator=generator)
        self.token_ids = torch.where(torch.rand(self.shape, generator=generator) < 0.5, likeliest, anything)

    def source(self) -> LogitsSource:
        if self.kind == "logits":
            return Logits(self.leaves[0])
        hidden, weight, *bias = self.leaves
        return LMHead(hidden, weight, bias[0] if bias else None)

    def logits(self) -> Tensor:
        """(..., V), differentiable; the product in the leaves' dtype, the rest in float64."""
        raw, *others = self.leaves
        if self.kind == "head":
            raw = raw @ others[0].t()
            raw = raw + others[1] if len(others) > 1 else raw
        return raw.double()

    def gradients(self, output: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(output, self.leaves, retain_graph=True))


def support_of(problem: Problem, slots: int = 6) -> Tensor:
    """Different tokens of the vocabulary in no order, (..., slots); every other row has two unused slots at its end."""
    generator = torch.Generator().manual_seed(1)
    size = problem.logits().shape[-1]
    tokens = problem.shape.numel()
    ids = torch.stack([torch.randperm(size, generator=generator)[:slots] for _ in range(tokens)] or [])
    ids[::2, -2:] = -1
    return ids.view(*problem.shape, slots)


def long_way(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities on a support, the tail's, and the entropy of all others among themselves, by autograd."""
    log_probs = torch.log_softmax(logits, -1)
    size = logits.shape[-1]
    inside = torch.zeros(*ids.shape[:-1], size + 1, dtype=torch.bool)
    inside = inside.scatter(-1, ids.masked_fill(ids < 0, size), True)[..., :size]
    on_support = log_probs.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    rest = logits.masked_fill(inside, -torch.inf)
    tail = torch.logsumexp(rest, -1) - torch.logsumexp(logits, -1)
    within = torch.log_softmax(rest, -1)
    counts = within > -torch.inf
    return on_support, tail, -(within.exp() * within.masked_fill(~counts, 0.0)).sum(-1)


class Largest(TorchDispatchMode):
    """How many elements the largest new tensor has: one that shares no memory with an argument.

    Args:
        ignored: Tensors of these shapes do not count.
    """

    def __init__(self, *ignored: torch.Size) -> None:
        super().__init__()
        self.elements, self._ignored = 0, ignored

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given and x.shape not in self._ignored:
                self.elements = max(self.elements, x.numel())
        return out
