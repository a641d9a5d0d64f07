"""A run: its folder, its page, and that a resumed run gives the numbers of one that was never interrupted."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("mujoco")

from troll_lab.episodic import train as module
from troll_lab.episodic.config import EpisodicConfig, is_episodic
from troll_lab.episodic.train import train
from troll_lab.reports.movements_page import write_report

SMALL: dict[str, Any] = {"episodes": 4, "eval_episodes": 8, "num_envs": 4, "iterations": 4, "eval_every": 2}
SMALL |= {"updates": 2, "critic_updates": 2, "num_bases": 2, "hidden": 8}


def run(folder: Path, **settings: Any) -> str:
    said = io.StringIO()
    assert train(EpisodicConfig(output_dir=str(folder), **{**SMALL, **settings}), Console(file=said, width=200))
    return said.getvalue()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    said = run(folder)
    assert f"training reach by segments (TCE) within a trust region of 0.05 and 0.0005 nats; output in {folder}" in said
    assert "iteration 2/4: return -" in said and said.strip().endswith("report.html")
    return folder


def test_train_leaves_metrics_and_a_summary(finished: Path) -> None:
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["environment_steps"] for row in rows] == [0, 400, 800, 1200, 1600]
    assert ["eval_success" in row for row in rows] == [True, False, True, False, True]
    low, high = rows[-1]["eval_success_interval"]
    assert 0 <= low <= rows[-1]["eval_success"] <= high <= 1
    low, high = rows[-1]["eval_return_interval"]
    assert low < rows[-1]["eval_return"] < high
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["iterations"] == 4
    assert (summary["return_before"], summary["return_after"]) == (rows[0]["eval_return"], rows[-1]["eval_return"])


def test_report_has_curves_and_the_ways_before_and_after(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    for card in ("success", "return", "kl-to-the-policy-before", "entropy", "ways-before", "ways-after"):
        assert f'id="{card}"' in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert is_episodic(finished)
    assert write_report(finished).read_text() == page  # the same files, the same bytes
    paths = json.loads((finished / "paths.json").read_text())
    assert len(paths["before"]) == len(paths["after"]) == len(paths["target"]) == 8
    assert paths["before"] != paths["after"]
    assert [path[0] for path in paths["before"]] == [path[0] for path in paths["after"]]


def test_interrupted_run_resumes_exactly(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = module.Learner.update
    calls: list[None] = []

    def interrupt(*arguments: Any) -> dict[str, float]:
        calls.append(None)
        updated = update(*arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt  # after the networks have changed, before the checkpoint
        return updated

    monkeypatch.setattr(module.Learner, "update", interrupt)
    folder = tmp_path / "run"
    config = EpisodicConfig(output_dir=str(folder), **SMALL)
    assert not train(config, Console(file=io.StringIO()))
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2]
    assert "interrupted" in (folder / "report.html").read_text()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "environment_steps": 1200}\n')  # a crash came before its checkpoint
    run(folder, resume_from_checkpoint=True)
    assert metrics(folder) == metrics(finished)
    assert json.loads((folder / "paths.json").read_text()) == json.loads((finished / "paths.json").read_text())


def test_resumed_run_may_be_longer_but_not_another(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, iterations=2)
    run(folder, iterations=4, resume_from_checkpoint=True)
    assert metrics(folder) == metrics(finished)
    with pytest.raises(ValueError, match=r"other settings: mean_bound is 0\.05 there, 0\.1 here"):
        run(folder, mean_bound=0.1, resume_from_checkpoint=True)


def test_folders_in_use_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a run: choose another with --output_dir, or continue"):
        run(finished)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: .* has no checkpoint\.pt"):
        run(tmp_path, resume_from_checkpoint=True)
    (tmp_path / "thesis.txt").touch()
    for config in (None, "model_name_or_path: toy\n"):  # the second is a run of a language model
        if config is not None:
            (tmp_path / "config.yaml").write_text(config)
        with pytest.raises(ValueError, match="is not empty and holds no run on movements"):
            run(tmp_path)
        assert config is None or (tmp_path / "config.yaml").read_text() == config


@pytest.mark.parametrize("points", [1, 101])
def test_segment_points_out_of_range_are_refused_before_a_file_is_written(tmp_path: Path, points: int) -> None:
    with pytest.raises(ValueError, match=f"segment_points must be from 2 to the number of steps 100, got {points}"):
        run(tmp_path, segment_points=points)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_other_methods_name_themselves(tmp_path: Path) -> None:
    said = run(tmp_path / "run", iterations=1, events="episodes", constraint="clip", segment_points=1)
    assert "by whole episodes within a clip of 0.2" in said
    assert "projected_fraction" not in metrics(tmp_path / "run")[-1]
