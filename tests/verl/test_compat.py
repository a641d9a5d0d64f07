"""What tests/verl/compat.py takes for a checkout of verl, and which verl an environment has."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import verl

from tests.verl.compat import ENVIRONMENTS, SOURCES, environments, verl_of


def test_a_checkout_is_one_more_environment(tmp_path: Path) -> None:
    assert environments({}) == ENVIRONMENTS
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.10.0.dev")
    assert environments({"VERL_SOURCES": str(tmp_path)}) == {**ENVIRONMENTS, SOURCES: ("--no-deps", str(tmp_path))}


def test_another_folder_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="VERL_SOURCES must be a checkout of verl"):
        environments({"VERL_SOURCES": str(tmp_path)})


def test_the_verl_of_an_environment_is_the_one_that_it_imports() -> None:
    assert verl_of(Path(sys.executable)) == (version("verl"), Path(verl.__file__))
