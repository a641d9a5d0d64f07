"""What a program may use, and what became of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MEBIBYTE = 1 << 20

#: The interpreter maps a few dozen MiB itself; with less it cannot even report that memory ran out.
MINIMUM_MEMORY = 64 * MEBIBYTE


@dataclass(frozen=True)
class Limits:
    """Limits of one test by standard input and output, or of one sequence of calls.

    Attributes:
        cpu_seconds: CPU time of all its threads. Decides, so that results do not depend on how busy the machine is.
            Measured exactly, while a program that does not end may use half a second more before it is killed.
        wall_seconds: How long all tests of a program may take together: nobody else can be tested meanwhile.
        idle_seconds: How long it may sleep or wait, using next to no CPU (under 10 %), also for a disk. Waiting for a
            busy CPU is not idleness.
        memory_bytes: Address space, so what is reserved counts as well, but for the stacks of threads, which count as
            far as they are used; at least 64 MiB.
        disk_bytes: Size of the work folder, which is in memory; it holds a file or folder for every 4 KiB of it.
        output_bytes: Size of standard output, of standard error, and of each file it writes; at least four times the
            length of what is expected.
        threads: How many threads it may have. Where the kernel does not enforce this, without isolation for one, a
            program that has more is ended.

    Raises:
        ValueError: A limit is not a finite number above 0, or one of bytes or threads is not an integer.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 20.0
    idle_seconds: float = 5.0
    memory_bytes: int = 512 * MEBIBYTE
    disk_bytes: int = 16 * MEBIBYTE
    output_bytes: int = 4 * MEBIBYTE
    threads: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = not field.name.endswith("_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"{field.name} takes {'an integer' if whole else 'a number'}, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be finite and above 0, got {value!r}")
        if self.memory_bytes < MINIMUM_MEMORY:
            raise ValueError(f"memory_bytes must be at least {MINIMUM_MEMORY} (64 MiB), got {self.memory_bytes}")


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        passed: Whether it passed.
        reason: "passed", or why not in a few words: "wrong answer", "raised ValueError: ...", "time limit", "memory
            limit", "output limit", "exit status 3", ... Always `printable`.
    """

    passed: bool
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


def printable(text: str) -> str:
    """The text with a backslash escape for every character that cannot be printed or written to a file.

    Those are control characters, with which a terminal can be told to do things, separators other than the space,
    what changes the direction of the text around it, and lone surrogates, which no encoding takes.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


#: Reasons of tests that are ended for a limit.
REASONS = {
    "cpu": "time limit",
    "idle": "idle limit",
    "wall": "wall limit",
    "threads": "thread limit",
    "memory": "memory limit",
}

PASSED = Outcome(True, "passed")
TIME_LIMIT = Outcome(False, REASONS["cpu"])
OUT_OF_MEMORY = Outcome(False, REASONS["memory"])
NOT_RUN = Outcome(False, "not run")
