from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.troll_sandbox.processes import needs_bubblewrap
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests, StreamTests
from troll_sandbox.control_groups import MemoryGroup, MemoryGroups, groups_folder, remove
from troll_sandbox.limits import MEBIBYTE, Limits, Outcome
from troll_sandbox.local import LocalSandbox

GROUPS = groups_folder()

needs_groups = pytest.mark.skipif(GROUPS is None, reason="this user may make no control groups with a bound on memory")

#: Holds memory until its input ends.
HOLD = "import sys\nheld = b'x' * (int(sys.argv[1]) << 20)\nprint(len(held), flush=True)\nsys.stdin.read()"


@needs_groups
def test_processes_that_are_together_beyond_the_bound_are_ended() -> None:
    assert GROUPS is not None
    group = MemoryGroup(GROUPS, 128 * MEBIBYTE)
    command = [sys.executable, "-I", "-S", "-c", "import sys\nsys.stdin.readline()\n" + HOLD, "60"]
    pipe = subprocess.PIPE
    beside, *held = (subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4))
    try:
        assert all(group.add(process.pid) for process in held)
        assert not group.is_exceeded()
        for process in (*held, beside):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
        assert group.is_exceeded()
        for process in (*held, beside):
            process.communicate()
        assert -signal.SIGKILL in [process.returncode for process in held]
        assert beside.returncode == 0
    finally:
        for process in (*held, beside):
            process.kill()
            process.wait()
        remove([group.path])
    assert not group.path.exists()


@needs_groups
def test_a_group_is_used_again_once_it_is_emptied() -> None:
    assert GROUPS is not None
    groups = MemoryGroups(GROUPS)
    first = groups.take(64 * MEBIBYTE)
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", HOLD, "100"], stdin=-1, stdout=-1) as held:
        assert first.add(held.pid)
        assert held.wait(60) == -signal.SIGKILL and first.is_exceeded()
    with subprocess.Popen(["sleep", "60"]) as left:
        assert first.add(left.pid) and not first.is_exceeded()
        groups.give_back(first)
        second = groups.take(64 * MEBIBYTE)
        assert second.path != first.path  # one of its processes is still there
        left.kill()
    groups.give_back(second)
    found = groups.take(64 * MEBIBYTE)
    assert found.path in (first.path, second.path)
    groups.give_back(found)
    third = groups.take(65 * MEBIBYTE)
    assert third.path.exists() and not (first.path.exists() or second.path.exists())
    groups.give_back(third)
    del groups
    assert not third.path.exists()


def test_a_folder_that_another_has_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"troll-{os.getpid()}-{number}" for number in (3, 4)]
    (tmp_path / names[0]).mkdir()  # with the bound of whoever made it
    monkeypatch.setattr("troll_sandbox.control_groups._numbers", itertools.count(3))
    assert MemoryGroup(tmp_path, 1).path == tmp_path / names[1]


def test_groups_that_come_back_while_they_are_removed_are_removed(tmp_path: Path) -> None:
    """Threads that a process does not wait for may do that when it ends."""
    groups = [tmp_path / "first"]
    for name in ("first", "second"):
        (tmp_path / name / "process").mkdir(parents=True)

    def empty() -> None:
        time.sleep(0.05)
        groups.append(tmp_path / "second")
        for path in groups:
            (path / "process").rmdir()

    thread = threading.Thread(target=empty)
    thread.start()
    remove(groups, 60)
    thread.join()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sandbox() -> Iterator[LocalSandbox]:
    programs = Bubblewrap()
    programs.own_bytes = -400 * MEBIBYTE  # so that the limit on a process is not the first that is passed
    with closing(LocalSandbox(programs, programs)) as local:
        yield local


@needs_bubblewrap
@needs_groups
def test_a_sandbox_beyond_its_bound_is_ended_and_its_neighbours_are_not(sandbox: LocalSandbox) -> None:
    large = "x = b'x' * (300 << 20)\nprint(len(x) >> 20)\ndef f(): return 3"
    small = "x = b'x' * (30 << 20)\nprint(300)\ndef f(): return 3"
    stream = StreamTests(("", ""), ("300\n", "300\n"))
    calls = [CodeTests(("assert f() == 3",), "", ("f",), (), (), plain) for plain in (False, True)]
    jobs = [(program, tests) for tests in (stream, *calls) for program in (large, small)]

    def outcomes(job: tuple[str, StreamTests | CodeTests]) -> list[Outcome]:
        return sandbox(*job, limits=Limits(), stop_at_failure=False)

    with ThreadPoolExecutor(2) as pool:
        found = [{outcome.reason for outcome in each} for each in pool.map(outcomes, jobs)]
    assert found == [{"memory limit"}, {"passed"}] * 3
    assert GROUPS is not None
    left = list(GROUPS.glob(f"troll-{os.getpid()}-*"))
    assert left
    remove(left, 60)  # on a very busy machine, processes may end late
    assert not any(path.exists() for path in left)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system with control groups that look as if they worked."""
    (tmp_path / "proc/self").mkdir(parents=True)
    monkeypatch.setattr("troll_sandbox.control_groups._works", Path.is_dir)
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("4:memory:/a/b\n3:cpuset:/\n0::/", "memory/a/b"),
        ("0::/a/b", "a"),
        ("0::/", ""),
        ("1:cpu:/", None),
        ("0::/not/there/at/all", None),
    ],
)
def test_where_groups_are_made(root: Path, lines: str, folder: str | None) -> None:
    groups = root / "sys/fs/cgroup"
    for name in ("memory/a/b", "a/b"):
        (groups / name).mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    assert groups_folder(root) == (None if folder is None else groups / folder)


def test_groups_that_nobody_owns_are_removed(root: Path) -> None:
    groups = root / "sys/fs/cgroup"
    for name in ("troll-17-3", "troll-18-0", "other-17"):
        (groups / name).mkdir(parents=True)
    (root / "proc/18").mkdir()
    (root / "proc/self/cgroup").write_text("0::/")
    groups_folder(root)
    assert {path.name for path in groups.iterdir()} == {"troll-18-0", "other-17"}


@needs_groups
def test_what_a_killed_parent_has_left_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GROUPS is not None
    with subprocess.Popen(["sleep", "60"]) as left, subprocess.Popen(["true"]) as gone:
        gone.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: gone.pid)
            group = MemoryGroup(GROUPS, 128 * MEBIBYTE)
        assert group.add(left.pid)
        assert groups_folder() == GROUPS
        assert left.wait(10) == -signal.SIGKILL
    assert not group.path.exists()


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path / "missing", MEBIBYTE)
    assert not group.add(os.getpid()) and not group.is_exceeded()
    remove([group.path])
    assert groups_folder(tmp_path) is None
