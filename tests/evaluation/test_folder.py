from __future__ import annotations

import json
from pathlib import Path

import pytest

from troll.evaluation.config import EvaluationError
from troll.evaluation.folder import claimed, read_object

SETTINGS = {"model": "m", "seed": 0}


def test_the_same_settings_go_on_and_tasks_may_be_added(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for tasks in ({"x": {"problems": 1}}, {"y": {"problems": 2}}, {"x": {"problems": 1}}):
        with claimed(folder, SETTINGS, tasks):
            pass
    recorded = json.loads((folder / "settings.json").read_text())
    assert recorded == {**SETTINGS, "tasks": {"x": {"problems": 1}, "y": {"problems": 2}}}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with claimed(tmp_path, SETTINGS, {"x": {"problems": 1}}):
        pass
    for settings, tasks, message in (
        ({"model": "m", "seed": 1}, {}, "seed is 0 there and 1 here"),
        ({"model": "m"}, {}, "seed is 0 there and null here"),
        (SETTINGS, {"x": {"problems": 2}}, "x: problems is 1 there and 2 here"),
    ):
        with pytest.raises(EvaluationError, match=message), claimed(tmp_path, settings, tasks):
            pytest.fail("the folder was given away")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(EvaluationError, match="is not empty and holds no evaluation"), claimed(tmp_path, {}, {}):
        pass
    with pytest.raises(EvaluationError, match="cannot be used"), claimed(tmp_path / "precious" / "x", {}, {}):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "precious"]


def test_two_commands_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, SETTINGS, {}),
        pytest.raises(EvaluationError, match="another troll eval is at work"),
        claimed(tmp_path, SETTINGS, {}),
    ):
        pass
    with claimed(tmp_path, SETTINGS, {}):
        pass


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("[]")
    with (
        pytest.raises(EvaluationError, match=r"settings\.json: expected a JSON object.*: choose"),
        claimed(tmp_path, SETTINGS, {}),
    ):
        pass
    assert read_object(tmp_path / "missing.json") == {}
