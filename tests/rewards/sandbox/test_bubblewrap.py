from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rewards.sandbox.hostile import HOSTILE
from tests.rewards.sandbox.processes import needs_bubblewrap, running, wait_until_gone
from troll.rewards.sandbox import bubblewrap
from troll.rewards.sandbox.bubblewrap import Sandbox, SandboxError
from troll.rewards.sandbox.limits import Limits
from troll.rewards.sandbox.stdio import run_stdio

pytestmark = needs_bubblewrap

LIMITS = Limits(cpu_seconds=1, wall_seconds=30, idle_seconds=1)

#: Runs a program that sleeps, in a process that a signal will end.
PARENT = """
import signal, sys, warnings
from troll.rewards.sandbox.bubblewrap import Sandbox
from troll.rewards.sandbox.limits import Limits
from troll.rewards.sandbox.stdio import run_stdio
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
limits = Limits(idle_seconds=50, output_bytes=int(sys.argv[1]))
run_stdio(Sandbox(run_without_isolation=sys.argv[2] == "True"), "import time\\ntime.sleep(100)", [""], [""], limits)
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


@pytest.fixture
def open_sandbox() -> Sandbox:
    with pytest.warns(RuntimeWarning, match="as your user"):
        return Sandbox(run_without_isolation=True)


def fake_bwrap(folder: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_without_bubblewrap_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        Sandbox()


def test_where_namespaces_are_forbidden_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bwrap(tmp_path, "bwrap: setting up uid map: Permission denied", monkeypatch)
    with pytest.raises(SandboxError, match=r"uid map: Permission denied\): namespaces may be forbidden.*docs/sandbox"):
        Sandbox()


def test_an_old_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bwrap(tmp_path, "bwrap: Unknown option --size", monkeypatch)
    with pytest.raises(SandboxError, match=r"0\.7 or later"):
        Sandbox()


def test_a_bubblewrap_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(bubblewrap, "TRIAL_SECONDS", 0.2)
    with pytest.raises(SandboxError, match="did not start"):
        Sandbox()


def test_where_sigchld_is_ignored_it_says_so(sandbox: Sandbox) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SandboxError, match="SIGCHLD is ignored"):
            Sandbox()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_sandbox_that_somebody_else_has_reaped_ends_all_the_same(sandbox: Sandbox) -> None:
    process = sandbox.start("ready", limits=LIMITS, stdin=None, stdout=None)
    os.waitid(os.P_PID, process.pid, os.WEXITED)
    assert process.end() == 0.0
    assert process.returncode == 255


def test_what_runs_inside_is_in_the_group_that_is_killed(sandbox: Sandbox) -> None:
    read, write = os.pipe()
    process = sandbox.start("stdio", limits=LIMITS, stdin=read, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1) == b"+"
    (inside,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    assert os.getpgid(inside) == process.pid
    process.end()
    process.stdout.close()
    os.close(read)
    os.close(write)


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="riscv64"):
        Sandbox()


def test_packages_can_be_imported_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text("three = 3\n")
    program = "import given\nprint(given.three)\nopen(given.__file__, 'w')"
    (outcome,) = run_stdio(Sandbox(packages=[tmp_path]), program, [""], ["3"], LIMITS)
    assert outcome.reason.startswith("raised OSError: [Errno 30] Read-only file system")
    assert (tmp_path / "given.py").read_text() == "three = 3\n"
    with pytest.raises(SandboxError, match="not a folder"):
        Sandbox(packages=[tmp_path / "given.py"])


def test_no_descriptor_of_the_user_gets_in(sandbox: Sandbox) -> None:
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
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(600)]
    for file in files:
        os.set_inheritable(file, True)
    try:
        outcomes = run_stdio(sandbox, program, ["", ""], ["[0, 1, 2]"] * 2, LIMITS)
    finally:
        for file in files:
            os.close(file)
    assert [outcome.reason for outcome in outcomes] == ["passed", "passed"]


def test_the_root_shows_nothing_of_the_user(sandbox: Sandbox) -> None:
    program = """
import os
print(sorted(set(os.listdir("/")) - {"root", "home", "opt", "work", "lib32", "libx32", "lib64", "libexec"}))
print(os.listdir("."), sorted(os.listdir("/dev")), os.getuid(), os.getcwd(), os.uname().nodename)
"""
    expected = "['dev', 'etc', 'inside', 'lib', 'tmp', 'usr']\n[] ['null', 'urandom', 'zero'] 65534 /tmp sandbox"
    (outcome,) = run_stdio(sandbox, program, [""], [expected], LIMITS)
    assert outcome.reason == "passed"


def run_in_worker(results: multiprocessing.Queue[list[str]]) -> None:
    outcomes = run_stdio(Sandbox(), "print(3)", ["", ""], ["3", "3"], LIMITS)
    results.put([outcome.reason for outcome in outcomes])


def test_it_works_in_a_daemonic_worker() -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[list[str]] = context.Queue()
    worker = context.Process(target=run_in_worker, args=(results,), daemon=True)
    worker.start()
    assert results.get(timeout=60) == ["passed", "passed"]
    worker.join()


@pytest.mark.parametrize("without_isolation", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_parent(number: signal.Signals, without_isolation: bool, tmp_path: Path) -> None:
    mark = 3_000_000 + os.getpid() % 100_000 * 10 + without_isolation * 2 + (number == signal.SIGINT)
    command = [sys.executable, "-c", PARENT, str(mark), str(without_isolation)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, env=environment)
    end = time.monotonic() + 60
    while len(running(f",{mark},")) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert running(f",{mark},")
    os.killpg(parent.pid, number)
    _, errors = parent.communicate(timeout=30)
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_until_gone(f",{mark},")


def test_without_isolation_programs_run_under_the_same_limits(open_sandbox: Sandbox) -> None:
    def reason(program: str) -> str:
        return run_stdio(open_sandbox, program, ["1"], ["3"], LIMITS)[0].reason

    assert reason("print(2 + int(input()))") == "passed"
    assert reason("while True: pass") == "time limit"
    assert reason("import time\ntime.sleep(100)") == "idle limit"
    assert reason("x = bytearray(1 << 40)") == "memory limit"
    assert reason("import os\nos.fork()").startswith("raised PermissionError")
    assert reason("import os\nprint(3 + len(os.environ.get('TROLL_SECRET', '')))") == "passed"


def test_without_isolation_no_folder_is_left(open_sandbox: Sandbox) -> None:
    folder = Path(open_sandbox._folder.name)
    run_stdio(open_sandbox, "open('file', 'w')\nprint(3)", ["", ""], ["3", "3"], LIMITS)
    assert list(folder.iterdir()) == []
    del open_sandbox
    gc.collect()


@pytest.mark.parametrize("name", ["reading files", "symbolic links"])
def test_the_attacks_get_through_where_nothing_isolates(open_sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    source = HOSTILE[name].replace("$SECRET", str(tmp_path / "secret"))
    assert run_stdio(open_sandbox, source, [""], ["breach"], LIMITS)[0].passed
