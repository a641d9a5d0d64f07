"""Actions at the end of this process that do not run in a process forked from it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_end(owner: object, action: Callable[..., object], *arguments: object) -> weakref.finalize[..., Any]:
    """Calls `action` once its owner is garbage-collected, or when this process ends, but not in a forked process.

    Args:
        owner: The object to wait for.
        action: Called with `arguments`. It must not refer to the owner.
        *arguments: Positional arguments of the call.

    Returns:
        A finalizer; calling it makes the call now.
    """
    return weakref.finalize(owner, _in_process, os.getpid(), action, *arguments)


def temporary_folder(owner: object, prefix: str) -> Path:
    """A new folder that is removed with its owner; see `at_end`."""
    folder = tempfile.mkdtemp(prefix=prefix)
    at_end(owner, shutil.rmtree, folder, True)
    return Path(folder)


def _in_process(pid: int, action: Callable[..., object], *arguments: object) -> None:
    if os.getpid() == pid:
        action(*arguments)
