"""What tests/compat.py reads from a pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat import outcome, sources

SKIPPED = "SKIPPED [1] test_it.py:3: why"
ERROR, FAILED = "ERROR test_it.py::test_b - RuntimeError", "FAILED test_it.py::test_a"
ALL_FOUR = f"SF.E\n{SKIPPED}\n{ERROR}\n{FAILED}\n1 failed, 1 passed, 1 skipped, 1 error in 0.02s"


@pytest.mark.parametrize(
    ("log", "status", "counts", "failed"),
    [
        (ALL_FOUR, 1, {"passed": 1, "failed": 1, "skipped": 1, "error": 1}, 2),
        (".\n1 passed in 0.01s", 0, {"passed": 1}, 0),
        ("", 3, {"error": 1}, 1),  # it came to no end
        ("\nno tests ran in 0.01s", 5, {"error": 1}, 1),
    ],
)
def test_failures_errors_and_skips_are_counted(log: str, status: int, counts: dict[str, int], failed: int) -> None:
    ended = outcome(log, status)
    assert (ended.counts, ended.failed) == (counts, failed)
    assert ended.lines == ([SKIPPED, ERROR, FAILED] if failed == 2 else [])


def test_sources_are_a_checkout(tmp_path: Path) -> None:
    assert sources({}, "TRL_SOURCES", "a/file") is sources({"TRL_SOURCES": ""}, "TRL_SOURCES", "a/file") is None
    with pytest.raises(ValueError, match=r"TRL_SOURCES must be a checkout of a, and .* has no a/file"):
        sources({"TRL_SOURCES": str(tmp_path)}, "TRL_SOURCES", "a/file")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    assert sources({"TRL_SOURCES": str(tmp_path)}, "TRL_SOURCES", "a/file") == ("--no-deps", str(tmp_path))
