import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from troll_lab.evaluation import training_task as module
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.training_task import TASK_FILE, TrainingTask, find_training_task, from_here
from troll_lab.tasks import TaskConfig

TRAINED = TrainingTask("gsm8k", None, {"prompt": "{question} ½"}, 8, {"enable_thinking": False})


def test_every_folder_of_a_model_has_its_training_task(tmp_path: Path) -> None:
    assert find_training_task(str(tmp_path)) is None
    run = tmp_path / "run"
    for folder in (run / "model", run / "checkpoint-2", run / "checkpoint-4"):
        folder.mkdir(parents=True)
    TRAINED.write(run / "model")
    assert find_training_task(str(run)) == TRAINED, "a run without a file of its own has that of its model"
    TrainingTask("math", None, {}, None, {}).write(run)
    TRAINED.write(run / "checkpoint-2")
    copied = shutil.copytree(run / "model", tmp_path / "copied")
    for folder in (run / "model", run / "checkpoint-2", copied):
        assert find_training_task(str(folder)) == TRAINED
    found = find_training_task(str(run / "checkpoint-4"))
    assert found is not None and found.task == "math", "a checkpoint that was cut short has that of its run"


def test_training_task_has_paths_that_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = TrainingTask.of(TaskConfig("own.yaml:x", dataset_path="rows.jsonl"), {"thinking": True})
    assert trained == TrainingTask(f"{tmp_path}/own.yaml:x", f"{tmp_path}/rows.jsonl", {}, 256, {"thinking": True})
    assert from_here(f"{tmp_path}/rows.jsonl") == "rows.jsonl"
    assert trained.is_task("own.yaml:x")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert from_here(f"{tmp_path}/rows.jsonl") == f"{tmp_path}/rows.jsonl"
    assert trained.is_task("../own.yaml:x")
    assert not trained.is_task("own.yaml:x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "task_options cannot be None"),
        (json.dumps({"task": 1}), "task cannot be 1"),
    ],
)
def test_file_that_is_no_training_task_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / TASK_FILE).write_text(text)
    with pytest.raises(EvaluationError, match=rf"task\.json is not what troll train writes .*{reason}"):
        find_training_task(str(tmp_path))


def test_training_task_of_the_hub_names_no_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Mock(return_value=str(tmp_path / TASK_FILE))
    monkeypatch.setattr(module, "hf_hub_download", download)
    TRAINED.write(tmp_path)
    assert find_training_task("you/model", "v2") == TRAINED
    download.assert_called_once_with("you/model", TASK_FILE, revision="v2")
    TrainingTask("/etc/own.py", "/etc/rows.jsonl", {"max_terms": 3}, 8, {"thinking": False}).write(tmp_path)
    found = find_training_task("you/model")
    assert found == TrainingTask(None, None, {"max_terms": 3}, 8, {"thinking": False})
    assert not found.is_task("/etc/own.py")


@pytest.mark.parametrize(
    "error", [EntryNotFoundError(), LocalEntryNotFoundError("not cached"), ConnectionError(), ValueError()]
)
def test_hub_may_lack_it_or_be_out_of_reach(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hf_hub_download", Mock(side_effect=error))
    assert find_training_task("you/model") is None
