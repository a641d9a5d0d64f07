"""Which kernels compute: Triton's, in files whose names end in `_triton`, or the torch code next to each."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: Forces "torch" or "triton". Unset, tensors on a GPU take Triton where it is installed, all others torch.
VARIABLE = "TROLL_KERNELS"

#: More outcomes of a token than this do not fit the registers of one program.
MAX_OUTCOMES = 4096

#: Nor do the candidates of more selected tokens than this, 64 for each.
MAX_SELECTED = 256


def use_triton(like: Tensor, outcomes: int, most: int = MAX_OUTCOMES) -> bool:
    """Whether Triton computes on tensors of this device and dtype, with so many outcomes per token.

    Float64, and more outcomes than the `most` that a kernel takes, are left to torch.

    Raises:
        ValueError: If the environment variable ``TROLL_KERNELS`` is neither "torch" nor "triton".
        ImportError: If it asks for Triton, which is not installed.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", "torch", "triton"):
        raise ValueError(f"{VARIABLE} must be torch or triton, got {forced!r}")
    if like.element_size() == 8 or outcomes > most or forced == "torch":
        return False
    if forced == "triton":
        if not _triton_is_installed():
            raise ImportError(f"{VARIABLE}=triton, but Triton is not installed: pip install 'troll-rl[triton]'")
        return True
    return like.device.type in ("cuda", "xpu") and _triton_is_installed()


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors' where a model is spread over several."""
    return nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
