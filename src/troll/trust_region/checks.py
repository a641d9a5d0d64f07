"""Checks of arguments, with errors that name the argument, what it got and what it takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Raises ValueError unless a value is one of the known names."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def check_integers(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor holds floating-point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, *shapes: Sequence[int | str]) -> None:
    """Raises ValueError unless a tensor has one of these shapes, in which a letter stands for any size."""
    for shape in shapes:
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.dim() == len(shape) and all(isinstance(takes, str) or size == takes for size, takes in sizes):
            return
    raise ValueError(f"{name} must be {' or '.join(map(shape_text, shapes))}, got {shape_text(tensor.shape)}")


def expanded(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor expanded to a shape; raises ValueError if it does not broadcast to it."""
    try:
        return tensor.expand(tuple(shape))
    except RuntimeError:
        raise ValueError(f"{name} must broadcast to {shape_text(shape)}, got {shape_text(tensor.shape)}") from None


def shared(owners: str, name: str, values: Sequence[T]) -> T:
    """The one value that all owners have; raises ValueError, which names owners and value, if theirs differ."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise ValueError(f"{owners} must share one {name}, got {', '.join(map(str, distinct))}")
    return distinct[0]


def shape_text(shape: Sequence[object]) -> str:
    """A shape as error messages show it."""
    return f"({', '.join(map(str, shape))})"


def check_mask_fits(mask: Tensor, **tensors: Tensor) -> None:
    """Raises ValueError unless the tensors have the mask's shape."""
    for name, tensor in tensors.items():
        check_shape(name, tensor, mask.shape)


def check_tokens_in(name: str, token_ids: Tensor, vocab_size: int, *, or_unused: bool = False) -> None:
    """Raises ValueError unless all ids are in [0, vocab_size), or −1 where slots may be unused."""
    token_ids = token_ids.long()  # a comparison would wrap V into a small type
    outside = (token_ids < -int(or_unused)) | (token_ids >= vocab_size)
    if bool(outside.any()):
        takes = f"[0, {vocab_size}), or -1 if unused" if or_unused else f"[0, {vocab_size})"
        raise ValueError(f"{name} must be in {takes}, got {token_ids[outside][0].item()}")


def check_distinct(name: str, token_ids: Tensor, *, are_sorted: bool = False) -> None:
    """Raises ValueError if a row (..., K) has an id twice; −1, of an unused slot, may occur again."""
    ordered = token_ids if are_sorted else token_ids.long().sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise ValueError(f"{name} must differ in a row, got {ordered[..., 1:][twice][0].item()} twice")
