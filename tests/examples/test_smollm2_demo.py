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
    summary = json.loads((run / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("smollm2-sums", 2)
    assert len(demo.completions(run / "before")) == len(demo.completions(run / "after")) == 8
    said = capsys.readouterr().out
    for name in ("before", "after"):
        found = json.loads((run / name / "results.json").read_text())["tasks"]["reasoning_gym:chain_sum"]
        low, high = found["intervals"]["pass@1"]
        assert f"success {name}: {found['metrics']['pass@1']:.1%} ({low:.1%} to {high:.1%}) of 8 answers" in said


def test_show_marks_what_was_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = (
        "<|im_start|>system\nBriefly.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    for name, answer, score in (("before", "Well", 0.0), ("after", "2\n", 1.0)):
        (tmp_path / name / "generations").mkdir(parents=True)
        line = {"problem": 0, "prompt": prompt, "completion": answer, "score": score}
        (tmp_path / name / "generations" / "sums.jsonl").write_text(f"{json.dumps(line)}\n")
        task = {"completions": 256, "metrics": {"pass@1": score}, "intervals": {"pass@1": [score / 2, 1 - score / 2]}}
        (tmp_path / name / "results.json").write_text(json.dumps({"tasks": {"sums": task}}))
    load_example("smollm2_demo").show(tmp_path / "before", tmp_path / "after")
    said = capsys.readouterr().out
    assert "What is 1 + 1? │ Well ✗ │ 2 ✓" in said
    assert "success before: 0.0% (0.0% to 100.0%) of 256 answers" in said
