"""Chooses between Triton kernels, in files whose names end in `_triton`, and the torch code next to each.

Kernels have no type annotations, since Triton's compiler evaluates the annotations of parameters.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: The environment variable that forces "torch" or "triton". Unset, GPU tensors take Triton if it is installed.
KERNELS_VARIABLE = "TROLL_KERNELS"

#: More outcomes of a token than this do not fit the registers of one program.
MAX_OUTCOMES = 4096

#: The candidates of more selected tokens than this, 64 for each, do not fit either.
MAX_SELECTED = 256


def use_triton(tensor: Tensor, outcomes: int, max_outcomes: int = MAX_OUTCOMES) -> bool:
    """Whether Triton computes on tensors with the device and dtype of `tensor`, with so many outcomes per token.

    Torch computes float64, and more outcomes than the `max_outcomes` that a kernel takes.

    Raises:
        ValueError: If the environment variable `TROLL_KERNELS` is neither "torch" nor "triton".
        ImportError: If it asks for Triton, which is not installed.
    """
    forced = os.environ.get(KERNELS_VARIABLE, "")
    if forced not in ("", "torch", "triton"):
        raise ValueError(f"{KERNELS_VARIABLE} must be torch or triton, got {forced!r}")
    if tensor.element_size() == 8 or outcomes > max_outcomes or forced == "torch":
        return False
    if forced == "triton":
        if not _triton_is_installed():
            raise ImportError(f"{KERNELS_VARIABLE}=triton, but Triton is not installed: pip install 'troll-rl[triton]'")
        return True
    return tensor.device.type in ("cuda", "xpu") and _triton_is_installed()


def switched_on(variable: str) -> bool:
    """Whether an environment variable is not 0; unset, it is 1.

    Raises:
        ValueError: If it is neither 0 nor 1.
    """
    value = os.environ.get(variable, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}")
    return value == "1"


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device current: Triton launches there, which need not be where the tensors of a sharded model are."""
    return nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
