"""What tests/compat.py reads from a pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import outcome, sources

SOURCES = {
    "all four": (
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.skip(reason='why')\n"
        "def test_is_skipped(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError\n"
        "def test_has_an_error(broken): pass\n",
        {"passed": 1, "failed": 1, "skipped": 1, "error": 1},
        2,
    ),
    "passed": ("def test_passes(): pass\n", {"passed": 1}, 0),
    "no end": ("import os\ndef test_dies(): os._exit(3)\n", {"error": 1}, 1),
    "no tests": ("", {"error": 1}, 1),
}


@pytest.mark.parametrize("name", SOURCES)
def test_failures_errors_and_skips_are_counted(tmp_path: Path, name: str) -> None:
    source, counts, failed = SOURCES[name]
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:xdist", "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ended = outcome(done.stdout, done.returncode)
    assert (ended.counts, ended.failed) == (counts, failed)
    assert [line.split()[0] for line in ended.lines] == (["SKIPPED", "ERROR", "FAILED"] if failed == 2 else [])


def test_sources_are_a_checkout(tmp_path: Path) -> None:
    assert sources({}, "TRL_SOURCES", "a/file") is sources({"TRL_SOURCES": ""}, "TRL_SOURCES", "a/file") is None
    with pytest.raises(ValueError, match=r"TRL_SOURCES must be a checkout of a, and .* has no a/file"):
        sources({"TRL_SOURCES": str(tmp_path)}, "TRL_SOURCES", "a/file")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    assert sources({"TRL_SOURCES": str(tmp_path)}, "TRL_SOURCES", "a/file") == ("--no-deps", str(tmp_path))
