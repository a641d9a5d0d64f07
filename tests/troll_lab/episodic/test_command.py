"""`troll train` and `troll report` on movements."""

from pathlib import Path

import pytest

pytest.importorskip("mujoco")

from tests.troll_lab.episodic.test_train import SMALL
from troll_lab import cli


def test_train_and_report_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = [f"--{name}={value}" for name, value in SMALL.items()]
    assert cli.main(["train", "tce-reach", *fields, "--output_dir", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    written = page.read_text()
    page.unlink()
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert page.read_text() == written


def test_mistakes_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tce-reach", "--mean_bond", "1"]) == 2
    assert capsys.readouterr().err == "troll: error: unknown field 'mean_bond', did you mean mean_bound?\n"
