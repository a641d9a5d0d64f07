import contextlib
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest

from tests.troll_sandbox.processes import reason, running, tried_again
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests, StreamTests
from troll_sandbox.errors import SandboxError
from troll_sandbox.limits import MEBIBYTE, PASSED, Limits
from troll_sandbox.stream_runs import run_stdio

pytestmark = pytest.mark.needs_bubblewrap

LIMITS = Limits(cpu_seconds=1, wall_seconds=30, idle_seconds=1)
SIXTEEN = "0123456789abcde\n"
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def test_run_stdio_returns_an_outcome_per_test(sandbox: Bubblewrap) -> None:
    inputs, outputs = ["1 2\n", "2 2\n", "x\n", "5 6"], ["3\n", "5", "", "11"]
    reasons = [outcome.reason for outcome in run_stdio(sandbox, ADD, inputs, outputs, LIMITS)]
    error = "raised ValueError: invalid literal for int() with base 10: 'x'"
    assert reasons == ["passed", "wrong answer", error, "passed"]
    stopped = run_stdio(sandbox, ADD, inputs, outputs, LIMITS, stop_at_failure=True)
    assert [outcome.reason for outcome in stopped] == ["passed", "wrong answer", "not run", "not run"]


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("print(3)", "passed"),
        ("print(3)\nexit()", "passed"),
        ("print(3)\nquit(0)", "passed"),
        ("import os\nos.write(1, b'3')\nos._exit(0)", "passed"),
        ("print(3, end='')\nimport sys\nsys.exit()", "passed"),
        ("import atexit\natexit.register(print, 3)", "passed"),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print(3))).start()", "passed"),
        ("if __name__ == '__main__':\n    print(3)", "passed"),
        ("import sys\nprint(3)\nprint('noise', file=sys.stderr)", "passed"),
        ("import __main__\nx = 3\nprint(__main__.x)", "passed"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 3\nprint(A().x)", "passed"),
        ("file = open(1, 'w', closefd=False)\nfile.write('3')", "passed"),
        ("import io, sys\nprint(3)\nsys.stdout = io.StringIO()", "passed"),
        ("import os, sys\nsys.stdout = os.fdopen(1, 'w', 100)\nprint(3)", "passed"),
        ("import sys\nsys.stdout.close()\nprint(3)", "raised ValueError: I/O operation on closed file."),
        ("print(3)\nexit(3)", "exit status 3"),
        ("print(3)\nexit('sorry')", "raised sorry"),
        ("print(3)\nimport os\nos._exit(7)", "exit status 7"),
        ("print(3)\nraise ValueError('no')", "raised ValueError: no"),
        ("print(4)", "wrong answer"),
        ("print(3", "raised SyntaxError: '(' was never closed"),
    ],
)
def test_run_stdio_reports_how_a_program_ends(sandbox: Bubblewrap, program: str, wanted: str) -> None:
    assert reason(sandbox, program, limits=LIMITS) == wanted


QUIET = "try:\n    print('x' * 2000, flush=True)\nexcept OSError:\n    import os\n    os._exit(0)"
FILE = "open('file', 'wb').write(bytes(3 << 20))\nprint(3)"
MEMORY = "x = bytearray(200 << 20)\nprint(3)"
CPU = "import time\nwhile time.process_time() < 0.4: pass\nprint(3)"
TO_ITS_GROUP = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(0, signal.SIGTERM)
print(3 * (os.getpgrp() == os.getpid()))
"""


@pytest.mark.parametrize(
    ("program", "limits", "wanted"),
    [
        ("print(' ' * 990, 3)", {"output_bytes": 1000}, "passed"),
        ("print(' ' * 2000, 3)", {"output_bytes": 1000}, "output limit"),
        (QUIET, {"output_bytes": 1000}, "output limit"),
        (MEMORY, {"memory_bytes": 128 * MEBIBYTE}, "memory limit"),
        (MEMORY, {"memory_bytes": 256 * MEBIBYTE}, "passed"),
        (FILE, {"disk_bytes": 2 * MEBIBYTE}, "raised OSError: [Errno 28] No space left on device"),
        (FILE, {"disk_bytes": 8 * MEBIBYTE}, "passed"),
        (CPU, {"cpu_seconds": 0.2}, "time limit"),
        (CPU, {"cpu_seconds": 0.8}, "passed"),
        ("import time\nwhile True: time.sleep(0.1)", {"wall_seconds": 1, "idle_seconds": 100}, "wall limit"),
        (TO_ITS_GROUP, {"wall_seconds": 2}, "passed"),
    ],
)
def test_run_stdio_keeps_each_limit(sandbox: Bubblewrap, program: str, limits: dict[str, float], wanted: str) -> None:
    assert reason(sandbox, program, limits=Limits(**limits)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "text", "expected", "wanted"),
    [
        ("print(int(input()) + 1)", "7" * 5000, "7" * 4999 + "8", "passed"),
        (f"print({'7' * 5000} % 10 - 4, len(str(1 << 99999)))", "", "3 30103", "passed"),
        ("import sys\nsys.stdout.write(sys.stdin.read())", SIXTEEN * (3 << 16), SIXTEEN * (3 << 16), "passed"),
        ("#" * (5 << 20) + "\nprint(3)", "", "3", "passed"),
        ("print(3)", "\ud800", "3", "passed"),
        ("print(input())", "\ud800", "\ud800", "passed"),
        ("print(input())", "\ud800", "\ud801", "wrong answer"),
        ("import os\nos.write(1, b'\\xff')", "", "\ufffd", "wrong answer"),
        ("print(input())", "Ünï\n", "Ünï", "passed"),
    ],
    ids=["digits", "digits in the source", "megabytes", "long source", *["characters"] * 5],
)
def test_run_stdio_takes_any_text(sandbox: Bubblewrap, program: str, text: str, expected: str, wanted: str) -> None:
    assert reason(sandbox, program, text, expected, LIMITS) == wanted


DEPTH = """
import sys
from functools import lru_cache
sys.setrecursionlimit(10**6)
class Caller:
    def __call__(self, n): return n and 1 + self(n - 1)
@lru_cache(None)
def cached(n): return n and 1 + cached(n - 1)
print(Caller()(100_000) + cached(100_000) + max(map(lambda n: Caller()(n), [100_000])))
"""


def test_recursion_is_bounded_only_by_memory(sandbox: Bubblewrap) -> None:
    assert reason(sandbox, DEPTH, expected="300000") == "passed"
    unasked = "def f(n): return n and 1 + f(n - 1)\nprint(f(20_000))"
    assert reason(sandbox, unasked, expected="20000") == "passed"
    caught = "def f(n): return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError:\n    print(3)"
    assert reason(sandbox, caught) == "passed"


def test_output_limit_leaves_room_for_what_is_expected(sandbox: Bubblewrap) -> None:
    program = "n = int(input())\nfor _ in range(3000): print('abc', ' ' * n)"
    first, second = run_stdio(sandbox, program, ["5", "5000"], ["abc\n" * 3000] * 2, Limits(output_bytes=1000))
    assert first.passed
    assert second.reason in ("output limit", "raised OSError: [Errno 27] File too large")


@pytest.mark.parametrize("size", ["2**27", "2**31", "10**8"])
def test_only_used_stack_counts_as_memory(sandbox: Bubblewrap, size: str) -> None:
    program = f"""
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size({size})
def depth(n): return 1 + max(map(depth, [n - 1])) if n else 0
thread = threading.Thread(target=lambda: print(depth(20_000) // 20_000 + 2))
thread.start()
held = bytearray(200 << 20)
thread.join()
assert threading.stack_size() == {size}
"""
    assert reason(sandbox, program) == "passed"


def test_thread_stacks_leave_the_memory_to_the_program(sandbox: Bubblewrap) -> None:
    program = """
import threading, time
def start(count):
    threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(count)]
    [thread.start() for thread in threads]
    return threads
threading.stack_size(2**29)
threads = start(2)
threading.stack_size(0)
threads += start(50)
held = bytearray(b"x") * (200 << 20)
[thread.join() for thread in threads]
print(3)
"""
    assert reason(sandbox, program) == "passed"


#: Raises the bound on address space by all that is for stacks.
GREEDY = "import mmap, resource\nmost = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
GREEDY += "resource.setrlimit(resource.RLIMIT_AS, (most, most))\nif input() == '1':\n"


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        "    held = []\n    while True: held.append(bytearray(b'x') * (1 << 24))",
        "    held = mmap.mmap(-1, 900 << 20)\n    held[:] = bytes(1) * len(held)\n    while True: pass",
    ],
)
def test_stack_memory_counts_once_it_is_touched(monkeypatch: pytest.MonkeyPatch, groups: bool, program: str) -> None:
    if not groups:
        monkeypatch.setattr("troll_sandbox.launch.groups_folder", lambda: None)
    outcomes = run_stdio(Bubblewrap(), f"{GREEDY}{program}\nprint(3)", ["1", "2"], ["3"] * 2, Limits())
    assert [outcome.reason for outcome in outcomes] == ["memory limit", "passed"]


@pytest.mark.parametrize(
    ("program", "inputs", "wanted"),
    [
        ("import os\nprint(3 + len(os.listdir('.')))\nopen('left', 'w')\nos.mkdir('folder')", "012", ["passed"] * 3),
        ("import time\nif input() == '1': time.sleep(100)\nprint(3)", "013", ["passed", "idle limit", "not run"]),
        ("if input() == '1':\n    while True: pass\nprint(3)", "013", ["passed", "time limit", "not run"]),
        ("import os\nif input() == '1': os.abort()\nprint(3)", "012", ["passed", "killed by signal 6", "passed"]),
    ],
    ids=["files", "idle", "time", "crash"],
)
def test_run_stdio_after_a_test(sandbox: Bubblewrap, program: str, inputs: str, wanted: list[str]) -> None:
    outcomes = run_stdio(sandbox, program, [*inputs], ["3"] * 3, LIMITS)
    assert [outcome.reason for outcome in outcomes] == wanted


def test_run_stdio_is_deterministic(sandbox: Bubblewrap) -> None:
    program = "print(hash('a'), sorted({'a', 'b', 'c'}) == list({'a', 'b', 'c'}))"
    first = run_stdio(sandbox, program + "\n1 / 0", [""], [""], LIMITS)
    assert first == run_stdio(sandbox, program + "\n1 / 0", [""], [""], LIMITS)


def test_run_stdio_in_many_threads_leaves_no_descriptor(sandbox: Bubblewrap) -> None:
    def one(number: int) -> bool:
        return run_stdio(sandbox, ADD, [f"{number} 1"], [str(number + 1)], LIMITS)[0].passed

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(8)))
        before = len(os.listdir("/proc/self/fd"))
        assert all(pool.map(one, range(50)))
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(3)", StreamTests(("",), ("3",))),
        ("def f(): return 1", CodeTests(("assert f() == 1",), "", ("f",), (), ())),
    ],
    ids=["by standard input", "by calls"],
)
def test_executor_tries_again_if_a_sandbox_does_not_start(sandbox, monkeypatch, program, tests):
    programs, fails = Bubblewrap(), ["/bin/false"]
    monkeypatch.setattr("troll_sandbox.executor.FIRST_PAUSE", 0.01)
    commands = chain([fails, fails, programs.command()], repeat(fails))
    monkeypatch.setattr(programs, "command", lambda: next(commands))
    assert tried_again(programs, program, tests, judges=sandbox) == [PASSED]
    assert isinstance(tried_again(programs, program, tests, Limits(wall_seconds=0.5), sandbox), SandboxError)


def test_standard_input_can_be_opened_by_name(sandbox: Bubblewrap) -> None:
    program = "print(open('/dev/stdin').read() == input() == 'x' * 100_000)"
    assert run_stdio(sandbox, program, ["x" * 100_000, "y"], ["True", "False"], LIMITS) == [PASSED] * 2


def test_run_stdio_measures_the_cpu_time_of_each_test(sandbox: Bubblewrap) -> None:
    program = """
import threading, time
def work():
    while time.process_time() < seconds: pass
seconds = float(input())
thread = threading.Thread(target=work)
thread.start()
thread.join()
time.sleep(0.2)
print(3)
"""
    inputs = ["0.3", "0", "0.2", "0.1"]
    outcomes = run_stdio(sandbox, program, inputs, ["3", "3", "4", "3"], LIMITS, stop_at_failure=True)
    assert [outcome.reason for outcome in outcomes] == ["passed", "passed", "wrong answer", "not run"]
    *measured, missing = [outcome.cpu_seconds for outcome in outcomes]
    assert missing is None
    for text, seconds in zip(inputs, measured, strict=False):
        assert seconds is not None and float(text) <= seconds < float(text) + 0.15  # neither the sleep nor other tests


@pytest.mark.parametrize("tidy", [True, False])
def test_all_tests_of_a_program_share_the_wall_time(sandbox: Bubblewrap, tidy: bool) -> None:
    program = "import time\ntime.sleep(0.5)\nprint(3)" + ("" if tidy else "\nopen('left', 'w')")
    start = time.monotonic()
    outcomes = run_stdio(sandbox, program, [""] * 20, ["3"] * 20, Limits(wall_seconds=2))
    reasons = [outcome.reason for outcome in outcomes]
    passed = reasons.count("passed")
    assert 1 <= passed <= 4
    assert reasons == ["passed"] * passed + ["wall limit"] + ["not run"] * (19 - passed)
    assert time.monotonic() - start < 10


def test_random_kills_cause_no_wrong_verdict(sandbox: Bubblewrap) -> None:
    program = "import time\nx = int(input())\nend = time.monotonic() + 0.05\n"
    program += "while time.monotonic() < end: pass\nprint(x)"
    mark = 4_000_000 + os.getpid() % 100_000
    limits = Limits(output_bytes=mark, wall_seconds=100)  # so long are killed programs tried again
    chance, killed = random.Random(0), 0
    with ThreadPoolExecutor(2) as pool:
        tests = StreamTests(("1", "2", "3"), ("1", "2", "3"))
        runs = [pool.submit(tried_again, sandbox, program, tests, limits) for _ in range(12)]
        while not all(run.done() for run in runs):
            time.sleep(chance.uniform(0.0, 0.3))
            if killed < 9 and (victims := running(f",{mark},")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    killed += 1
    assert killed > 3
    assert [run.result() for run in runs] == [[PASSED] * 3] * 12


def test_run_stdio_requires_as_many_inputs_as_outputs(sandbox: Bubblewrap) -> None:
    assert run_stdio(sandbox, ADD, [], [], LIMITS) == []
    with pytest.raises(ValueError, match="1 and 2"):
        run_stdio(sandbox, ADD, [""], ["", ""], LIMITS)


def test_resident_memory_stays_within_the_limit(sandbox: Bubblewrap) -> None:
    mark = 2_000_000 + os.getpid() % 100_000
    limits = replace(LIMITS, memory_bytes=256 * MEBIBYTE, output_bytes=mark)
    program = """
blocks = []
try:
    while True:
        blocks.append(bytearray(b"x") * (1 << 20))
except MemoryError:
    pass
while True:
    pass
"""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_stdio, sandbox, program, [""], [""], limits)
        peak = 0
        while not run.done():
            peak = max([peak, *map(resident_peak, running(f",{mark},"))])
            time.sleep(0.01)
    assert run.result()[0].reason == "time limit"
    assert limits.memory_bytes / 2 < peak <= limits.memory_bytes


def resident_peak(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0
