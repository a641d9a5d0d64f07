"""Limits of a program, and outcomes of its tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

MEBIBYTE = 1 << 20

#: The interpreter maps a few dozen MiB itself; with less it cannot even report that memory ran out.
MINIMUM_MEMORY = 64 * MEBIBYTE


@dataclass(frozen=True)
class Limits:
    """Limits of one test by standard input and output, or of all function tests of a program.

    Attributes:
        cpu_seconds: CPU time of all threads. Verdicts depend on this limit, and not on how busy the machine is. It is
            exact, but an endless program is killed up to half a second later.
        wall_seconds: Wall time of all tests of a program, without the time it waits for a busy CPU.
        idle_seconds: How long a program may sleep or wait, even for a disk, while it uses less than 10 % of a CPU.
            Waiting for a busy CPU is not idling.
        memory_bytes: Address space, so reserved memory counts too. Thread stacks count only as far as they are used.
            At least 64 MiB.
        disk_bytes: Size of the work folder, which is in memory and holds a file or folder for every 4 KiB of it.
        output_bytes: Size of standard output, of standard error, and of each written file; at least four times the
            length of the expected output.
        threads: Number of threads. Where the kernel does not enforce it, e.g. without isolation, a program with more
            threads is killed.

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
        for limit in fields(self):
            value = getattr(self, limit.name)
            whole = not limit.name.endswith("_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"{limit.name} takes {'an integer' if whole else 'a number'}, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{limit.name} must be finite and above 0, got {value!r}")
        if self.memory_bytes < MINIMUM_MEMORY:
            raise ValueError(f"memory_bytes must be at least {MINIMUM_MEMORY} (64 MiB), got {self.memory_bytes}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        passed: True if the program passed the test.
        reason: "passed", or the reason for the failure in a few words: "wrong answer", "raised ValueError: ...", "time
            limit", "memory limit", "output limit", "exit status 3", ... Always `printable`.
        cpu_seconds: CPU time of the test, of all its threads, as the kernel counts it outside the program. Tests by
            calls share a process: each has an equal share of all that it used, its start included. None if it was not
            measured: the test did not run, a test by standard input was killed, or the sandbox is gVisor or a server.
            Outcomes that differ only in this are equal.
    """

    passed: bool
    reason: str
    cpu_seconds: float | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


def printable(text: str) -> str:
    """Escapes every character that is not safe to print or to write to a file, with a backslash.

    These are control characters (a terminal obeys them), separators other than the space, characters that change the
    direction of text, and lone surrogates (no encoding takes them).
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


#: Reasons of tests that are killed at a limit.
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
