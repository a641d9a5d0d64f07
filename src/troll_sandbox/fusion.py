"""Tests programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), which verl supports too."""

from __future__ import annotations

import http.client
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests, Tests, number_of
from troll_sandbox.errors import SandboxError
from troll_sandbox.function_calls import ENDED, read_outcome
from troll_sandbox.launch import INSIDE
from troll_sandbox.limits import MEBIBYTE, NOT_RUN, TIME_LIMIT, Limits, Outcome
from troll_sandbox.output import same_output
from troll_sandbox.stream_runs import REASON_LENGTH, failure
from troll_sandbox.unbounded import write_json

#: Time for the network and the server's queue, in addition to the program's time.
REQUEST_SECONDS = 30.0


class SandboxFusion:
    """Tests programs on a server; see `Sandbox`.

    Tests by standard input and output are compared here, so a pass proves the same as with bubblewrap. Function tests
    run in the program's own process, where a program can read the expected values or patch the comparison. The server
    enforces its own isolation, `Limits.memory_bytes`, and wall time: `cpu_seconds + idle_seconds` for one test, and
    `wall_seconds` for all tests of a program.

    Args:
        url: Address of the server's `run_code`, e.g. `http://localhost:8080/run_code`; verl's `sandbox_fusion.url`.

    Raises:
        ValueError: The address does not start with `http://` or `https://`.
        SandboxError: The server does not run a program; the message says why.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a SandboxFusion server has an address like http://localhost:8080/run_code, got {url!r}")
        self._url = url
        limits = Limits()
        if _failure(self._run("print()", "", limits.cpu_seconds, limits)):
            raise SandboxError(f"{url} cannot run Python programs")

    def __call__(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """Tests a program."""
        try:
            program.encode()
        except UnicodeEncodeError:
            return [Outcome(False, "the program is not text")] * number_of(tests)
        outcomes: list[Outcome] = []
        if isinstance(tests, StreamTests):
            try:
                for outcome in self._streams(program, tests, limits, stop_at_failure):
                    outcomes.append(outcome)
            except SandboxError as error:
                error.ended = outcomes
                raise
        else:
            outcomes = self._functions(program, tests, limits, stop_at_failure)
        return outcomes + [NOT_RUN] * (number_of(tests) - len(outcomes))

    def _streams(self, program: str, tests: StreamTests, limits: Limits, stop_at_failure: bool) -> Iterator[Outcome]:
        left = limits.wall_seconds
        for text, expected in zip(tests.inputs, tests.outputs, strict=True):
            response = self._run(program, text, left, limits)
            outcome = _failure(response)
            if outcome is None:
                right = same_output(response["run_result"].get("stdout") or "", expected, tests.compare)
                outcome = Outcome(right, "passed" if right else "wrong answer")
            yield outcome
            left -= float(response["run_result"].get("execution_time") or 0.0)
            if outcome == TIME_LIMIT or left <= 0 or (stop_at_failure and not outcome.passed):
                return

    def _functions(
        self, program: str, tests: CodeTests | FunctionTests, limits: Limits, stop_at_failure: bool
    ) -> list[Outcome]:
        mark = secrets.token_hex()
        job = {"mark": mark, "source": program, "stop_at_failure": stop_at_failure, **vars(tests)}
        response = self._run(_script(), write_json(job), limits.wall_seconds, limits)
        lines = (response["run_result"].get("stdout") or "").splitlines()
        reports = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        forged = Outcome(False, "the program forged a report")
        outcomes = [read_outcome(report) or forged for report in reports[: number_of(tests)]]
        if len(outcomes) == number_of(tests) or (stop_at_failure and outcomes and not outcomes[-1].passed):
            return outcomes
        ended = _failure(response) or Outcome(False, ENDED)
        return outcomes + [ended] * (1 if stop_at_failure else number_of(tests) - len(outcomes))

    def _run(self, code: str, stdin: str, seconds: float, limits: Limits) -> dict[str, Any]:
        """The server's response; raises `SandboxError` if there is none, or if it reports a failure of the server."""
        seconds = min(seconds, limits.cpu_seconds + limits.idle_seconds)
        content = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "run_timeout": seconds,
            "memory_limit_MB": limits.memory_bytes // MEBIBYTE,
            "files": {},
            "fetch_files": [],
        }
        request = urllib.request.Request(
            self._url, json.dumps(content).encode(), {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=2 * seconds + REQUEST_SECONDS) as answer:
                response: dict[str, Any] = json.load(answer)
            if response["status"] in ("Success", "Failed"):
                if not response.get("run_result"):
                    raise ValueError("it ran nothing")
                return response
            cause = f"{response['status']}: {response.get('message') or ''}"
        except urllib.error.HTTPError as error:
            cause = f"HTTP {error.code} {error.reason}"
            error.close()
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError) as error:
            cause = f"an answer that is not in SandboxFusion's form ({type(error).__name__}: {error})"
        raise SandboxError(f"the sandbox at {self._url} failed: {cause[:REASON_LENGTH]}")


@cache
def _script() -> str:
    """The script that tests functions on the server; it reads the program and its tests from standard input."""
    modules = {name: (INSIDE / f"{name}.py").read_text() for name in ("values", "prelude", "one_process")}
    return f"""import sys

for name, source in {modules!r}.items():
    sys.modules[name] = type(sys)(name)
    exec(source, vars(sys.modules[name]))

""" + (INSIDE / "fusion_main.py").read_text()


def _failure(response: dict[str, Any]) -> Outcome | None:
    """The reason why a program did not exit with status 0; None if it did."""
    result = response["run_result"]
    if result["status"] == "TimeLimitExceeded":
        return TIME_LIMIT
    code = result.get("return_code")
    return Outcome(False, failure(code, result.get("stderr") or "")) if code else None
