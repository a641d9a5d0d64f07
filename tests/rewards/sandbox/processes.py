"""What runs on this machine, seen from outside of every sandbox."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from troll.rewards.sandbox.bubblewrap import Bubblewrap

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (Debian: apt install bubblewrap)"
)


def running(mark: str) -> list[int]:
    """Processes that have a text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until_gone(mark: str, seconds: float = 5.0) -> None:
    """Waits for the kernel to finish what it does after a kill."""
    end = time.monotonic() + seconds
    while left := running(mark):
        assert time.monotonic() < end, f"processes {left} are left"
        time.sleep(0.01)


def start_at_the_third_attempt_only(sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all attempts from now on."""
    monkeypatch.setattr("troll.rewards.sandbox.launch.FIRST_PAUSE", 0.01)
    starts: list[str] = []
    command = sandbox.command

    def failing() -> list[str]:
        starts.append("start")
        return command() if len(starts) == 3 else ["/bin/false"]

    monkeypatch.setattr(sandbox, "command", failing)
