"""The reward of speed, and programs that try to get it without being fast."""

import json
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from troll.grading import leaves_unscored
from troll_lab.rewards import CodeGrader, time_saved
from troll_lab.rewards.code import Reward
from troll_sandbox import Limits, Outcome, SandboxError

N = 1_000_000
SUM = N * (N - 1) // 2

#: The sum of the numbers below n, five times: what is remembered between these tests saves four fifths.
STREAM = json.dumps({"inputs": [f"{N}\n"] * 5, "outputs": [f"{SUM}\n"] * 5})
CALLS = json.dumps(
    {
        "function": "f",
        "inputs": [[N + more] for more in range(5)],
        "outputs": [SUM + N * more + more * (more - 1) // 2 for more in range(5)],
    }
)

LOOP = "def f(n):\n    total = 0\n    for i in range(n):\n        total += i\n    return total\n"
FORMULA = "def f(n):\n    return n * (n - 1) // 2\n"
PRINT = "print(f(int(input())))\n"

#: Programs that pass all tests and use as much CPU time as the loop, whatever they pretend.
NO_FASTER = {
    "remembers in a file": "import os\nif os.path.exists('/tmp/known'):\n    print(open('/tmp/known').read())\n"
    "else:\n    answer = f(int(input()))\n    open('/tmp/known', 'w').write(str(answer))\n    print(answer)\n",
    "computes in a thread": "import threading, time\nanswers = []\nn = int(input())\n"
    "thread = threading.Thread(target=lambda: answers.append(f(n)))\nthread.start()\n"
    "while not answers:\n    time.sleep(0.01)\nprint(*answers)\n",
    "sleeps as well": "import time\ntime.sleep(0.05)\n" + PRINT,
    "changes the clocks": "import os, resource, time\n"
    "time.process_time = time.perf_counter = time.time = time.thread_time = lambda: 0.0\n"
    "os.times = resource.getrusage = lambda *_: (0.0,) * 16\n" + PRINT,
    "computes at the end": "import atexit, os\nn = int(input())\n"
    "atexit.register(lambda: os.write(1, str(f(n)).encode()))\n",
}

#: Programs that use next to no CPU time and are wrong.
WRONG = {
    "prints nothing": "",
    "prints another number": "print(3)\n",
    "exits early": "import os\nos._exit(0)\n",
    "sleeps instead": "import time\ntime.sleep(0.05)\nprint(0)\n",
    "forks": "import os\nn = int(input())\nif os.fork() == 0:\n    print(f(n), flush=True)\n    os._exit(0)\n"
    "os.wait()\n",
    "starts a process": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n",
    "starts a process without waiting": "import os, sys\n"
    "os.posix_spawn(sys.executable, [sys.executable, '-c', '1'], {})\n",
    "stops the count": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\n" + PRINT,
}

#: The same by calls: the program shares a process with what answers for it.
NO_FASTER_CALLED = {
    "computes before": f"known = {{}}\nfor n in range({N}, {N + 5}):\n    known[n] = sum(i for i in range(n))\n"
    "def f(n):\n    return known[n]\n",
    "stays after the tests": LOOP + "import gc, os, time\nos._exit = lambda *_: time.sleep(10)\n"
    "for thing in gc.get_objects():\n    if type(thing).__name__ == 'Peer':\n"
    "        serve = thing.serve\n        thing.serve = lambda: (serve(), time.sleep(10))\n",
}
WRONG_CALLED = {
    "returns another number": "def f(n):\n    return 3\n",
    "exits early": "import os\nos._exit(0)\n",
    "exits when called": "import os\ndef f(n):\n    os._exit(0)\n",
    "sleeps instead": "import time\ndef f(n):\n    time.sleep(0.01)\n    return 0\n",
    "forks": "import os\ndef f(n):\n    return os.fork()\n",
    "equals everything": "class All:\n    def __eq__(self, other):\n        return True\ndef f(n):\n    return All()\n",
}


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    with closing(CodeGrader(limits=Limits(cpu_seconds=2.0, idle_seconds=2.0), workers=1)) as grader:
        yield grader


def paid(reward: Reward, programs: list[str], tests: str, reference: str) -> list[float | None]:
    rows = {"tests": [tests] * len(programs), "reference": [reference] * len(programs)}
    return reward(["p"] * len(programs), programs, **rows)


@pytest.mark.needs_bubblewrap
@pytest.mark.parametrize(
    ("tests", "reference", "fast", "no_faster", "wrong"),
    [
        (STREAM, LOOP + PRINT, FORMULA + PRINT, {name: LOOP + text for name, text in NO_FASTER.items()}, WRONG),
        (CALLS, LOOP, FORMULA, NO_FASTER_CALLED, WRONG_CALLED),
    ],
    ids=["streams", "calls"],
)
def test_time_saved_pays_only_right_and_faster_programs(
    grader: CodeGrader, tests: str, reference: str, fast: str, no_faster: dict[str, str], wrong: dict[str, str]
) -> None:
    reward = time_saved(grader)
    texts = [fast, reference, *no_faster.values()]
    honest, same, *tricks = paid(reward, texts, tests, reference)
    assert honest is not None and same is not None
    assert 0 <= same < 0.5 < honest < 1
    assert all(verdict.success for verdict in grader.grade(texts, tests=[tests] * len(texts)))
    assert [name for name, each in zip(no_faster, tricks, strict=True) if each is None or each > honest / 2] == []
    assert paid(reward, [LOOP + text for text in wrong.values()], tests, reference) == [0.0] * len(wrong)


class Timed:
    """A sandbox that believes the times that stand in a program's first line, one a test; "wrong" fails a test."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def __call__(self, program: str, tests: Any, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        self.programs.append(program)
        if "broken" in program:
            raise SandboxError("no process is left")
        seconds = [float(text) if text != "-" else None for text in program.splitlines()[0].removeprefix("# ").split()]
        return [Outcome("wrong" not in program, "says so", each) for each in seconds]


def timed(*seconds: float | str, rest: str = "pass") -> str:
    return f"# {' '.join(map(str, seconds))}\n{rest}"


TWO = json.dumps({"inputs": ["", ""], "outputs": ["", ""]})


def test_time_saved_is_the_share_of_reference_seconds() -> None:
    reward = time_saved(CodeGrader(sandbox=Timed(), workers=1), resolution=0.1)
    programs = [timed(0.2, 0.2), timed(0.4, 0.5), timed(0.4, 0.6), timed(0.0, 0.0), timed(0.0, 0.0, rest="wrong"), ""]
    rewards = paid(reward, programs, TWO, timed(0.5, 0.4))
    assert rewards == pytest.approx([0.5, 0.0, 0.0, 0.9, 0.0, 0.0], abs=1e-12)
    assert reward.__name__ == "time_saved"
    assert leaves_unscored(reward)


def test_time_saved_runs_reference_once_and_no_program_again() -> None:
    sandbox = Timed()
    grader = CodeGrader(sandbox=sandbox, workers=1)
    reward = time_saved(grader, runs=2)
    reference, right, wrong = timed(0.5, 0.5), timed(0.1, 0.1), timed(0.1, 0.1, rest="wrong")
    paid(reward, [wrong], TWO, reference)
    assert sandbox.programs == [wrong]
    rows = {"tests": [TWO], "reference": [reference]}
    grader(["p"], [right], **rows)
    first = reward(["p"], [[{"role": "assistant", "content": right}]], **rows)
    assert sandbox.programs == [wrong, right, reference, reference]
    assert first == reward(["p"], [right], **rows, prefix=[None])
    assert sandbox.programs == [wrong, right, reference, reference]


def test_time_saved_is_unscored_where_one_cannot_be_tested() -> None:
    reward = time_saved(CodeGrader(sandbox=Timed(), workers=1, limits=Limits(wall_seconds=0.05)))
    assert paid(reward, [timed(0.1, 0.1, rest="broken")], TWO, timed(0.5, 0.5)) == [None]
    programs = [timed(0.1, 0.1), timed(0.1, 0.1, rest="wrong")]
    assert paid(reward, programs, TWO, timed(0.5, 0.5, rest="broken")) == [None, 0.0]


def test_time_saved_ignores_one_failure_of_the_reference() -> None:
    class OverOnce(Timed):
        def __call__(self, program: str, *arguments: Any, **options: Any) -> list[Outcome]:
            outcomes = super().__call__(program, *arguments, **options)
            over = program.startswith("# 0.5") and self.programs.count(program) == 1
            return [Outcome(False, "time limit", 0.01), outcomes[1]] if over else outcomes

    reward = time_saved(CodeGrader(sandbox=OverOnce(), workers=1), resolution=0.1, runs=2)
    assert paid(reward, [timed(0.2, 0.2)], TWO, timed(0.5, 0.4)) == pytest.approx([0.5], abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runs": 0}, "runs must be at least 1, got 0"),
        ({"resolution": 0.0}, "resolution must be .* above 0, got 0"),
        ({"resolution": math.inf}, "resolution must be finite"),
    ],
)
def test_time_saved_refuses_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        time_saved(CodeGrader(sandbox=Timed(), workers=1), **settings)


@pytest.mark.parametrize(
    ("program", "reference", "message"),
    [
        (timed(0.1, 0.1), timed(0.5, 0.5, rest="wrong"), "row 0: the reference does not pass its tests: says so"),
        (timed(0.1, "-"), timed(0.5, 0.5), "a program has no CPU time: .* CodeGrader with bubblewrap"),
    ],
)
def test_time_saved_needs_right_reference_and_cpu_time(program: str, reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paid(time_saved(CodeGrader(sandbox=Timed(), workers=1)), [program], TWO, reference)
