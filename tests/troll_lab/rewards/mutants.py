"""Wrong programs made from right ones, and a plain run of their tests to tell which of them are wrong."""

import os
import random
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import possible_mutants


def mutants(source: str, count: int, seed: int) -> list[str]:
    """Up to `count` programs, each with one change."""
    text = source.encode()
    changes = list(possible_mutants(text))
    chosen = random.Random(seed).sample(changes, min(count, len(changes)))
    return [(text[:begin] + after.encode() + text[end:]).decode() for begin, end, after in chosen]


def plain_run_passes(program: str, setup: str, names: Sequence[str], tests: Sequence[str], seconds: int = 2) -> bool:
    """Whether program, setup and tests run in one plain process; for programs known to do no harm.

    The setup comes after the program, and of what both define only `names` stay the program's.
    """
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**29
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            signal.alarm(20)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            defined = {"__name__": "solution"}
            exec(program, defined)
            space = dict(defined)
            exec(setup, space)
            space.update({name: defined[name] for name in names if name in defined})
            for test in tests:
                exec(test, space)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
