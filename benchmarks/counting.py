"""Counts the cost of a call on a GPU without one: launches, waits for the device, bytes, lengths of sorts.

Tensors stay on the CPU but claim to be on a GPU, so that the code takes the branches for a GPU. A launch is an operator
that torch dispatches, or a Triton kernel that the interpreter runs, which needs `TRITON_INTERPRET=1` when kernels are
defined. A composite operator counts as its parts; a sort counts as one launch, and takes more on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Passes = Callable[[int, int], Mapping[str, Callable[[], object]]]

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

#: Operators without a launch: they only give memory, or a tensor that shares some.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "_unsafe_view"}
FREE |= {"lift", "lift_fresh", "detach"}

#: Operators that wait for the device: the host needs their result, or at least its shape.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
WAITING |= {"bincount"}

#: Operators that write their first argument without reading it.
WRITING = {"copy_", "fill_", "zero_"}

#: Operators that read or write only the entries of their first argument that are in the index.
READING_SOME = {"index", "gather", "index_select"}
WRITING_SOME = {"index_put_", "_index_put_impl_", "scatter_", "index_fill_", "index_copy_"}

SORTING = {"sort", "topk", "argsort", "kthvalue", "median", "msort"}

#: Methods that copy to the host.
TO_HOST = {Tensor.tolist, Tensor.cpu, Tensor.numpy}


@dataclass
class Count:
    """The counts of a call."""

    launches: int = 0
    waits: int = 0
    #: Bytes that launches read and write, each address once a launch: a cache holds what is read again.
    moved: int = 0
    #: The same, but a kernel's loads and stores as often as they are made.
    issued: int = 0
    #: The longest row that is sorted.
    sorted_row: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def launch(self, name: str, moved: int, issued: int | None = None) -> None:
        """Adds one launch."""
        self.launches += 1
        self.moved += moved
        self.issued += moved if issued is None else issued
        self.names[name] += 1

    def wait(self, name: str) -> None:
        """Adds one wait."""
        self.waits += 1
        self.names[f"wait: {name}"] += 1


def count(call: Callable[[], object]) -> Count:
    """Runs a call on CPU tensors as if they were on a GPU."""
    counted = Count()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "device", lambda _: nullcontext()))
        stack.enter_context(_kernels(counted))
        stack.enter_context(_Operators(counted))
        stack.enter_context(_AsOnGPU(counted))
        call()
    return counted


def figures(
    passes: Passes,
    two_tiles: Callable[[int, int], AbstractContextManager[Any]],
    tokens: tuple[int, int],
    vocabulary: tuple[int, int],
) -> dict[str, dict[str, Any]]:
    """The figures of each pass, by name.

    Args:
        passes: Makes the passes for a number of tokens and of vocabulary entries. They run in this order, since one may
            need the result of another.
        two_tiles: A context in which this many tokens and entries take two row tiles instead of one.
        tokens: Two numbers of tokens, the smaller one first.
        vocabulary: Two numbers of vocabulary entries, the smaller one first.
    """
    counts = {(n, v): _counts(passes, n, v) for n in tokens for v in vocabulary}
    (few, many), (narrow, wide) = tokens, vocabulary
    with two_tiles(many, wide):
        cut = _counts(passes, many, wide)
    logits_more = (many - few) * (wide - narrow)
    found: dict[str, dict[str, Any]] = {}
    for name, one in counts[many, wide].items():
        found[name] = {
            "launches": one.launches,
            "of a further tile": cut[name].launches - one.launches,
            "waits": one.waits,
            "longest sort": one.sorted_row,
        }
        for figure, field_name in (("bytes a logit", "moved"), ("issued a logit", "issued")):
            corners = {at: getattr(found_at[name], field_name) for at, found_at in counts.items()}
            # In the difference, the bytes of tokens and weights cancel.
            more = corners[many, wide] - corners[few, wide] - corners[many, narrow] + corners[few, narrow]
            found[name][figure] = more / logits_more
        found[name]["names"] = dict(one.names)
    return found


def _counts(passes: Passes, tokens: int, vocabulary: int) -> dict[str, Count]:
    torch.manual_seed(0)
    return {name: count(call) for name, call in passes(tokens, vocabulary).items()}


class _AsOnGPU(TorchFunctionMode):
    """Makes tensors claim to be on a GPU, except for those that are made on the host."""

    def __init__(self, counted: Count) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        devices = [torch.device(x) for x in (*args, kwargs.get("device")) if isinstance(x, torch.device | str)]
        on_host = all(hasattr(x, "is_on_host") for x in tensors) and GPU not in devices
        if func == Tensor.device.__get__:
            return CPU if on_host else GPU
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not on_host
        if func is torch.autograd.grad:  # below a call that comes here this mode is off
            with self:
                return _backward(*args, **kwargs)
        if func is torch.addmm and "out_dtype" in kwargs:  # which the CPU lacks
            return self._addmm(*args[:3], out=kwargs["out"])
        comes = func is Tensor.to and GPU in devices and hasattr(args[0], "is_on_host")
        goes = not on_host and (func in TO_HOST or (func is Tensor.to and CPU in devices))
        if comes or goes or (func in (torch.tensor, torch.as_tensor) and GPU in devices):
            self._counted.wait(f"{func.__name__} between host and GPU")
        args = tuple(CPU if isinstance(x, torch.device) else x for x in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if (comes or goes) and isinstance(result, Tensor):
            result = result.detach()  # nothing was copied: the same numbers, but not the same object
        if ((on_host and not comes) or goes) and isinstance(result, Tensor):
            result.is_on_host = True  # type: ignore[attr-defined]
        return result

    def _addmm(self, total: Tensor, first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
        self._counted.launch("addmm", sum(x.nbytes for x in (total, first, second, out)))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch.addmm(total, first.to(total.dtype), second.to(total.dtype), out=out)


def _backward(outputs: Any, inputs: Any, grad_outputs: Any, **_: Any) -> tuple[Tensor, ...]:
    return _engine_run_backward(
        tuple(outputs), tuple(grad_outputs), False, False, tuple(inputs), allow_unreachable=False, accumulate_grad=False
    )


class _Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches; one that is composite on a GPU too counts as its parts."""

    def __init__(self, counted: Count) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in FREE or func.is_view:
            return func(*args, **kwargs)
        before = self._counted.launches
        result = None
        if _composite(func.name()):
            with self, suppress(RuntimeError):  # a number where it wants a tensor: such an operator makes one launch
                result = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if self._counted.launches > before:
            return result
        outputs = _tensors(result)
        if name in WAITING or _waits_for_index(name, args, kwargs):
            self._counted.wait(name)
        if any(x.numel() for x in outputs):
            self._counted.launch(name, _moved(func, name, args, kwargs, outputs))
        if name in SORTING:
            dim = next((x for x in args[2 if name in ("topk", "kthvalue") else 1 :] if type(x) is int), -1)
            self._counted.sorted_row = max(self._counted.sorted_row, args[0].shape[kwargs.get("dim", dim)])
        return result


def _composite(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeExplicitAutograd") and not has(name, "CPU")


def _waits_for_index(name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return masks and (name == "index" or args[2].numel() > 1)  # a single value is filled in through the mask


def _moved(func: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> int:
    first: Any = args[0] if args else None
    inputs = _tensors((args[1:], {key: x for key, x in kwargs.items() if key != "out"}))
    moved = sum(map(_bytes, inputs))
    if name in WRITING_SOME:
        entries = max(x.numel() for x in inputs)
        return moved + entries * first.element_size()
    moved += sum(map(_bytes, outputs))
    if name in READING_SOME:
        return moved + sum(map(_bytes, outputs))
    return moved + (0 if name in WRITING else sum(map(_bytes, _tensors(first))))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; for an expanded tensor, only those in memory."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@contextmanager
def _kernels(counted: Count) -> Iterator[None]:
    """Counts the launches of Triton's interpreter, and what kernels load and store under their masks."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    run, load, store = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    #: The current launch's addresses, by whether they are written to and by the bytes of an element.
    touched: dict[tuple[bool, int], list[Any]] = {}

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> None:
        touched.clear()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            run(self, *args, **kwargs)
        addresses = {key: np.concatenate(parts) for key, parts in touched.items()}
        moved = sum(np.unique(x).size * size for (_, size), x in addresses.items())
        counted.launch(self.fn.__name__, moved, sum(x.size * size for (_, size), x in addresses.items()))

    def touch(pointers: Any, mask: Any, writes: bool) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        touched.setdefault((writes, size), []).append(pointers.data[mask.data])

    def counting_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        touch(pointers, mask, False)
        return load(self, pointers, mask, *args)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        touch(pointers, mask, True)
        return store(self, pointers, value, mask, *args)

    with (
        mock.patch.object(GridExecutor, "__call__", counting_run),
        mock.patch.object(InterpreterBuilder, "create_masked_load", counting_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counting_store),
    ):
        yield
