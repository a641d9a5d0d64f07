import os

import pytest

from troll_lab.rewards import machine
from troll_lab.rewards.code import default_workers
from troll_lab.rewards.machine import cores, local_ranks, memory_limit
from troll_sandbox.limits import MEBIBYTE, Limits

GIBIBYTE = 1024 * MEBIBYTE
NO_LIMIT = str(2**63 - 4096)


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


@pytest.mark.parametrize(
    ("groups", "files", "gibibytes"),
    [
        ("0::/\n", {}, 64),
        ("0::/pod/one\n", {"pod/memory.max": f"{4 * GIBIBYTE}\n", "pod/one/memory.max": "max\n"}, 4),
        # A container that sees its own group as the root of the file system, under its path on the host.
        ("5:cpu:/\n4:memory:/docker/abc\n0::/\n", {"memory/memory.limit_in_bytes": f"{3 * GIBIBYTE}\n"}, 3),
        (
            "4:memory,hugetlb:/a\n",
            {"memory/memory.limit_in_bytes": NO_LIMIT, "memory/a/memory.limit_in_bytes": f"{2 * GIBIBYTE}"},
            2,
        ),
    ],
)
def test_memory_limit_is_the_smallest(tmp_path, groups, files, gibibytes):
    assert memory_limit(system(tmp_path, groups, files)) == gibibytes * GIBIBYTE


def test_memory_limit_may_be_unknown(tmp_path):
    assert memory_limit(system(tmp_path / "nothing", meminfo=False)) is None
    assert memory_limit(tmp_path / "missing") is None
    memory = memory_limit(machine.Path("/"))
    assert memory is not None and memory > 64 * MEBIBYTE


FIRST = {"cpu/a/cpu.cfs_quota_us": "600000\n", "cpu/a/cpu.cfs_period_us": "200000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/pod\n", {"pod/cpu.max": "max 100000\n"}, 16),
        ("0::/pod/one\n", {"pod/cpu.max": "450000 100000\n", "pod/one/cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("3:cpu,cpuacct:/a\n", FIRST, 3),
        ("3:cpu:/a\n", FIRST | {"cpu/a/cpu.cfs_quota_us": "-1\n"}, 16),
    ],
)
def test_cores_are_bounded_by_a_quota_of_cpu_time(tmp_path, monkeypatch, groups, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert cores(system(tmp_path, groups, files)) == expected


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
def test_local_ranks_reads_the_launcher(environment, expected):
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
def test_default_workers_fit_cores_and_memory(monkeypatch, number, memory, ranks, expected):
    monkeypatch.setattr(machine, "cores", lambda root: number)
    monkeypatch.setattr(machine, "memory_limit", lambda root: memory)
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", ranks)
    assert default_workers(Limits(memory_bytes=512 * MEBIBYTE, disk_bytes=16 * MEBIBYTE)) == expected
