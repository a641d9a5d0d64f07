"""`make demo-smollm2`, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.smollm2 import load_example, write_gguf

SHORT = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "updates_per_rollout": 2,
    "num_generations": 4,
    "train_size": 16,
    "eval_size": 8,
    "eval_steps": 2,
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
}


def test_main_trains_and_prints_answers_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    model, run = tmp_path / "model", tmp_path / "run"
    load_example("smollm2").convert(tmp_path / "model.gguf", model)
    demo = load_example("smollm2_demo")
    fields = [part for name, value in SHORT.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["demo", "--model", str(model), "--output_dir", str(run), *fields])
    monkeypatch.setenv("COLUMNS", "200")
    assert demo.main() == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("smollm2-sums", 2)
    assert len(demo.completions(run / "answers-before")) == len(demo.completions(run / "answers-after")) == 8
    said = capsys.readouterr().out
    problems = len(set(json.loads((run / "verdicts.json").read_text())["question"]))
    for name in ("before", "after"):
        assert f"success {name}: {summary[f'success_{name}']:.1%} (" in said
    assert f"of 8 answers to {problems} held-out problems" in said


def test_show_marks_what_was_right(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = (
        "<|im_start|>system\nBriefly.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    line = {"problem": 0, "prompt": prompt}
    before, after = {**line, "completion": "Well", "score": 0.0}, {**line, "completion": "2\n", "score": 1.0}
    load_example("smollm2_demo").show(
        {"success_before": 0.1, "success_after": 0.9, "eval_size": 256}, 100, [before], [after]
    )
    said = capsys.readouterr().out
    assert "What is 1 + 1? │ Well ✗ │ 2 ✓" in said
    assert "success before: 10.0% (5.5% to 17.4%) of 256 answers to 100 held-out problems" in said
