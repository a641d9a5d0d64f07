"""What runs on this machine, seen from outside of every sandbox."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from troll.rewards.sandbox.bubblewrap import Sandbox
from troll.rewards.sandbox.limits import Limits

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


def start_at_the_third_attempt_only(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all attempts from now on."""
    monkeypatch.setattr("troll.rewards.sandbox.bubblewrap.PAUSES", (0.0, 0.0, 0.0))
    starts: list[str] = []
    command = sandbox.command

    def failing(limits: Limits) -> list[str]:
        starts.append("start")
        return command(limits) if len(starts) == 3 else ["/bin/false"]

    monkeypatch.setattr(sandbox, "command", failing)
