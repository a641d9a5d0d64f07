"""Tests on a SandboxFusion server; a stand-in speaks its protocol and runs programs as plain processes."""

import json
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from troll_lab.rewards.code import CodeGrader, compute_score
from troll_lab.rewards.tests import parse_tests
from troll_sandbox import fusion
from troll_sandbox.errors import SandboxError
from troll_sandbox.executor import Executor, Job
from troll_sandbox.fusion import SandboxFusion
from troll_sandbox.limits import MEBIBYTE, PASSED, Limits, Outcome

#: Fields and types of a request in the server's own model.
REQUEST = {"run_timeout": float, "memory_limit_MB": int, "code": str, "stdin": str, "language": str}
REQUEST |= {"files": dict, "fetch_files": list}

DOUBLE = {"asserts": ["assert double(2) == 4", "assert double(3) == 6", "assert double(0) == 0"]}
SUM = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
ADD = "print(sum(map(int, input().split())))"
LIMITS = Limits(cpu_seconds=1.0, idle_seconds=1.0, wall_seconds=5.0)


class Server(ThreadingHTTPServer):
    """Answers `/run_code` as SandboxFusion does, first with `answers`: a status and a body, or None for no answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes] | None] = []
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/run_code"

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that have closed the connection."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        wrong = [name for name, kind in REQUEST.items() if not isinstance(request.get(name), kind)]
        answer: tuple[int, bytes] | None
        if self.path != "/run_code":
            answer = 404, b'{"detail":"Not Found"}'
        elif self.server.answers:
            answer = self.server.answers.pop(0)
        elif wrong or set(request) - set(REQUEST) or request["language"] != "python":
            answer = 422, json.dumps({"detail": wrong}).encode()
        else:
            answer = 200, json.dumps(run(request)).encode()
        if answer is None:
            self.connection.close()
            return
        status, body = answer
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The server's answer for a run, as its `run_command_bare` and `parse_run_status` make it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(request["code"])
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, str(path)],
                input=request["stdin"].encode(),
                capture_output=True,
                timeout=request["run_timeout"],
                cwd=folder,
            )
            result = {"status": "Finished", "return_code": done.returncode}
        except subprocess.TimeoutExpired as expired:
            done, result = expired, {"status": "TimeLimitExceeded", "return_code": None}  # type: ignore[assignment]
        result |= {name: (getattr(done, name) or b"").decode() for name in ("stdout", "stderr")}
        result["execution_time"] = time.monotonic() - begin
    succeeded = result["status"] == "Finished" and result["return_code"] == 0
    return answered("Success" if succeeded else "Failed", run_result=result)


def answered(status: str, **parts: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("compile_result", "run_result", "executor_pod_name"))
    return {"status": status, "message": "", "files": {}, **nothing, **parts}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def sandbox(server: Server) -> SandboxFusion:
    made = SandboxFusion(server.url)
    server.requests.clear()
    return made


def outcomes_of(sandbox, program, tests, stop=False, limits=LIMITS):
    outcomes = sandbox(program, parse_tests(json.dumps(tests)), limits=limits, stop_at_failure=stop)
    assert all(isinstance(each, Outcome) and each.passed == (each.reason == "passed") for each in outcomes)
    return [True if outcome.passed else outcome.reason for outcome in outcomes]


def test_fusion_runs_programs_by_standard_input(server, sandbox):
    assert outcomes_of(sandbox, ADD, SUM) == [True] * 3
    assert outcomes_of(sandbox, f"{ADD} if input else 0\nassert 0", SUM)[0] == "raised AssertionError"
    assert outcomes_of(sandbox, "print(7)", SUM) == ["wrong answer", True, "wrong answer"]
    assert outcomes_of(sandbox, "print(7)", SUM, stop=True) == ["wrong answer", "not run", "not run"]
    assert len(server.requests) == 3 + 3 + 3 + 1
    assert {request["stdin"] for request in server.requests} == set(SUM["inputs"])
    assert {request["memory_limit_MB"] for request in server.requests} == {LIMITS.memory_bytes // MEBIBYTE}
    numbers = {"inputs": [""], "outputs": ["3"], "compare": "numbers"}
    assert outcomes_of(sandbox, "print(3.0)", numbers) == [True]


def test_fusion_runs_all_calls_in_one_request(server, sandbox):
    assert outcomes_of(sandbox, "def double(x): return 2 * x", DOUBLE) == [True] * 3
    assert outcomes_of(sandbox, "def double(x): return 6", DOUBLE, stop=True) == ["wrong answer", "not run", "not run"]
    assert len(server.requests) == 2


def nested(depth: int) -> Any:
    value: Any = 10**4000
    for _ in range(depth):
        value = [value, 0.1 + 0.2]
    return value


LATE = "import os\ndef double(x):\n    if x == 3: os._exit(0)\n    return 2 * x"
CALLS = {"function": "f", "inputs": [[1, 2], [{"1": 2}]], "outputs": [[3, 4], [[2]]]}
KEYS = {"function": "f", "inputs": [[[{"1": 2}]]], "outputs": [[{"a": {"3": [4]}}]]}
DEEP = {"function": "f", "inputs": [[nested(700)]], "outputs": [nested(700)]}
STARTER = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]: return int('7' * 5000) + math.inf"
FUTURE = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
TOO_LARGE = "int too large to convert to float"
CHECK = {"check": "def check(c): assert c(1) == two", "entry_point": "f", "setup": "two = 2\ndef f(x): ..."}


@pytest.mark.parametrize(
    ("program", "tests", "wanted"),
    [
        ("print('x')\ndef double(x): print(x); return 4", DOUBLE, [True, "wrong answer", "wrong answer"]),
        ("def double(x): return 2 * x or 1 / x", DOUBLE, [True] * 2 + ["raised ZeroDivisionError: division by zero"]),
        ("def f(x, y=None): return (3, 4) if y else [x[1]]", CALLS, [True, True]),
        ("class Solution:\n    def f(self, x, y=None): return [3, 4]", CALLS, [True, "wrong answer"]),
        ("def f(x): return [{'a': {3: (x[0][1] + 2,)}}]", KEYS, [True]),
        (STARTER, {**CALLS, "inputs": [[[1]]], "outputs": [0]}, [f"raised OverflowError: {TOO_LARGE}"]),
        ("def f(x): return x", DEEP, [True]),
        (FUTURE + "def double(x): return 2 * A(x).x", DOUBLE, [True] * 3),
        ("def f(x): return x + 1", CHECK, [True]),
        ("def double(x:", DOUBLE, ["raised SyntaxError"] * 3),
        ("import os; os._exit(0)", DOUBLE, ["exited before the tests ended"] * 3),
        ("import os; os._exit(3)", DOUBLE, ["exit status 3"] * 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", DOUBLE, ["killed by signal 11"] * 3),
        ("while True: pass", DOUBLE, ["time limit"] * 3),
        (LATE, DOUBLE, [True, *["exited before the tests ended"] * 2]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_fusion_calls_functions(sandbox, program, tests, wanted):
    found = outcomes_of(sandbox, program, tests)
    assert len(found) == len(wanted) and all(map(is_like, found, wanted)), found
    stopped = outcomes_of(sandbox, program, tests, stop=True)
    end = next((number for number, each in enumerate(wanted, 1) if each is not True), len(wanted))
    assert all(map(is_like, stopped, wanted[:end])) and stopped[end:] == ["not run"] * (len(wanted) - end)


def is_like(found: bool | str, wanted: bool | str) -> bool:
    return str(found).startswith(str(wanted))


def test_fusion_refuses_a_program_that_is_not_text(server, sandbox):
    assert outcomes_of(sandbox, "x = '\ud800'", DOUBLE) == ["the program is not text"] * 3
    assert not server.requests


def test_fusion_survives_a_forged_report(sandbox):
    forged = """
import os, sys
frame = sys._getframe()
while "mark" not in frame.f_locals:
    frame = frame.f_back
mark = frame.f_locals["mark"]
for descriptor in range(3, 20):
    try:
        os.write(descriptor, (mark + '{"nonsense": [}\\n' + mark + '7\\n').encode())
    except OSError:
        pass
def double(x): return 2 * x
"""
    assert outcomes_of(sandbox, forged, DOUBLE)[0] == "the program forged a report"


def test_fusion_hides_the_script_from_the_module_main(sandbox):
    source = "import __main__, sys\ndef f(): return sorted(name for name in vars(__main__) if name in {})"
    known = ["job", "mark", "outcomes", "outputs", "report", "tests"]
    calls = {"function": "f", "inputs": [[]], "outputs": [[]]}
    assert outcomes_of(sandbox, source.format(known), calls) == [True]


@pytest.mark.parametrize("change", ["sys.modules.clear()", "sys.modules['values'] = type('', (), {'check': print})"])
def test_fusion_compares_after_a_program_changes_modules(sandbox, change):
    calls = {"function": "f", "inputs": [[2], [3]], "outputs": [[4], [6]]}
    program = f"import sys\n{change}\ndef f(x): return 2 * x if x < 3 else 7"
    assert outcomes_of(sandbox, program, calls) == [True, "wrong answer"]


def test_fusion_has_one_wall_time_for_all_tests(server, sandbox):
    sleeping = "import time; time.sleep(0.6)"
    many = {"inputs": [""] * 10, "outputs": [""] * 10}
    found = outcomes_of(sandbox, sleeping, many, limits=Limits(wall_seconds=1.0))
    assert found[0] is True and found[-1] == "not run" and len(found) == 10
    assert len(server.requests) == 2
    assert outcomes_of(sandbox, "while True: pass", many) == ["time limit", *["not run"] * 9]


BROKEN = {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": "no fork"}

NO_FORK = json.dumps(answered("SandboxError", message="no fork", run_result=BROKEN)).encode()

FAILURES = [
    ((500, b'{"detail": "boom"}'), "HTTP 500"),
    ((429, b""), "HTTP 429"),
    ((422, b"{}"), "HTTP 422"),
    (None, "closed|reset|Remote end"),
    ((200, b"<html>hello</html>"), "not in SandboxFusion's form"),
    ((200, b"[]"), "not in SandboxFusion's form"),
    ((200, json.dumps(answered("Success")).encode()), "not in SandboxFusion's form"),
    ((200, NO_FORK), "SandboxError: no fork"),
]


@pytest.mark.parametrize(("answer", "cause"), FAILURES, ids=lambda value: str(value)[:20])
def test_executor_tries_again_after_a_failed_request(server, sandbox, answer, cause):
    server.answers += [answer] * 2
    with closing(Executor(lambda: (sandbox, None), LIMITS, workers=1)) as executor:
        assert executor.run([Job(ADD, parse_tests(json.dumps(SUM)), False)]) == [[PASSED] * 3]
    server.answers += [answer]
    with pytest.raises(SandboxError, match=f"the sandbox at {server.url} failed: .*({cause})"):
        outcomes_of(sandbox, ADD, SUM)


def test_executor_keeps_runs_that_ended_before_a_failure(server, sandbox, monkeypatch):
    ran, run_one = [], sandbox._run

    def run_then_fail(code: str, stdin: str, *limits: Any) -> Any:
        ran.append(stdin)
        if len(ran) == 2:
            raise SandboxError("HTTP 503")
        return run_one(code, stdin, *limits)

    monkeypatch.setattr(sandbox, "_run", run_then_fail)
    with closing(Executor(lambda: (sandbox, None), LIMITS, workers=1)) as executor:
        assert executor.run([Job(ADD, parse_tests(json.dumps(SUM)), False)]) == [[PASSED] * 3]
    first, second, third = SUM["inputs"]
    assert ran == [first, second, second, third]


def test_fusion_raises_if_the_server_never_answers(server, sandbox, monkeypatch):
    monkeypatch.setattr(fusion, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(Handler, "do_POST", lambda self: time.sleep(3))
    with pytest.raises(SandboxError, match="timed out"):
        outcomes_of(sandbox, ADD, SUM, limits=Limits(wall_seconds=0.1))


def test_fusion_refuses_wrong_addresses(server):
    for url in ("file:///etc/passwd", "localhost:8080", ""):
        with pytest.raises(ValueError, match="an address like http"):
            SandboxFusion(url)
    with pytest.raises(SandboxError, match="HTTP 404"):
        SandboxFusion(server.url.removesuffix("run_code"))
    with pytest.raises(SandboxError, match="refused"):
        SandboxFusion("http://127.0.0.1:9/run_code")


def test_code_grader_survives_the_loss_of_the_server(server):
    grader = CodeGrader(sandbox=server.url, limits=Limits(wall_seconds=2.0))
    tests = [json.dumps(DOUBLE), json.dumps(SUM)]
    assert grader(["p"] * 2, ["def double(x): return 2 * x", ADD], tests=tests) == [1.0, 1.0]
    copy = pickle.loads(pickle.dumps(grader))
    assert copy(["p"], [ADD], tests=tests[1:]) == [1.0]
    server.answers += [(503, b"")] * 50
    verdicts = grader.grade(["def double(x): return x", ""], tests=tests)
    assert [verdict.score for verdict in verdicts] == [None, 0.0]
    assert "HTTP 503 Service Unavailable" in verdicts[0].reason
    server.answers.clear()
    assert grader(["p"], ["def double(x): return 2 + x"], tests=tests[:1]) == [0.0]


def test_compute_score_takes_a_server_address(server):
    score = compute_score("taco", ADD, json.dumps(SUM), sandbox=server.url, memory_limit_mb=1024)
    assert score == {"score": 1.0, "acc": 1.0, "reason": "correct"}
    assert len(server.requests) == 1 + 3
