"""What each target would do, in an environment that does not exist yet; nothing is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def installed_by(target: str, environment: Path) -> tuple[list[str], str]:
    """The extras that a target installs, in their order, and its last command."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "--dry-run", target, f"VENV={environment}", f"VERL_VENV={environment}-verl"]
    command.append(f"VLLM_VENV={environment}-vllm")
    # Under `make test`, this make would be told that it is another one's.
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    lines = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return re.findall(r'--editable "\.\[(.*?)\]"', "\n".join(lines)), lines[-1]


def test_the_demo_installs_what_training_needs_and_no_more(tmp_path: Path) -> None:
    extras, last = installed_by("demo", tmp_path / ".venv")
    assert extras == ["trl,tasks,report"]
    assert "troll train quickstart" in last


def test_tests_and_checks_add_theirs_to_the_same_environment(tmp_path: Path) -> None:
    assert installed_by("check", tmp_path / ".venv")[0] == ["trl,tasks,report", "dev"]
    assert installed_by("setup", tmp_path / ".venv")[0] == ["trl,tasks,report", "dev"]
    assert installed_by("test", tmp_path / ".venv")[0] == ["trl,tasks,report", "dev", "verl-dev"]


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    environment = tmp_path / ".venv"
    environment.mkdir()
    (environment / "installed-for-training").touch()
    assert installed_by("demo", environment)[0] == []
    assert installed_by("check", environment)[0] == ["dev"]
    (environment / "installed").touch()
    assert installed_by("check", environment)[0] == []


def test_the_engine_comes_by_its_hash_and_without_torchvision(tmp_path: Path) -> None:
    extras, last = installed_by("vllm-setup", tmp_path / ".venv")
    assert extras == ["vllm-dev", "vllm-dev"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^VLLM_SHA256 := [0-9a-f]{64}$", makefile, re.MULTILINE) and "--require-hashes" in makefile
    assert last.endswith("installed-with-engine")
