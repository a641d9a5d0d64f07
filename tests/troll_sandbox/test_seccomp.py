import errno
import re
import struct
from pathlib import Path

import pytest

from troll_sandbox.seccomp import ALLOWED, CHECKED, MACHINES, PRETENDED, filter_program

ALLOW, KILL, PRETEND, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
#: Commands that are neither leases nor watches.
FCNTL = [*range(8), 36, 37, 38, 1030]
EVERY = {**ALLOWED, **PRETENDED, **{name: rule.numbers for name, rule in CHECKED.items()}}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns, by an independent interpreter of classic BPF."""
    architecture = MACHINES[machine][1] if architecture is None else architecture
    data = struct.pack("<IIQ", number, architecture, 0) + struct.pack("<6Q", *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    place, accumulator = 0, 0
    tests = {
        0x15: lambda operand: accumulator == operand,
        0x35: lambda operand: accumulator >= operand,
        0x45: lambda operand: bool(accumulator & operand),
    }
    while True:
        operation, if_true, if_false, operand = lines[place]
        place += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            accumulator = int.from_bytes(data[operand : operand + 4], "little")
        elif operation == 0x54:
            accumulator &= operand
        else:
            place += if_true if tests[operation](operand) else if_false


def call(machine: str, name: str, *arguments: int) -> int:
    number = EVERY[name][MACHINES[machine][0]]
    assert number is not None
    return verdict(machine, number, *arguments)


def test_filter_refuses_calls_that_are_not_listed(machine: str) -> None:
    column = MACHINES[machine][0]
    allowed = {numbers[column] for numbers in ALLOWED.values()}
    pretended = {numbers[column] for numbers in PRETENDED.values()}
    checked = {rule.numbers[column] for rule in CHECKED.values()}
    for number in set(range(600)) - checked:
        other = EPERM if number < 424 else ENOSYS
        assert verdict(machine, number) == (ALLOW if number in allowed else PRETEND if number in pretended else other)
    assert verdict(machine, 435) == ENOSYS  # clone3, whose flags are behind a pointer: the C library then uses clone


def test_tables_list_each_number_once(machine: str) -> None:
    numbers = [number for both in EVERY.values() if (number := both[MACHINES[machine][0]]) is not None]
    assert len(numbers) == len(set(numbers)) > 100
    assert len(EVERY) == len(ALLOWED) + len(PRETENDED) + len(CHECKED)


def test_filter_kills_programs_that_exit_like_killed_ones(machine: str) -> None:
    for name in ("exit", "exit_group"):
        for status in (137, 128, 137 + 256, 137 - (1 << 32) & (1 << 64) - 1):
            assert call(machine, name, status) == KILL
        for status in (0, 1, 9, 127, 136, 139, 255, 256):
            assert call(machine, name, status) == ALLOW


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("clone", [(0x3D0F00,)], [(17,), (0x10000000 | 17,)]),  # what the C library passes for a thread; no processes
        ("prctl", [(15,), (2,)], [(1,), (1 << 32 | 1,), (4,), (22,), (59,)]),  # 1 is the parent-death signal
        ("flock", [(3, 1), (3, 8)], [(3, 2), (3, 2 | 4)]),
        ("kill", [(1, 15), (9, 0)], [(1, 9)]),
        ("tgkill", [(1, 1, 6)], [(1, 1, 9)]),
        ("socketpair", [(1,)], [(2,), (16,)]),
        ("ioctl", [(0, 0x5401), (0, 0x541B)], [(0, 0x5412), (0, 0x40049409)]),  # TIOCSTI, FICLONE
        ("prlimit64", [(0, 3)], [(1, 3), (0, 0), (1 << 32, 1 << 32)]),
        ("setrlimit", [(3,)], [(0,), (1 << 32,)]),  # beyond 0, CPU time, the kernel would send SIGKILL
        ("mmap", [(0, 4096, 3, 0x22)], [(0, 4096, 3, 0x40022)]),
        ("madvise", [(0, 4096, 4)], [(0, 4096, 21)]),
        ("fcntl", [(3, command) for command in FCNTL] + [(1024, 0)], [(3, x) for x in range(1050) if x not in FCNTL]),
        ("fcntl", [(3, 1 << 32 | command) for command in FCNTL], [(3, 1 << 32 | 8)]),  # the kernel reads the low half
    ],
)
def test_filter_decides_by_arguments(
    machine: str, name: str, allowed: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    assert {call(machine, name, *arguments) for arguments in allowed} == {ALLOW}
    assert {call(machine, name, *arguments) for arguments in refused} == {EPERM}


def test_filter_kills_foreign_calls(machine: str) -> None:
    assert verdict(machine, 0x40000000 - 1) == ENOSYS
    assert verdict(machine, 0x40000000) == KILL
    assert verdict(machine, 0x40000000 | 39) == KILL
    assert verdict(machine, 0xFFFFFFFF) == KILL
    assert verdict(machine, 39, architecture=0x40000003) == KILL  # 32-bit x86


def test_tables_have_the_numbers_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]} here")
    text = HEADERS[machine].read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    aliases = re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text)
    known |= {name: known[other] for name, other in aliases if other in known}
    for name, numbers in EVERY.items():
        number = numbers[MACHINES[machine][0]]
        assert known.get(name) == (None if number is None else str(number)), name
