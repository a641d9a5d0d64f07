import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tests.troll_sandbox import hostile
from tests.troll_sandbox.processes import Run, run_in
from troll_sandbox import bubblewrap
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.function_calls import Judge
from troll_sandbox.launch import Process


@pytest.fixture(scope="module")
def sandbox() -> Bubblewrap:
    return Bubblewrap()


@pytest.fixture(scope="module")
def judge(sandbox: Bubblewrap) -> Iterator[Judge]:
    with closing(Judge(sandbox)) as judge:
        yield judge


@pytest.fixture
def run(sandbox: Bubblewrap, judge: Judge) -> Run:
    return partial(run_in, sandbox, judge)


@pytest.fixture(params=[False, True], ids=["judged", "plain"])
def plain(request: pytest.FixtureRequest) -> bool:
    """Whether program and tests run in one process."""
    return bool(request.param)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[str, Callable[[], bytes]]]]:
    """Gives programs a function `breach`; this process reads its calls, however the program ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    class Hearing(Process):
        def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> None:
            super().__init__(command, pass_fds=(*pass_fds, write), **options)

    monkeypatch.setattr(bubblewrap, "Process", Hearing)

    def traced(program: str) -> tuple[str, Callable[[], bytes]]:
        breach = f"def breach(*what, write=__import__('os').write):\n    write({write}, repr(what).encode())\n"
        return breach + hostile.PRELUDE + program, heard

    def heard() -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(read, 1000)
        return b""

    yield traced
    os.close(read)
    os.close(write)
