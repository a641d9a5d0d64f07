import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from tests.troll_sandbox.hostile import HOSTILE
from tests.troll_sandbox.processes import PARENT, only_program, running, wait_until, wait_until_gone
from troll_lab.rewards.code import CodeGrader
from troll_sandbox.errors import SandboxError
from troll_sandbox.gvisor import GVisor
from troll_sandbox.limits import MEBIBYTE, Limits
from troll_sandbox.stream_runs import run_stdio

LIMITS = Limits(cpu_seconds=0.5, idle_seconds=1, memory_bytes=256 * MEBIBYTE, output_bytes=1 << 20)

#: Programs that should print 3 for "1 2", and their reasons.
PROGRAMS = {
    "print(sum(map(int, input().split())))": "passed",
    "import sys\nprint(sum(map(int, open('/dev/stdin').read().split())))": "passed",
    "import bz2, ctypes, decimal, sqlite3, threading, zoneinfo\nprint(3 * bool(zoneinfo.ZoneInfo('UTC')))": "passed",
    "import os\nprint(os.environ.get('TROLL_SECRET', 3), *os.listdir('.'))": "passed",
    "open('own', 'w').write('x' * 1000)\nprint(len(open('own').read()) // 333)": "passed",
    "print(4)": "wrong answer",
    "1 / 0": "raised ZeroDivisionError: division by zero",
    "import sys\nsys.exit(3)": "exit status 3",
    "while True: pass": "time limit",
    "import time\ntime.sleep(100)": "idle limit",
    "x = bytearray(1 << 30)": "memory limit",
    "print('x' * (2 << 20))": "output limit",
    "while True: open('own', 'ab').write(bytes(1 << 19))": "raised OSError: [Errno 27] File too large",
    "import os\nwhile True: os.fork()": "raised PermissionError: [Errno 1] Operation not permitted",
    "import socket\nsocket.socket()": "raised PermissionError: [Errno 1] Operation not permitted",
    "open('/usr/own', 'w')": "raised PermissionError: [Errno 13] Permission denied: '/usr/own'",
    "open('$SECRET')": "raised FileNotFoundError: [Errno 2] No such file or directory: '$SECRET'",
    "import threading, time\nthreading.stack_size(1 << 16)\n"
    "while True: threading.Thread(target=time.sleep, args=(99,)).start()": "thread limit|time limit",
}

#: Attacks that `PROGRAMS` does not cover.
ATTACKS = (
    "killing all others",
    "leases and watches",
    "pipes of the process that reports",
    "disk filler",
    "memory in files without a name",
    "tracing the runner",
)


@cache
def refusal() -> str | None:
    """Why gVisor does not work here."""
    try:
        GVisor()
    except SandboxError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def sandbox() -> GVisor:
    if cause := refusal():
        pytest.skip(cause)
    return GVisor()


@pytest.fixture
def grader(sandbox: GVisor) -> Iterator[CodeGrader]:
    with closing(CodeGrader(limits=LIMITS, workers=2, sandbox="gvisor", partial_credit=True)) as grader:
        yield grader


def test_gvisor_keeps_the_limits(sandbox: GVisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROLL_SECRET", "4")
    secret = tmp_path / "secret"
    secret.write_text("secret")

    def reason(program: str) -> str:
        return run_stdio(sandbox, program.replace("$SECRET", str(secret)), ["1 2"], ["3"], LIMITS)[0].reason

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(PROGRAMS, pool.map(reason, PROGRAMS), strict=True))
    wanted = {program: text.replace("$SECRET", str(secret)).split("|") for program, text in PROGRAMS.items()}
    assert not {program: text for program, text in found.items() if text not in wanted[program]}
    folder = sandbox._folder
    assert sorted(path.name for path in folder.iterdir()) == ["proc", "root"]
    wait_until_gone(str(folder))


def test_tests_of_a_program_share_one_gvisor_sandbox(sandbox: GVisor) -> None:
    program = "a, b = map(int, input().split())\nif a == 5: open('left', 'w')\nprint(a + b)"
    outcomes = run_stdio(sandbox, program, ["1 2", "5 5", "3 4"], ["3", "9", "7"], LIMITS)
    assert [outcome.reason for outcome in outcomes] == ["passed", "wrong answer", "passed"]
    assert {outcome.cpu_seconds for outcome in outcomes} == {None}


def test_gvisor_contains_attacks(sandbox: GVisor) -> None:
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda name: run_stdio(sandbox, HOSTILE[name], ["input"], ["breach"], LIMITS)[0], ATTACKS)
    assert not [(name, outcome.reason) for name, outcome in zip(ATTACKS, outcomes, strict=True) if outcome.passed]
    wait_until_gone(str(sandbox._folder))


#: Programs whose functions are called, their scores, and whether program and tests share a process.
FUNCTIONS = (
    ("def f(x): return [2 * x]", 1.0, False),
    ("class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()", 0.0, False),
    ("def f(x):\n    while x == 'a': pass\n    return [2 * x]", 0.5, False),
    ("import os\ndef f(x): os._exit(0)", 0.0, False),
    ("def f(x): return [x + x]", 1.0, True),
    ("def f(x): return x", 0.0, True),
)


@pytest.mark.needs_bubblewrap
def test_code_grader_judges_functions_outside_gvisor(grader: CodeGrader) -> None:
    tests = {"asserts": ["assert f(2) == [4]", "assert f('a') == ['aa']"]}
    programs, scores, plain = zip(*FUNCTIONS, strict=True)
    verdicts = grader.grade(programs, tests=[json.dumps({**tests, "plain": each}) for each in plain])
    assert tuple(verdict.score for verdict in verdicts) == scores
    assert {verdict.cpu_seconds for verdict in verdicts} == {None}  # nobody could be paid for it


def test_packages_can_be_imported_but_not_changed(sandbox: GVisor, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # programs run as nobody
    (tmp_path / "given.py").write_text("three = 3\n")
    program = "import given\nprint(given.three)\nopen(given.__file__, 'w')"
    (outcome,) = run_stdio(GVisor(packages=[tmp_path]), program, [""], ["3"], LIMITS)
    assert outcome.reason.startswith("raised ") and (tmp_path / "given.py").read_text() == "three = 3\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_sandbox_ends_with_the_parent(sandbox: GVisor, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, "gvisor", "GVisor", str(1 << 20)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder = parent.stdout.readline().strip()
        wait_until(lambda: any(b"boot" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running(folder)))
        os.kill(parent.pid, number)
        parent.communicate(timeout=20)  # the program has 50 s
    wait_until_gone(folder)
    assert Path(folder).exists() == (number == signal.SIGKILL)
    subprocess.run(["rm", "-rf", folder], check=True)


def test_gvisor_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt install runsc"):
        CodeGrader(sandbox="gvisor", workers=1)
    (tmp_path / "runsc").touch(0o755)
    with pytest.raises(SandboxError, match="install util-linux"):
        GVisor()
    only_program(tmp_path, "runsc", "echo 'cannot set up namespaces' >&2; exit 128", monkeypatch)
    with pytest.raises(SandboxError, match=r"does not start \(cannot set up namespaces\): see docs/sandbox.md"):
        GVisor()
