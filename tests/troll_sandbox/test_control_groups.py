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

from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests, StreamTests
from troll_sandbox.control_groups import MemoryGroup, MemoryGroups, groups_folder, remove
from troll_sandbox.limits import MEBIBYTE, Limits, Outcome
from troll_sandbox.local import LocalSandbox

#: Holds memory until its input ends.
HOLD = "import sys\nheld = b'x' * (int(sys.argv[1]) << 20)\nprint(len(held), flush=True)\nsys.stdin.read()"


@pytest.fixture
def place() -> Path:
    if (folder := groups_folder()) is None:
        pytest.skip("this user cannot make control groups with a bound on memory")
    return folder


def test_group_bounds_the_memory_of_all_its_processes(place: Path) -> None:
    group = MemoryGroup(place, 128 * MEBIBYTE)
    command = [sys.executable, "-I", "-S", "-c", "import sys\nsys.stdin.readline()\n" + HOLD, "60"]
    pipe = subprocess.PIPE
    outside, *held = (subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4))
    try:
        assert all(group.add(process.pid) for process in held)
        assert not group.is_exceeded()
        for process in (*held, outside):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
        assert group.is_exceeded()
        for process in (*held, outside):
            process.communicate()
        assert -signal.SIGKILL in [process.returncode for process in held]
        assert outside.returncode == 0
    finally:
        for process in (*held, outside):
            process.kill()
            process.wait()
        remove([group.path])
    assert not group.path.exists()


def test_take_returns_a_group_again_once_it_is_empty(place: Path) -> None:
    groups = MemoryGroups(place)
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


def test_group_does_not_use_an_existing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"troll-{os.getpid()}-{number}" for number in (3, 4)]
    (tmp_path / names[0]).mkdir()  # it may have another bound
    monkeypatch.setattr("troll_sandbox.control_groups._numbers", itertools.count(3))
    assert MemoryGroup(tmp_path, 1).path == tmp_path / names[1]


def test_remove_includes_groups_given_back_meanwhile(tmp_path: Path) -> None:
    """Daemon threads may give groups back while the process ends."""
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
    programs.own_bytes = -400 * MEBIBYTE  # so that the bound on the sandbox is reached before the limit on a process
    with closing(LocalSandbox(programs, programs)) as local:
        yield local


@pytest.mark.needs_bubblewrap
def test_sandbox_beyond_its_bound_is_killed_alone(place: Path, sandbox: LocalSandbox) -> None:
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
    left = list(place.glob(f"troll-{os.getpid()}-*"))
    assert left
    remove(left, 60)  # on a very busy machine, processes may end late
    assert not any(path.exists() for path in left)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system in which every existing control group seems to work."""
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
def test_groups_folder_finds_the_folder_for_groups(root: Path, lines: str, folder: str | None) -> None:
    groups = root / "sys/fs/cgroup"
    for name in ("memory/a/b", "a/b"):
        (groups / name).mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    assert groups_folder(root) == (None if folder is None else groups / folder)


def test_groups_folder_removes_groups_without_owner(root: Path) -> None:
    groups = root / "sys/fs/cgroup"
    for name in ("troll-17-3", "troll-18-0", "other-17"):
        (groups / name).mkdir(parents=True)
    (root / "proc/18").mkdir()
    (root / "proc/self/cgroup").write_text("0::/")
    groups_folder(root)
    assert {path.name for path in groups.iterdir()} == {"troll-18-0", "other-17"}


def test_groups_folder_kills_what_a_parent_has_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as left, subprocess.Popen(["true"]) as gone:
        gone.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: gone.pid)
            group = MemoryGroup(place, 128 * MEBIBYTE)
        assert group.add(left.pid)
        assert groups_folder() == place
        assert left.wait(10) == -signal.SIGKILL
    assert not group.path.exists()


def test_group_has_no_effect_if_it_cannot_be_made(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path / "missing", MEBIBYTE)
    assert not group.add(os.getpid()) and not group.is_exceeded()
    remove([group.path])
    assert groups_folder(tmp_path) is None
