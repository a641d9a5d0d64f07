import os

import pytest

from troll_lab.rewards import machine
from troll_lab.rewards.code import default_workers
from troll_lab.rewards.machine import cores, local_ranks, memory_limit
from troll_sandbox.limits import MEBIBYTE, Limits

GIBIBYTE = 1024 * MEBIBYTE


def system(root, groups="", files=(), meminfo=True):
    """A file system with what is read of it; `files` are contents by their paths below the control groups."""
    (root / "proc/self").mkdir(parents=True)
    if meminfo:
        (root / "proc/meminfo").write_text(f"MemTotal:       {64 * 1024 * 1024} kB\nMemFree:  1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for path, content in dict(files).items():
        place = root / "sys/fs/cgroup" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return root


def test_the_smallest_limit_of_the_control_groups_counts(tmp_path):
    limits = {"pod/memory.max": f"{4 * GIBIBYTE}\n", "pod/container/memory.max": "max\n"}
    second = system(tmp_path / "second", "0::/pod/container\n", limits)
    assert memory_limit(second) == 4 * GIBIBYTE
    # A container that sees its own group as the root of the file system, under its path on the host.
    limits = {"memory/memory.limit_in_bytes": f"{3 * GIBIBYTE}\n"}
    inside = system(tmp_path / "inside", "5:cpu:/\n4:memory:/docker/abc\n0::/\n", limits)
    assert memory_limit(inside) == 3 * GIBIBYTE
    limits = {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/a/memory.limit_in_bytes": f"{2 * GIBIBYTE}"}
    first = system(tmp_path / "first", "4:memory,hugetlb:/a\n", limits)
    assert memory_limit(first) == 2 * GIBIBYTE


def test_without_control_groups_the_machine_counts(tmp_path):
    assert memory_limit(system(tmp_path / "plain", "0::/\n")) == 64 * GIBIBYTE
    assert memory_limit(system(tmp_path / "nothing", meminfo=False)) is None
    assert memory_limit(tmp_path / "missing") is None


def test_a_quota_of_cpu_time_counts_as_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def quota(name, groups, files=()):
        return cores(system(tmp_path / name, groups, files))

    assert quota("none", "0::/\n") == 16
    assert quota("unlimited", "0::/pod\n", {"pod/cpu.max": "max 100000\n"}) == 16
    files = {"pod/cpu.max": "450000 100000\n", "pod/one/cpu.max": "max 100000\n"}
    assert quota("second", "0::/pod/one\n", files) == 4
    assert quota("half", "0::/\n", {"cpu.max": "50000 100000\n"}) == 1
    files = {"cpu/a/cpu.cfs_quota_us": "600000\n", "cpu/a/cpu.cfs_period_us": "200000\n"}
    assert quota("first", "3:cpu,cpuacct:/a\n", files) == 3
    assert quota("no quota", "3:cpu:/a\n", files | {"cpu/a/cpu.cfs_quota_us": "-1\n"}) == 16


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
    ],
)
def test_ranks_on_this_machine(environment, expected):
    assert local_ranks(environment) == expected


@pytest.mark.parametrize(
    ("number", "memory", "ranks", "expected"),
    [
        (16, None, "", 16),
        (16, 64 * GIBIBYTE, "", 16),
        (16, 64 * GIBIBYTE, "8", 2),
        (2, 64 * GIBIBYTE, "8", 1),
        # A program with its judge may use 1.5 GiB, and its files 16 MiB.
        (16, 5 * GIBIBYTE, "", 3),
        (16, 5 * GIBIBYTE, "2", 1),
        (16, GIBIBYTE, "", 1),
    ],
)
def test_as_many_programs_as_cores_and_memory_carry(monkeypatch, number, memory, ranks, expected):
    monkeypatch.setattr(machine, "cores", lambda root: number)
    monkeypatch.setattr(machine, "memory_limit", lambda root: memory)
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", ranks)
    assert default_workers(Limits(memory_bytes=512 * MEBIBYTE, disk_bytes=16 * MEBIBYTE)) == expected


def test_this_machine():
    assert 1 <= default_workers(Limits()) <= len(os.sched_getaffinity(0))
    memory = memory_limit(machine.Path("/"))
    assert memory is not None and memory > 64 * MEBIBYTE
