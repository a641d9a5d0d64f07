"""Policies to test with, and what is asked of them more than once."""

import dataclasses
import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import troll
from troll import SparsePolicy

many_examples = settings(max_examples=80, deadline=None, derandomize=True)

#: The tensors of a sparse policy; those of a packed one are these and its counts.
FIELDS = ("token_ids", "log_probs", "tail_log_prob", "slot")

#: Operations that return a number to the host, or a tensor whose shape depends on data: on a GPU the host waits.
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "_unique2"}


class _Waits(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITING or by_mask or repeats:
            self.names.append(name)
        return func(*args, **kwargs)


@contextmanager
def waits() -> Iterator[list[str]]:
    """The names of the calls for which a GPU would make the host wait."""
    names: list[str] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:  # no dispatch mode sees it
        names.append("tolist")
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted), _Waits(names):
        yield names


def random_policy(
    shape: tuple[int, ...] = (3, 4),
    size: int = 40,
    dtype: torch.dtype = torch.float32,
    *,
    top_k: int = 8,
    mass_threshold: float = 1e-2,
) -> SparsePolicy:
    """A capture of random logits: some rows use all slots, others do not, and sampled tokens are anywhere in them."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(dtype)
    token_ids = torch.randint(size, shape, generator=generator)
    return troll.capture(troll.Logits(logits), token_ids, top_k=top_k, mass_threshold=mass_threshold)


#: Of a capture, or None where it is not known.
TEMPERATURES = st.none() | st.floats(1e-7, 30)

#: Captures that cannot be joined with `random_policy()`, by what they do not share with it.
OTHER_CAPTURES = [
    ("mass_threshold", random_policy(mass_threshold=0.5)),
    ("vocab_size", random_policy(size=41)),
    ("top_k", random_policy(top_k=9)),
    ("truncated", dataclasses.replace(random_policy(), truncated=True)),
    ("temperature", dataclasses.replace(random_policy(), temperature=0.5)),
]


def padded(
    counts: torch.Tensor,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float32,
    truncated: bool = False,
    temperature: float | None = None,
    seed: int = 0,
) -> SparsePolicy:
    """A policy with so many used slots at each position, its values random, with some NaN, −inf and −0 among them."""
    generator = torch.Generator().manual_seed(seed)
    slots = (*counts.shape, top_k)
    used = torch.arange(top_k) < counts.unsqueeze(-1)
    unusual = torch.tensor([math.nan, -math.inf, -0.0, 1e-40], dtype=dtype)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        ordinary = torch.randn(shape, generator=generator, dtype=dtype)
        chosen = unusual[torch.randint(4, shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.2, chosen, ordinary)

    return SparsePolicy(
        torch.randint(2**31 - 1, slots, generator=generator).masked_fill(~used, -1),
        values(slots).masked_fill(~used, -torch.inf),
        values(tuple(counts.shape)),
        torch.randint(2**31 - 1, counts.shape, generator=generator) % counts.clamp(min=1),
        vocab_size=2**31 - 1,
        mass_threshold=1e-3,
        truncated=truncated,
        temperature=temperature,
    )


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch(value: Any) -> Any:
    """Through a file, with the default arguments."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def assert_identical(a: SparsePolicy, b: SparsePolicy) -> None:
    """Bit for bit, NaN and −inf included."""
    assert (a.shape, a.top_k) == (b.shape, b.top_k)
    for name in ("vocab_size", "mass_threshold", "truncated"):
        assert getattr(a, name) == getattr(b, name), name
    for name in FIELDS:
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes(), name
