import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from troll.evaluation.training_task import TrainingTask
from troll.files import write_atomically
from troll.runs.callbacks import ProgressLine, RunFiles


def state_with(logs: list[Any], step: int) -> TrainerState:
    return TrainerState(global_step=step, max_steps=10, log_history=logs, is_world_process_zero=True)


def test_metrics_file_starts_from_the_checkpoint_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')  # an interrupted run went past its checkpoint
    callback = RunFiles(tmp_path, TrainingTask("gsm8k", None, {}, None, {}))
    arguments, control = TrainingArguments(str(tmp_path)), TrainerControl()
    logs: list[Any] = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}]
    callback.on_train_begin(arguments, state_with(logs, 2), control)
    logs.append({"step": 3, "reward": 1.0})
    callback.on_log(arguments, state_with(logs, 3), control)
    callback.on_log(arguments, state_with([*logs, {"step": 3, "train_runtime": 1.0}], 3), control)
    assert [json.loads(line) for line in path.read_text().splitlines()] == logs


def test_progress_prints_what_is_new_in_a_log_where_there_is_no_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    callback = ProgressLine(Console(file=output, width=200))
    arguments, control = TrainingArguments(str(tmp_path)), TrainerControl()
    callback.on_train_begin(arguments, state_with([], 0), control)
    callback.on_step_end(arguments, state_with([], 1), control)
    callback.on_log(arguments, state_with([{"step": 1, "reward": 0.25, "rewards/success/mean": None}], 1), control)
    callback.on_log(arguments, state_with([{"step": 2, "reward": 0.5, "loss": 0.1}], 2), control)
    callback.on_log(arguments, state_with([{"step": 2, "eval_rewards/success/mean": 0.5}], 2), control)
    callback.on_log(arguments, state_with([{"step": 2, "train_runtime": 1.0}], 2), control)
    callback.stop()
    lines = ["step 1/10  reward 0.25", "step 2/10  reward 0.50", "step 2/10  held-out 50%"]
    assert output.getvalue().splitlines() == lines, "the evaluation of a step must not repeat its training"


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a longer old text")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
