"""A task as verl reads it: what `examples/verl/prepare.py` writes is graded by the rewards that the scripts name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from troll.rewards.mathematics import compute_score

ROOT = Path(__file__).parents[2]


def test_rows_have_verls_columns_and_their_gold_answers_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ROOT / "examples" / "tasks" / "geometry.yaml"
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(task), str(tmp_path), "--eval_size", "2"])
    runpy.run_path(str(ROOT / "examples" / "verl" / "prepare.py"), run_name="__main__")
    assert "train.parquet" in capsys.readouterr().out
    for name in ("train", "test"):
        rows = read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert rows
        for index, row in enumerate(rows):
            assert row.keys() == {"data_source", "ability", "prompt", "reward_model", "extra_info"}
            assert row["prompt"][0]["role"] == "user" and row["extra_info"] == {"index": index}
            gold = row["reward_model"]["ground_truth"]
            answer = rf"It is \boxed{{{gold}}}."
            assert compute_score(row["data_source"], answer, gold, row["extra_info"])["score"] == 1
            assert compute_score(row["data_source"], "", gold, row["extra_info"])["score"] == 0
