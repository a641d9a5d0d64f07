"""Ordinary programs work under the system call filter."""

import importlib.util
from pathlib import Path

import pytest

from tests.troll_sandbox.processes import reason
from troll_sandbox.bubblewrap import Bubblewrap

pytestmark = pytest.mark.needs_bubblewrap

#: Each prints 3.
PROGRAMS = {
    "threads": """
import queue, threading
numbers, lock, total = queue.Queue(), threading.Lock(), 0
def add():
    global total
    with lock:
        total += numbers.get(timeout=5)
for n in (0, 1, 2):
    numbers.put(n)
threads = [threading.Thread(target=add) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(total)
""",
    "an executor": """
from concurrent.futures import ThreadPoolExecutor, as_completed
with ThreadPoolExecutor(8) as pool:
    print(sum(run.result() for run in as_completed([pool.submit(abs, -n) for n in range(3)])))
""",
    "asyncio": """
import asyncio
async def wait(n):
    await asyncio.sleep(0.01)
    return await asyncio.to_thread(abs, -n)
async def main():
    async with asyncio.timeout(5) if hasattr(asyncio, "timeout") else asyncio.Lock():
        print(sum(await asyncio.gather(*map(wait, range(3)))))
asyncio.run(main())
""",
    "numbers": """
import cmath, decimal, fractions, math, random, statistics
decimal.getcontext().prec = 50
random.seed(0)
assert decimal.Decimal(2).sqrt() ** 2 != 2 and fractions.Fraction(1, 3) * 3 == 1
assert math.isqrt(10) == 3 == statistics.median([1, 3, 5]) and abs(cmath.exp(1j * math.pi) + 1) < 1e-9
assert 0 <= random.SystemRandom().random() < 1 and random.randint(1, 3) <= 3
print(math.gcd(6, 9))
""",
    "texts and formats": """
import base64, bz2, csv, datetime, hashlib, io, json, lzma, pickle, re, secrets, string, struct, textwrap, uuid, zlib
data = b"abc" * 100
for packer in (bz2, lzma, zlib):
    assert packer.decompress(packer.compress(data)) == data
assert hashlib.sha256(b"").hexdigest().startswith("e3b0") and len(secrets.token_bytes(4)) == 4
assert json.loads(json.dumps({"a": [1, None]})) == pickle.loads(pickle.dumps({"a": [1, None]}))
assert list(csv.reader(io.StringIO("1,2"))) == [["1", "2"]] and struct.unpack("<i", struct.pack("<i", 7)) == (7,)
assert base64.b64decode(base64.b64encode(data)) == data and uuid.uuid4() != uuid.uuid4()
print(len(re.findall(r"[a-c]", "abc")), end="")
""",
    "time": """
import datetime, time, zoneinfo
start = time.perf_counter()
time.sleep(0.01)
assert time.perf_counter() - start >= 0.01 and time.process_time() >= 0 and time.gmtime(0).tm_year == 1970
noon = datetime.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
print(noon.utcoffset().seconds // 3600 + 1)
""",
    "files": """
import fcntl, glob, mmap, os, pathlib, shutil, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(), tempfile.SpooledTemporaryFile():
    path = pathlib.Path(folder, "a", "b")
    path.mkdir(parents=True)
    (path / "c").write_text("3")
    (path / "d").symlink_to("c")
    (path / "c").rename(path / "e")
    shutil.copyfile(path / "e", path / "c")
    os.truncate(path / "e", 0)
    with open(path / "e", "r+b") as other:
        fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other.write(bytes(4096))
        other.flush()
        os.fsync(other.fileno())
        with mmap.mmap(other.fileno(), 0) as memory:
            memory[0] = 1
            memory.flush()
    with zipfile.ZipFile(path / "z", "w") as archive:
        archive.write(path / "c", "c")
    assert sorted(map(os.path.basename, glob.glob(f"{folder}/a/b/*"))) == ["c", "d", "e", "z"]
    assert os.stat(path / "e").st_size == 4096 and [entry.name for entry in os.scandir(folder)] == ["a"]
    text = (path / "d").read_text()
    shutil.rmtree(path)
print(text)
""",
    "a data base": """
import sqlite3
for place in (":memory:", "file.db"):
    with sqlite3.connect(place) as base:
        base.execute("create table t (x integer)")
        base.executemany("insert into t values (?)", [(1,), (2,)])
        (total,) = base.execute("select sum(x) from t").fetchone()
print(total)
""",
    "containers and functions": """
import array, bisect, collections, contextlib, copy, dataclasses, enum, functools, heapq, itertools, operator, typing
@functools.lru_cache(None)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
heap = [3, 1, 2]
heapq.heapify(heap)
assert heapq.heappop(heap) == 1 and collections.Counter("aab")["a"] == 2 and bisect.bisect([1, 2], 1) == 1
print(fibonacci(4))
""",
    "signals and the interpreter": """
import faulthandler, gc, os, platform, resource, select, signal, socket, sys, traceback, warnings
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
signal.signal(signal.SIGUSR1, lambda *_: seen.append(2))
os.kill(os.getpid(), signal.SIGUSR1)
resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
a, b = socket.socketpair()
a.send(b"x")
assert select.select([b], [], [], 1)[0] and b.recv(1) == b"x" and os.cpu_count() and platform.system() == "Linux"
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print(sum(seen))
""",
    "forbidden calls fail cleanly": """
import multiprocessing, os, shutil, socket, subprocess
for attempt in (
    lambda: subprocess.run(["true"]),
    lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    lambda: socket.create_connection(("127.0.0.1", 80)),
    lambda: os.chmod("/tmp", 0o777),
):
    try:
        attempt()
    except OSError:
        continue
    raise AssertionError
print(3)
""",
}

NUMPY = """
import numpy as np
from numpy import fft, linalg, random
a = random.default_rng(0).normal(size=(200, 200))
assert np.allclose(linalg.inv(a) @ a, np.eye(200)) and np.allclose(fft.ifft(fft.fft(a)).real, a)
np.save("a.npy", a)
assert np.array_equal(np.load("a.npy", mmap_mode="r"), a) and np.loadtxt("/dev/stdin").tolist() == [1.0, 2.0]
print(np.arange(3).sum())
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_work(sandbox: Bubblewrap, name: str) -> None:
    assert reason(sandbox, PROGRAMS[name]) == "passed"


def test_numpy_works() -> None:
    found = importlib.util.find_spec("numpy")
    if found is None or found.origin is None:
        pytest.skip("needs numpy")
    assert reason(Bubblewrap(packages=[Path(found.origin).parents[1]]), NUMPY, "1 2") == "passed"
