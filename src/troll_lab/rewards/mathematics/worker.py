"""The process in which math-verify reads the answers of a model; `troll_lab.rewards.mathematics.pool` starts it.

It runs as a file. Of the project it imports only `expressions.py` and the files that this needs, never `troll`: torch
would take four seconds and more memory than math-verify.

The process imports math-verify and forks a child, which reads questions from standard input and writes verdicts to the
pipe that was standard output. Before each question the child sets a timer of its CPU time, and leaves the timer's
signal at its default action: the kernel ends the child even inside one long operation on integers, where no Python
signal handler runs. Its parent then reports the question and forks the next child, which has nothing left to import. If
a child ends for another reason, its parent ends as well, and the question is asked again.
"""

import contextlib
import importlib
import logging
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

QUESTION = struct.Struct("<Qd?II")  # number, CPU seconds, positive symbols, bytes of the gold answer and of the answer
VERDICT = struct.Struct("<QB")
DIFFERENT, EQUAL, TIME_LIMIT, FAILED = range(4)
READY = 0  # the number of the verdict that reports that math-verify is imported
CANNOT_IMPORT = 4  # exit status
EXPRESSIONS = "troll_lab.rewards.mathematics.expressions"  # the module that compares two answers

MEMORY_BYTES = 1 << 30
# A child whose memory has reached this is replaced: caches of sympy and the parser must not take memory from the next
# answer. A child that has just been forked has about 60 MiB.
_REPLACED_FROM_KILOBYTES = 256 << 10
_NO_MORE_QUESTIONS, _TO_BE_REPLACED = 0, 3
_IN_HAND = struct.Struct("<Q")
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

# Compared once before forking, so that math-verify and sympy build their tables only once for all children.
_FIRST_QUESTIONS = [
    (r"\frac{1}{2}, \{3\}", r"\{3, 0.5\}"),
    (r"x = \sqrt{8}", r"2\sqrt{2}"),
    (r"[1, \infty)", r"x \ge 1"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \end{pmatrix}"),
    (r"\cos(2x)", r"1 - 2\sin^2(x)"),
]

# Events that neither a comparison nor this process causes once it is ready.
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.remove", "os.rename", "subprocess.", "socket.", "shutil.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> None:
    """Serves questions until standard input ends."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends this process before a training run
        Path("/proc/self/oom_score_adj").write_text("1000")
    questions, verdicts = os.dup(0), os.dup(1)
    _silence()
    # The process that trains may have blocked or ignored the signal, and this process inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        expressions = importlib.import_module(EXPRESSIONS)
    except ImportError:
        sys.exit(CANNOT_IMPORT)
    for gold, answer in _FIRST_QUESTIONS:
        expressions.is_equal(gold, answer)
    expressions.forbid_code()
    sys.addaudithook(_forbid)
    import resource  # here, since `pool.py` imports this file on Windows too, which has no such module

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    in_hand = mmap.mmap(-1, _IN_HAND.size)  # shared with the children: the question that one is working on
    _answer(verdicts, READY, DIFFERENT)
    while True:
        child = os.fork()
        if child == 0:
            _serve(expressions.is_equal, questions, verdicts, in_hand)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (number,) = _IN_HAND.unpack(in_hand[:])
        if number and -status == signal.SIGPROF:
            _answer(verdicts, number, TIME_LIMIT)
        elif number and -status in _CRASHES:
            _answer(verdicts, number, FAILED)
        elif status != _TO_BE_REPLACED:
            return  # no more questions, or it was killed: then the question is lost
        in_hand[:] = _IN_HAND.pack(0)


def _silence() -> None:
    """Points the standard streams nowhere, so that printed text cannot be mistaken for a verdict."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _serve(is_equal: Callable[[str, str, bool], bool], questions: int, verdicts: int, in_hand: mmap.mmap) -> NoReturn:
    """Answers questions until their pipe ends."""
    import resource

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            number, cpu_seconds, positive_symbols, *sizes = QUESTION.unpack(_read(questions, QUESTION.size))
            gold, answer = (_read(questions, size).decode("utf-8", "surrogatepass") for size in sizes)
            in_hand[:] = _IN_HAND.pack(number)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            try:
                equal = is_equal(gold, answer, positive_symbols)
            except Exception:  # math-verify and sympy raise many kinds of errors for odd answers
                equal = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            in_hand[:] = _IN_HAND.pack(0)
            _answer(verdicts, number, EQUAL if equal else DIFFERENT)
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _REPLACED_FROM_KILOBYTES:
                os._exit(_TO_BE_REPLACED)
    os._exit(_NO_MORE_QUESTIONS)


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN) or (event == "open" and arguments[2] & _WRITING):
        raise PermissionError(f"comparing two answers must not cause {event}")


def _read(descriptor: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        part = os.read(descriptor, size - len(read))
        if not part:
            raise EOFError
        read += part
    return read


def _answer(descriptor: int, number: int, verdict: int) -> None:
    os.write(descriptor, VERDICT.pack(number, verdict))


if __name__ == "__main__":
    main()
    os._exit(0)  # the training run would wait for a regular exit, which takes sympy some time
