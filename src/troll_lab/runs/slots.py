"""Slots for the runs of a comparison, each a worker process with its share of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

#: The worker process that makes the runs of a slot.
WORKER = [sys.executable, "-m", "troll_lab.runs.worker"]


class Slot:
    """Makes one run at a time, in forks of one worker.

    Args:
        environment: The environment variables of its runs.
        lock: A file descriptor that the worker and its runs inherit, so that any surviving process holds the lock.
    """

    def __init__(self, environment: Mapping[str, str], lock: int) -> None:
        self._environment, self._lock = dict(environment), lock
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], log: Path) -> None:
        """Starts `troll train` with these arguments, once the last run has ended, and appends its output to a log."""
        if self._worker is None or self._worker.poll() is not None:
            with log.open("ab") as errors:
                # In its own session, so that Ctrl-C reaches only the comparison, which passes it on once.
                self._worker = subprocess.Popen(
                    WORKER,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=[self._lock],
                    bufsize=0,
                )
        assert self._worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has died, as its exit code will show
            self._worker.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")

    def fileno(self) -> int:
        """The file descriptor that becomes readable when the run ends, for `select`."""
        assert self._worker is not None and self._worker.stdout is not None
        return self._worker.stdout.fileno()

    def exit_code(self) -> int:
        """The exit code of the run, once it has ended; negative if a signal killed it, or its worker."""
        assert self._worker is not None
        if answer := os.read(self.fileno(), 64):
            return int(answer)
        self.kill()  # the worker has died, and the run may still be there
        return self._worker.returncode

    def interrupt(self) -> None:
        """Sends the run SIGINT, once."""
        if self._worker is not None:
            self._worker.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Lets the worker end after its run; `wait` waits for it."""
        if self._worker is not None and self._worker.stdin is not None:
            self._worker.stdin.close()

    def wait(self) -> None:
        """Waits for the worker's end."""
        if self._worker is not None:
            with self._worker:
                pass

    def kill(self) -> None:
        """Kills the worker and everything that it has started."""
        if self._worker is not None and self._worker.returncode is None:  # else another process may have its number
            os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.wait()


def gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if listed is None else listed.split(",")
    return [name.strip() for name in names[:count]]


def environments(jobs: int, cores: int, devices: Sequence[str]) -> list[dict[str, str]]:
    """The environment variables of each of `jobs` slots: an equal share of the cores, and one of the GPUs.

    A smaller `OMP_NUM_THREADS` of this process is kept, so that one can leave cores to other work. If there are more
    slots than GPUs, several slots share one. Without `devices`, no GPU is assigned.
    """
    threads, limit = max(1, cores // jobs), os.environ.get("OMP_NUM_THREADS", "")
    shared = os.environ | {"OMP_NUM_THREADS": str(min(threads, int(limit)) if limit.isdecimal() else threads)}
    if not devices:
        return [shared] * jobs
    return [shared | {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} for slot in range(jobs)]
