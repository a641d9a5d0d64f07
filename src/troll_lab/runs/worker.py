"""A process that imports everything that runs need, and forks for each run; `troll compare` has one in each slot.

Each line of stdin is a run, `{"arguments": [RECIPE, ...], "log": PATH}`; the worker writes back its exit code. A fork
starts in the state of a new process after its imports: no random number is drawn, and CUDA and torch's thread pool,
which do not survive a fork, have not started. (OpenBLAS and jemalloc have started threads; those do survive it.)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence

#: The modules that a run imports, some of them only when it needs them. Some may not be installed.
_IMPORTS = ("troll_lab.runs.train", "reasoning_gym", "troll_lab.reports.run_page", "matplotlib.backends.backend_svg")


def main() -> None:
    """Imports everything, and serves until stdin ends; with arguments, makes their run in this process."""
    if sys.argv[1:]:
        sys.exit(_train(sys.argv[1:]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback unless there is a run to interrupt
    if sys.platform == "darwin":  # its frameworks do not survive a fork
        serve(lambda arguments: os.execv(sys.executable, [sys.executable, "-m", "troll_lab.runs.worker", *arguments]))
        return
    from troll_lab.terminal import ignore_remarks_of_libraries

    with warnings.catch_warnings():
        ignore_remarks_of_libraries()
        for name in _IMPORTS:
            with contextlib.suppress(ImportError):  # a run that needs the module reports that it is missing
                importlib.import_module(name)
        with contextlib.suppress(ImportError):
            from troll_lab.runs.result import own_commit

            own_commit()  # the checkout may change before the last fork
    # From 3.12 on, Python warns of any thread at a fork.
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    gc.freeze()  # the collector would write to every object, and so copy the memory that forks share
    atexit.register(gc.unfreeze)  # else Triton reports leaks at the end of a log, in place of a run's error
    serve(_train)


def _train(arguments: Sequence[str]) -> int:
    from troll_lab.terminal import run_command

    def command() -> int:
        from troll_lab.runs.train import train_command  # a package may be missing, and then the run reports it

        return train_command(arguments[0], arguments[1:])

    return run_command(command)


def serve(run: Callable[[Sequence[str]], int]) -> None:
    """Makes the runs that stdin asks for, one after the other.

    Args:
        run: Takes the arguments of `troll train` on the command line, and returns the exit code.
    """
    for line in sys.stdin:
        job = json.loads(line)
        code = _in_a_fork(run, job["arguments"], job["log"])
        with contextlib.suppress(BrokenPipeError):  # the comparison was killed, but its run has reached its end
            os.write(sys.stdout.fileno(), b"%d\n" % code)


def _in_a_fork(run: Callable[[Sequence[str]], int], arguments: Sequence[str], log: str) -> int:
    """Makes a run and returns its exit code, negative if a signal killed it. Passes each SIGINT on to it once."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    # SIGINT is held back until both processes can handle it: otherwise it would be lost or handled twice.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())
        os.close(nothing)
        sys.argv = ["troll", "train", *arguments]
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
