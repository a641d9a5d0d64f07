import shutil
import subprocess
from pathlib import Path

import pytest

from troll_lab.runs.result import commit_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a package of one file."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@localhost"]
    for arguments in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


def test_commit_of_is_head_and_tells_changed_files(checkout: Path) -> None:
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True)
    commit = commit_of(checkout / "package")
    assert commit is not None
    assert len(commit) == 10 and head.startswith(commit)
    (checkout / "notes").write_text("not of the package")
    assert commit_of(checkout / "package") == commit
    assert commit_of(checkout / "package", checkout / "notes") == commit + "+"
    (checkout / "package" / "__init__.py").write_text("changed = True")
    assert commit_of(checkout / "package") == commit + "+"


def test_commit_of_is_none_for_a_package_that_git_does_not_know(checkout, tmp_path, monkeypatch):
    (checkout / "installed").mkdir()
    (checkout / "installed" / "__init__.py").write_text("")
    assert commit_of(checkout / "installed") is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert commit_of(checkout / "package") is None
