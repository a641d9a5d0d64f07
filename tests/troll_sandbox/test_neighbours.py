import json
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.troll_sandbox.hostile import HOSTILE, ON_THE_MACHINE, ON_THE_USER
from tests.troll_sandbox.processes import wait_until_gone
from troll_lab.rewards.code import CodeGrader
from troll_sandbox.limits import MEBIBYTE, Limits

pytestmark = pytest.mark.needs_bubblewrap

MARK = 5_000_000 + os.getpid() % 100_000
LIMITS = Limits(
    cpu_seconds=0.5, idle_seconds=1, memory_bytes=256 * MEBIBYTE, disk_bytes=8 * MEBIBYTE, output_bytes=MARK
)

ATTACKS = [*ON_THE_MACHINE, *(name for name in ON_THE_USER if "$" not in HOSTILE[name]), "fake marker"]

STREAM = json.dumps({"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]})
FUNCTION = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(5, 6) == 11"]})

#: Right programs that do what attacks could disturb.
READ = "a, b = map(int, input().split())\n"
RIGHT = [
    (READ + "print(a + b)", STREAM),
    (READ + "import time\ntime.sleep(0.2)\nprint(a + b)", STREAM),
    (READ + "open('own', 'wb').write(bytes(1 << 20))\nprint(a + b)", STREAM),
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


@pytest.fixture
def grader() -> Iterator[CodeGrader]:
    with closing(CodeGrader(limits=LIMITS, workers=4)) as grader:
        yield grader


def test_right_programs_keep_their_verdicts_next_to_attacks(grader: CodeGrader) -> None:
    assert len(ATTACKS) >= 50
    rows: list[tuple[str, str, bool]] = []
    for number, name in enumerate(ATTACKS):
        program, tests = RIGHT[number % len(RIGHT)]
        rows.append((f"# attack {number}\n{HOSTILE[name]}", (STREAM, FUNCTION)[number % 2], False))
        rows.append((f"# right {number}\n{program}", tests, True))  # equal programs would run once
    verdicts = grader.grade(
        [f"```python\n{program}\n```" for program, *_ in rows], tests=[tests for _, tests, _ in rows]
    )
    wrong = [
        (verdict.reason, program.split("\n")[0])
        for verdict, (program, _, right) in zip(verdicts, rows, strict=True)
        if verdict.success != right or verdict.score is None
    ]
    assert not wrong
    wait_until_gone(f",{MARK},", 10)
