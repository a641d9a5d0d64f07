"""Programs that attack, cheat, or are right, each with the verdict that its first line names (see `programs.py`)."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.troll_sandbox import cheats, hostile, idioms
from tests.troll_sandbox.processes import Run, code_tests, reasons, wait_until_gone
from tests.troll_sandbox.programs import has_verdict, without_verdict
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import StreamTests, Tests
from troll_sandbox.function_calls import ENDED
from troll_sandbox.launch import INSIDE
from troll_sandbox.limits import MEBIBYTE, PASSED, Limits
from troll_sandbox.local import LocalSandbox
from troll_sandbox.stream_runs import run_stdio

pytestmark = pytest.mark.needs_bubblewrap

#: A mark in the command line of every process in a sandbox.
MARK = 1_000_000 + os.getpid() % 100_000

LIMITS = Limits(
    cpu_seconds=0.5,
    wall_seconds=20,
    idle_seconds=1,
    memory_bytes=256 * MEBIBYTE,
    disk_bytes=8 * MEBIBYTE,
    output_bytes=MARK,
)


class User:
    """What an attack tries to reach: a secret file, a secret variable and listening sockets."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret.txt"
        self.secret.write_text("secret")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.abstract = f"troll-{os.getpid()}"
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind("\0" + self.abstract)
        self.unix.listen()
        self.listeners = (self.tcp, self.udp, self.unix)

    def source(self, name: str) -> str:
        source = hostile.HOSTILE[name].replace("$SECRET", str(self.secret))
        return source.replace("$PORT", str(self.port)).replace("$ABSTRACT", self.abstract)

    def reached(self) -> bool:
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept() if listener is not self.udp else listener.recv(1)
                return True
        return False


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    monkeypatch.setenv("TROLL_SECRET", "secret")
    user = User(tmp_path)
    yield user
    for listener in user.listeners:
        listener.close()


def state_of(folder: Path) -> set[tuple[str, int, int]]:
    found = set()
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            found.add((str(path), status.st_size, status.st_mtime_ns))
    return found


STREAM = StreamTests(("1 2", "5 6"), ("3", "11"))
FUNCTION = code_tests("assert add(1, 2) == 3", "assert add(5, 6) == 11")

#: Right programs that do what attacks could disturb.
READ = "a, b = map(int, input().split())\n"
NEIGHBOURS: list[tuple[str, Tests]] = [
    (READ + "import time\ntime.sleep(0.2)\nprint(a + b)", STREAM),
    (READ + "open('own', 'wb').write(bytes(1 << 19))\nprint(a + b)", STREAM),
    (READ + "import decimal, json, random, xml.dom.minidom\nprint(open('/dev/stdin').read() and a + b)", STREAM),
    (READ + "x = [bytearray(b'x' * (1 << 20)) for _ in range(64)]\nprint(a + b)", STREAM),
    ("def add(a, b):\n    return a + b", FUNCTION),
    (
        "import threading, time\ndef add(a, b):\n    found = []\n    threads = [threading.Thread(target=lambda:"
        " (time.sleep(0.1), found.append(a + b))) for _ in range(8)]\n    [t.start() for t in threads]\n"
        "    [t.join() for t in threads]\n    return sum(found) // 8",
        FUNCTION,
    ),
    ("import tempfile\ndef add(a, b):\n    with tempfile.TemporaryFile() as file:\n        return a + b", FUNCTION),
]


@pytest.fixture(scope="module")
def local(sandbox: Bubblewrap) -> Iterator[LocalSandbox]:
    programs = Bubblewrap()
    with closing(LocalSandbox(programs, programs)) as local:
        yield local


@pytest.mark.parametrize("name", hostile.HOSTILE)
def test_hostile_programs_fail_and_disturb_nobody(
    sandbox: Bubblewrap, local: LocalSandbox, user: User, name: str
) -> None:
    watched = (user.secret.parent, INSIDE)
    before = [state_of(folder) for folder in watched]
    neighbour = NEIGHBOURS[list(hostile.HOSTILE).index(name) % len(NEIGHBOURS)]
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(run_stdio, sandbox, user.source(name), ["input"], ["breach"], LIMITS)
        assert local(*neighbour, limits=LIMITS, stop_at_failure=False) == [PASSED] * 2
        (outcome,) = attack.result()
    seconds = time.monotonic() - start

    assert not outcome.passed and has_verdict(hostile.PROGRAMS[name], outcome.reason), outcome.reason
    assert "breach" not in outcome.reason
    assert seconds < LIMITS.wall_seconds + 5
    assert [state_of(folder) for folder in watched] == before
    assert not user.reached()
    wait_until_gone(f",{MARK},")


@pytest.mark.slow
def test_trace_notices_a_breach(run: Run, trace: Any) -> None:
    program, heard = trace("import os\nbreach('here')\nos.abort()")
    assert not run(program, "assert f()")[0].passed
    assert heard() == b"('here',)"


#: Attacks on the parent process and the input file, which do not exist when functions are called.
OF_STREAMS = {"limits of the parent", "writing to the input"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*hostile.ON_THE_MACHINE, *hostile.ON_THE_USER} - OF_STREAMS))
def test_hostile_programs_fail_as_functions(run: Run, trace: Any, name: str) -> None:
    program, heard = trace(without_verdict(hostile.PROGRAMS[name]))
    start = time.monotonic()
    assert not run(program, "assert answer()", limits=replace(LIMITS, output_bytes=MARK))[0].passed
    assert time.monotonic() - start < 15
    assert heard() == b""
    wait_until_gone(f",{MARK},")
    assert reasons(run("def f(): return 1", "assert f() == 1")) == ["passed"]


#: Programs with their tests, and further fields of these.
FUNCTIONS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "right": ("# passed\nimport math\ndef double(x): return x * 2", cheats.TESTS, {}),
    **{f"cheat: {name}": (text, cheats.TESTS, {"setup": "import math"}) for name, text in cheats.CHEATS.items()},
    **{f"callback: {name}": (program, [test], {}) for name, (test, program) in cheats.CALLBACKS.items()},
    **{f"answers {name}": (program, cheats.ASKING, {}) for name, program in cheats.ANSWERING_PROGRAMS.items()},
    **{f"idiom: {name}": (program, asserts, {}) for name, (program, asserts) in idioms.CASES.items()},
    "idioms": (idioms.PROGRAM, [*idioms.JUDGED.values()], {}),
    "idioms, plain": (idioms.PROGRAM, [*idioms.JUDGED.values()], {"plain": True}),
    "idioms of one process": (idioms.PLAIN_PROGRAM, [*idioms.PLAIN.values()], {"plain": True}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_get_the_verdict_of_their_first_line(run: Run, name: str) -> None:
    program, asserts, fields = FUNCTIONS[name]
    found = reasons(run(program, *asserts, **fields))
    if has_verdict(program, "passed"):
        assert dict(zip(asserts, found, strict=True)) == dict.fromkeys(asserts, "passed")
    else:
        assert has_verdict(program, found[0]), found
        assert "passed" not in found
        if name.startswith("answers"):  # every test was asked
            assert not any("SyntaxError" in reason or "NameError" in reason for reason in found)


@pytest.mark.parametrize("name", idioms.PLAIN)
def test_idioms_of_one_process_fail_in_a_judge(run: Run, name: str) -> None:
    (reason,) = reasons(run(idioms.PLAIN_PROGRAM, idioms.PLAIN[name]))
    assert has_verdict(idioms.PLAIN[name], reason) and reason != ENDED, reason


@pytest.mark.parametrize("name", ["exit before the tests", "hard exit before the tests", "results on all descriptors"])
def test_plain_tests_refuse_exits_and_fake_output(run: Run, name: str) -> None:
    found = reasons(run(cheats.CHEATS[name], *cheats.TESTS, setup="import math", plain=True))
    assert "passed" not in found
