from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from troll.rewards.sandbox.seccomp import MACHINES, REFUSED, filter_program

ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, argument: int = 0, second: int = 0, architecture: int | None = None) -> int:
    """What the filter returns, by a second reading of classic BPF."""
    architecture = MACHINES[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQQQ", number, architecture, 0, argument, second) + bytes(32)
    lines = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    place, accumulator = 0, 0
    tests = {
        0x15: lambda operand: accumulator == operand,
        0x25: lambda operand: accumulator > operand,
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
        else:
            place += if_true if tests[operation](operand) else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_refused_calls_fail_and_all_others_pass(machine: str) -> None:
    column, clone, prctl, fcntl = MACHINES[machine][1:]
    refused = {numbers[column] for numbers in REFUSED.values()}
    for number in range(451):
        if number in (clone, prctl, fcntl, 435):
            continue
        assert verdict(machine, number) == (0x00050000 | errno.EPERM if number in refused else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    clone = MACHINES[machine][2]
    thread = 0x3D0F00  # what the C library passes for a thread
    assert verdict(machine, clone, thread) == ALLOW
    assert verdict(machine, clone, 17) == 0x00050000 | errno.EPERM
    assert verdict(machine, clone, 0x10000000 | 17) == 0x00050000 | errno.EPERM
    assert verdict(machine, 435) == 0x00050000 | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_signal_that_ends_a_program_with_its_parent_stays(machine: str) -> None:
    prctl = MACHINES[machine][3]
    assert verdict(machine, prctl, 1) == 0x00050000 | errno.EPERM
    assert verdict(machine, prctl, 1 << 32 | 1) == 0x00050000 | errno.EPERM  # of which the kernel reads the low half
    assert verdict(machine, prctl, 15) == verdict(machine, prctl, 2) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_descriptor_is_no_lease_and_no_watch(machine: str) -> None:
    number = MACHINES[machine][4]
    for command in (1024, 1026, 1040):  # F_SETLEASE, F_NOTIFY, F_SETDELEG
        assert verdict(machine, number, 3, command) == 0x00050000 | errno.EPERM
        assert verdict(machine, number, 3, 1 << 32 | command) == 0x00050000 | errno.EPERM  # the kernel reads half
        assert verdict(machine, number, command, 0) == ALLOW  # a descriptor of that number
    for command in (*range(38), 1025, *range(1027, 1040)):  # all others, F_GETLEASE and F_DUPFD_CLOEXEC among them
        assert verdict(machine, number, 3, command) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_newer_calls_are_missing_and_foreign_ones_kill(machine: str) -> None:
    assert verdict(machine, 451) == 0x00050000 | errno.ENOSYS
    assert verdict(machine, 0x40000000) == KILL
    assert verdict(machine, 0x40000000 | 39) == KILL
    assert verdict(machine, 0xFFFFFFFF) == KILL
    assert verdict(machine, 39, architecture=0x40000003) == KILL  # 32-bit x86


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]} here")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    column, clone, prctl, fcntl = MACHINES[machine][1:]
    assert int(known["prctl"]) == prctl
    assert int(known["clone"]) == clone
    assert int(known["fcntl"]) == fcntl
    for name, numbers in REFUSED.items():
        assert known.get(name) == (None if numbers[column] is None else str(numbers[column])), name


def test_no_filter_for_an_unknown_machine() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")
