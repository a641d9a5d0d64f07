"""What make does, with stand-ins for the environments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, *arguments: str, **more: str) -> tuple[int, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | more
    command = ["make", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, stdout=-1, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def set_up(checkout: Path, environment: str, status: int) -> None:
    """An environment whose pytest logs its start and end, and exits with a status."""
    script = f"#!/bin/sh\necho start {environment} >> log\nsleep 0.2\necho end >> log\nexit {status}\n"
    (checkout / environment / "bin").mkdir(parents=True)
    (checkout / environment / "bin" / "pytest").write_text(script)
    (checkout / environment / "bin" / "pytest").chmod(0o755)
    for stamp in ("installed-for-training", "installed"):
        (checkout / environment / stamp).touch()


@pytest.mark.parametrize(
    ("trl", "verl", "options"), [(0, 0, ()), (1, 0, ("-j",)), (0, 1, ("-j", "2", "-s")), (1, 1, ())]
)
def test_make_test_runs_both_suites_and_reports_both(
    checkout: Path, trl: int, verl: int, options: tuple[str, ...]
) -> None:
    set_up(checkout, ".venv", trl)
    set_up(checkout, ".venv-verl", verl)
    status, output = make(checkout, "test", *options)
    assert (checkout / "log").read_text().split("\n") == ["start .venv", "end", "start .venv-verl", "end", ""]
    ends = ("passed", "FAILED")
    assert f"make test: test-trl {ends[trl]}, test-verl {ends[verl]}\n" in output
    assert (status != 0) == bool(trl or verl)


@pytest.mark.parametrize(("trl", "verl"), [(0, 0), (1, 0), (0, 1)])
def test_slow_tests_of_both_suites_run(checkout: Path, trl: int, verl: int) -> None:
    set_up(checkout, ".venv", trl)
    set_up(checkout, ".venv-verl", verl)
    (checkout / ".venv" / "bin" / "python").symlink_to("/bin/true")  # finds DeepSpeed
    status, _ = make(checkout, "test-slow")
    assert (checkout / "log").read_text() == "start .venv\nend\nstart .venv-verl\nend\n"
    assert (status != 0) == bool(trl or verl)


@pytest.mark.parametrize(("works", "other"), [(".venv", "test-verl FAILED"), (".venv-verl", "test-trl FAILED")])
def test_make_test_runs_the_suite_that_could_be_set_up(checkout: Path, works: str, other: str) -> None:
    set_up(checkout, works, 0)
    status, output = make(checkout, "test", "-j", "PYTHON=false")
    assert status != 0 and other in output and output.count("FAILED") == 1
    assert (checkout / "log").read_text() == f"start {works}\nend\n"


def test_make_setup_names_the_compiler_that_it_needs(checkout: Path) -> None:
    for name, script in (("python", "exit 0"), ("pip", "echo cannot build; exit 1")):
        program = checkout / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    status, output = make(checkout, "setup", f"PYTHON={sys.executable}", CC="/nowhere/cc")
    assert status != 0 and "cannot build" in output
    assert "C compiler and Python's headers (Debian: apt-get install gcc python3-dev)" in output
    assert not (checkout / ".venv" / "installed-for-training").exists()
