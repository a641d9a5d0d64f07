"""Compiles kernels for a GPU that is not there, with the arguments that their own launchers pass.

The interpreter runs Python that the compiler refuses. Triton brings all it needs to get from a kernel to a binary.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Backend, architecture and threads of a warp.
TARGETS = {"cuda": ("cuda", 90, 32), "hip": ("hip", "gfx942", 64)}


def run_without_interpreter(module: str, *arguments: str, cache: os.PathLike[str]) -> list[str]:
    """Runs a module in a process where Triton compiles; gives the lines that it prints."""
    from triton.backends import backends

    backend = {"cuda": "nvidia", "hip": "amd"}[arguments[0]]
    if backend not in backends:
        pytest.skip(f"this Triton has no {backend} back end")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment | {"TRITON_CACHE_DIR": os.fspath(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def launches_compile_only(target: str) -> Iterator[list[Any]]:
    """Every launch compiles its kernel for the target and adds it to the list; nothing runs. One target a process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    kernels: list[Any] = []

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Driver())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", launch)
        yield kernels
