"""The files of this checkout."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: For tests of these files: a source distribution has no list of them.
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout by git")


def files(folder: str = ".") -> set[str]:
    """The paths of a folder's files, from the root of the checkout, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in listed if (ROOT / name).is_file()}
