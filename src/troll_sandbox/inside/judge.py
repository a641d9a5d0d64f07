"""The judge: runs the tests of programs in a process that the programs cannot reach.

It stays warm and forks a child for every program. The child holds the tests and the expected values. There, the names
of the program are proxies, and values from the program are copies. A job arrives on standard input together with two
descriptors: the channel to the program and a pipe for the outcomes.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import callbacks
import confine
import values
from objects import CLASS_NAME, ProgramObject, Type, is_object, mark_class
from peer import Closed, Peer
from prelude import is_provided

Outcome = tuple[bool, str]

#: Characters of a reason. JSON may write a character in 12 bytes, and the reader of outcomes limits their length.
_REASON_LENGTH = 200

#: Bytes of stack, enough for functions of C on the deepest values that a program may return.
_STACK = 128 << 20


class Tests:
    """The tests of one program.

    Args:
        job: The tests and limits from `troll_sandbox.function_calls`.
        channel: File descriptor of the channel to the program.
    """

    def __init__(self, job: dict[str, Any], channel: int):
        self._job = job
        self._peer = Peer(channel, self._serve, ProgramObject)
        module = sys.modules["tests"] = type(sys)("tests")  # data classes resolve their annotations there
        self._namespace: dict[str, Any] = vars(module)
        self._namespace["type"] = Type

    def outcomes(self) -> Iterator[Outcome]:
        """The outcomes of the tests in order, until the program ends or testing stops."""
        failure = self._attempt(self._prepare)
        if failure:
            yield False, failure
            return
        for test in self._each():
            failure = self._attempt(test)
            yield (False, failure) if failure else (True, "passed")
            if self._peer.closed or (failure and self._job["stop_at_failure"]):
                return

    def _attempt(self, action: Any) -> str | None:
        """The reason for a failure, None for a pass. A test that catches the end of its program has failed."""
        try:
            action()
        except Closed:
            pass
        except BaseException as error:
            if not self._peer.closed:
                return _reason(error)[:_REASON_LENGTH]
        # This is `function_calls.ENDED`, which the caller replaces by the cause.
        return "exited before the tests ended" if self._peer.closed else None

    def _prepare(self) -> None:
        self._peer.request("run", self._job["source"], is_provided(self._job))
        if any("asyncio" in source for source in (self._job.get("setup", ""), *self._job.get("tests", ()))):
            _run_coroutines_of_programs()
        if "function" not in self._job:
            self._bind(self._job["names"] + self._job["inferred"])
            for name in self._job["modules"]:
                if self._peer.request("has", name) is True:
                    self._namespace[name] = importlib.import_module(name)
            # Annotations stay unevaluated, as in this file: `Node | None` must not ask the program's class.
            exec(self._job["setup"], self._namespace)
            self._bind(self._job["names"])  # the setup may define the same name: a prompt holds the signature

    def _bind(self, names: list[str]) -> None:
        for name in names:
            if self._peer.request("has", name) is True:
                self._namespace[name] = self._named(name)

    def _named(self, name: str) -> Any:
        """The program's object with a name; for an exception class its twin, which can stand in `except`."""
        answer = self._peer.request("name", name)
        if type(answer) is not tuple or len(answer) != 2:
            raise self._peer.close()
        value, lineage = answer
        if lineage is not None:
            return self._peer.twin(lineage)
        if CLASS_NAME.fullmatch(name):
            mark_class(value)
        return value

    def _each(self) -> Iterator[Any]:
        if "function" in self._job:
            for arguments, expected in zip(self._job["inputs"], self._job["outputs"], strict=True):
                yield lambda arguments=arguments, expected=expected: self._call(arguments, expected)
        for test in self._job.get("tests", ()):
            yield lambda test=test: exec(test, self._namespace)

    def _call(self, arguments: list[Any], expected: Any) -> None:
        name = self._job["function"]
        if self._peer.request("has", name) is True:
            function = self._named(name)
        elif self._peer.request("has", "Solution") is True:
            function = getattr(self._named("Solution")(), name)
        else:
            raise NameError(f"name {name!r} is not defined")
        values.check(function(*map(values.integer_keys, arguments)), expected)

    def _serve(self, operation: str, *operands: Any) -> Any:
        """Serves the program's operations on objects that tests pass to it: call, iterate, and test for truth."""
        if operation == "bool":
            return True
        if operation in ("iter", "next") and len(operands) == 1:
            return iter(operands[0]) if operation == "iter" else next(operands[0])
        if operation != "call" or len(operands) != 2 or not callable(operands[0]):
            raise TypeError(f"objects of the tests can only be called and iterated, not {operation[:20]!r}")
        args, kwargs = self._peer.unpack(operands[1])
        return callbacks.call(operands[0], args, kwargs, self._namespace), None


def _run_coroutines_of_programs() -> None:
    """Makes `asyncio.run` take coroutines of the program, which are proxies here."""
    import asyncio

    run: Any = asyncio.run

    async def awaited(thing: Any) -> Any:
        return await thing

    def patched(main: Any, **options: Any) -> Any:
        return run(awaited(main) if is_object(main) else main, **options)

    asyncio.run = patched


def _reason(error: BaseException) -> str:
    remote = getattr(error, "remote", None)
    if isinstance(remote, str):
        return "memory limit" if remote.startswith("MemoryError") else f"raised {remote}"
    if isinstance(error, AssertionError):
        return "wrong answer"
    return f"the tests raised {type(error).__name__}: {error}"


def _judge(job: dict[str, Any], channel: int, report: int) -> None:
    def too_long(*_: object) -> None:
        os.write(report, json.dumps((False, "the results took too long to check")).encode() + b"\n")
        os._exit(0)

    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, too_long)
    signal.alarm(int(job["wall_seconds"]) + 1)
    # Twice the program's CPU time, because the kernel counts it roughly.
    seconds = int(2 * job["cpu_seconds"]) + 1
    memory = 2 * job["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for outcome in Tests(job, channel).outcomes():
        os.write(report, json.dumps(outcome).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    header, descriptors, _, _ = socket.recv_fds(control, 8, 2)
    if len(header) < 8:
        return None
    with control.makefile("rb") as stream:
        content = stream.read(int.from_bytes(header, "big"))
    return json.loads(content), descriptors


def main() -> None:
    """Serves jobs until standard input is closed."""
    for module in ("collections", "copy", "datetime", "decimal", "fractions", "itertools", "math", "random", "re"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    confine.lift(_STACK)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    while job := _receive(control):
        if not os.fork():
            try:
                control.close()
                _judge(job[0], *job[1])
            finally:
                os._exit(0)
        for descriptor in job[1]:
            os.close(descriptor)


confine.die_with_parent()
main()
