"""A process that has imported what runs need, and forks for each of them: `troll compare` keeps one for each slot.

It reads a run a line from stdin, `{"arguments": ["train", ...], "log": PATH}`, and answers each with its exit code.
A fork starts where a fresh process is after its imports: no random number is drawn, and neither CUDA nor torch's thread
pool, which do not survive a fork, has started. (The threads of OpenBLAS and of jemalloc have, which do.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence

#: What a run imports, in part only when it needs it. Some of it may not be installed.
_IMPORTS = ("troll.study.run", "reasoning_gym", "matplotlib.style", "matplotlib.backends.backend_svg")


def main() -> None:
    """Imports everything, and serves until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, as long as there is no run to pass it on to
    if sys.platform == "darwin":  # whose frameworks do not survive a fork either
        serve(lambda arguments: os.execv(sys.executable, [sys.executable, "-m", "troll.cli", *arguments]))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as the command line does
        for name in _IMPORTS:
            with contextlib.suppress(ImportError):  # a run that needs it says so
                importlib.import_module(name)
    # Python from 3.12 on warns of any thread at a fork.
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    gc.freeze()  # the collector would write to every object, and so copy what the forks share
    from troll import cli

    serve(cli.main)


def serve(run: Callable[[Sequence[str]], int]) -> None:
    """Makes the runs that stdin asks for, one after the other.

    Args:
        run: Takes the arguments of `troll`, and returns the exit code.
    """
    for line in sys.stdin:
        job = json.loads(line)
        code = _in_a_fork(run, job["arguments"], job["log"])
        with contextlib.suppress(BrokenPipeError):  # the comparison was killed; its run went on to its end
            os.write(sys.stdout.fileno(), b"%d\n" % code)


def _in_a_fork(run: Callable[[Sequence[str]], int], arguments: Sequence[str], log: str) -> int:
    """The exit code of a run, negative if a signal killed it. SIGINT is passed on to it, once each time."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    # Held back until both processes know what to do with it, or it would be lost or seen twice.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())
        os.close(nothing)
        sys.argv = ["troll", *arguments]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.exit(run(arguments))

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, signal.SIGINT)

    signal.signal(signal.SIGINT, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
