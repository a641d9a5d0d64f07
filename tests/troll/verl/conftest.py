"""verl runs in an environment of its own: elsewhere the tests of this folder are left out."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.troll.verl.fresh import Fresh, started

ON_CPU = Path(__file__).resolve().parents[3] / "examples" / "verl" / "cpu"

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
    with started() as fresh:
        yield fresh
