"""The example of a whole loop, with a model and questions of a user."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"


def test_loop_skips_blank_lines_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in runpy.run_path(str(EXAMPLE))["tiny_model"]():
        part.save_pretrained(tmp_path / "model")
    data = tmp_path / "questions.tsv"
    data.write_text("cab>\tabc\n\nba>\tab\n \n", encoding="utf-8")
    options: dict[str, Any] = {"model": tmp_path / "model", "data": data, "rollouts": 1, "prompts": 2, "group": 2}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["loop.py", *arguments, "--updates=2", "--max_new_tokens=2"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 2
