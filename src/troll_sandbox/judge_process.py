"""The judge: a warm process that runs the programs' tests, in a sandbox of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from troll_sandbox.launch import Launcher
from troll_sandbox.limits import Limits
from troll_sandbox.unbounded import write_json


class Judge:
    """One judge, for the programs of one thread, one after the other.

    It lives no longer than the thread that makes it.

    Args:
        sandbox: Starts the judge.

    Attributes:
        process: As `Launcher.start` returned it.

    Raises:
        SandboxError: It could not be started.
    """

    def __init__(self, sandbox: Launcher) -> None:
        self._control, theirs = socket.socketpair()
        try:
            # It does not confine itself: it has to fork, and what it runs is the user's.
            self.process = sandbox.start("judge", limits=Limits(), stdin=theirs.fileno(), stdout=None)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def submit(self, job: dict[str, Any], channel: int) -> int:
        """Has a program judged.

        Args:
            job: The tests, as `inside/judge.py` reads them.
            channel: File descriptor of the channel to the program.

        Returns:
            File descriptor of a pipe with a line of JSON per outcome; the caller closes it.

        Raises:
            OSError: The judge is gone.
        """
        report, theirs = os.pipe()
        try:
            content = write_json(job).encode()
            socket.send_fds(self._control, [len(content).to_bytes(8, "big")], [channel, theirs])
            self._control.sendall(content)
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(theirs)
        return report

    def close(self) -> None:
        """Ends it at once, also in the middle of a test."""
        with contextlib.suppress(OSError):
            self._control.close()
        self.process.end()
