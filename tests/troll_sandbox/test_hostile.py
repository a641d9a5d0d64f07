import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.troll_sandbox.hostile import HOSTILE
from tests.troll_sandbox.processes import reason, running, wait_until_gone
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.launch import INSIDE
from troll_sandbox.limits import MEBIBYTE, Limits
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
        source = HOSTILE[name].replace("$SECRET", str(self.secret))
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


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail_and_are_contained(sandbox: Bubblewrap, user: User, name: str) -> None:
    watched = (user.secret.parent, INSIDE)
    before = [state_of(folder) for folder in watched]
    start = time.monotonic()
    (outcome,) = run_stdio(sandbox, user.source(name), ["input"], ["breach"], LIMITS)
    seconds = time.monotonic() - start

    assert not outcome.passed
    assert outcome.reason
    assert "breach" not in outcome.reason
    assert seconds < LIMITS.wall_seconds + 5
    assert [state_of(folder) for folder in watched] == before
    assert not user.reached()
    wait_until_gone(f",{MARK},")


def test_fcntl_refuses_only_leases_and_watches(sandbox: Bubblewrap) -> None:
    program = """
import errno, fcntl, os
file = os.open("own", os.O_RDWR | os.O_CREAT)
folder = os.open(".", os.O_RDONLY)
for number, command, argument in (
    (file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    (file, fcntl.F_GETLEASE, 0),
    (folder, fcntl.F_NOTIFY, fcntl.DN_MODIFY),
    (file, fcntl.F_SETOWN, 1),
):
    try:
        print(fcntl.fcntl(number, command, argument))
    except OSError as error:
        print(errno.errorcode[error.errno])
print(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
print(fcntl.fcntl(file, fcntl.F_GETFD) == fcntl.FD_CLOEXEC)
fcntl.fcntl(file, fcntl.F_SETFD, 0)
print(fcntl.fcntl(file, fcntl.F_GETFD) == 0)
print(fcntl.fcntl(file, fcntl.F_DUPFD, 50))
fcntl.lockf(file, fcntl.LOCK_EX)
fcntl.flock(file, fcntl.LOCK_SH)
"""
    wanted = "EPERM\n" * 4 + "True\nTrue\nTrue\n50\n"
    assert reason(sandbox, program, "", wanted, LIMITS) == "passed"


def test_resident_memory_stays_within_the_limit(sandbox: Bubblewrap) -> None:
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
        run = pool.submit(run_stdio, sandbox, program, [""], [""], LIMITS)
        peak = 0
        while not run.done():
            peak = max([peak, *map(resident_peak, running(f",{MARK},"))])
            time.sleep(0.01)
    assert run.result()[0].reason == "time limit"
    assert LIMITS.memory_bytes / 2 < peak <= LIMITS.memory_bytes


def resident_peak(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0
