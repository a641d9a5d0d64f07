"""verl runs in an environment of its own: elsewhere the tests of this folder are left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.verl.fresh import Fresh

ON_CPU = Path(__file__).resolve().parents[2] / "examples" / "verl" / "cpu"

if find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Read when verl is first imported, here and in every process that a test starts.
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ON_CPU), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(ON_CPU))


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    command = [sys.executable, "-m", "tests.verl.fresh"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Fresh(process.stdin, process.stdout)
        process.kill()  # it has nothing to finish
