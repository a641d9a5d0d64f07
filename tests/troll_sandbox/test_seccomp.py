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


def test_filter_allows_threads_but_no_processes(machine: str) -> None:
    assert call(machine, "clone", 0x3D0F00) == ALLOW  # what the C library passes for a thread
    assert call(machine, "clone", 17) == EPERM
    assert call(machine, "clone", 0x10000000 | 17) == EPERM


def test_filter_ends_programs_that_exit_like_a_killed_one(machine: str) -> None:
    for name in ("exit", "exit_group"):
        for status in (137, 128, 137 + 256, 137 - (1 << 32) & (1 << 64) - 1):
            assert call(machine, name, status) == KILL
        for status in (0, 1, 9, 127, 136, 139, 255, 256):
            assert call(machine, name, status) == ALLOW


def test_filter_keeps_the_parent_death_signal(machine: str) -> None:
    assert call(machine, "prctl", 1) == EPERM
    assert call(machine, "prctl", 1 << 32 | 1) == EPERM  # of which the kernel reads the low half
    assert call(machine, "prctl", 15) == call(machine, "prctl", 2) == ALLOW
    assert call(machine, "prctl", 4) == call(machine, "prctl", 22) == call(machine, "prctl", 59) == EPERM


def test_filter_refuses_leases_and_watches_on_any_descriptor(machine: str) -> None:
    allowed = {*range(8), 36, 37, 38, 1030}
    for command in [*range(50), *range(1020, 1050)]:
        assert call(machine, "fcntl", 3, command) == (ALLOW if command in allowed else EPERM)
        assert call(machine, "fcntl", 3, 1 << 32 | command) == (ALLOW if command in allowed else EPERM)
    assert call(machine, "fcntl", 1024, 0) == ALLOW  # a descriptor of that number


def test_filter_decides_by_arguments(machine: str) -> None:
    assert call(machine, "flock", 3, 1) == call(machine, "flock", 3, 8) == ALLOW
    assert call(machine, "flock", 3, 2) == call(machine, "flock", 3, 2 | 4) == EPERM
    assert call(machine, "kill", 1, 15) == call(machine, "tgkill", 1, 1, 6) == call(machine, "kill", 9, 0) == ALLOW
    assert call(machine, "kill", 1, 9) == call(machine, "tgkill", 1, 1, 9) == EPERM
    assert call(machine, "socketpair", 1) == ALLOW
    assert call(machine, "socketpair", 2) == call(machine, "socketpair", 16) == EPERM
    assert call(machine, "ioctl", 0, 0x5401) == call(machine, "ioctl", 0, 0x541B) == ALLOW
    assert call(machine, "ioctl", 0, 0x5412) == call(machine, "ioctl", 0, 0x40049409) == EPERM  # TIOCSTI, FICLONE
    assert call(machine, "prlimit64", 0, 3) == ALLOW
    assert call(machine, "prlimit64", 1, 3) == EPERM
    assert call(machine, "setrlimit", 3) == ALLOW
    assert call(machine, "setrlimit", 0) == call(machine, "prlimit64", 0, 0) == EPERM  # the kernel would send SIGKILL
    assert call(machine, "setrlimit", 1 << 32) == call(machine, "prlimit64", 1 << 32, 1 << 32) == EPERM
    assert call(machine, "mmap", 0, 4096, 3, 0x22) == ALLOW
    assert call(machine, "mmap", 0, 4096, 3, 0x40022) == EPERM
    assert call(machine, "madvise", 0, 4096, 4) == ALLOW
    assert call(machine, "madvise", 0, 4096, 21) == EPERM


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
