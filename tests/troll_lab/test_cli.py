import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

from tests.troll_lab.runs.conftest import tiny_model  # noqa: F401  a fixture
from troll_lab import cli
from troll_lab.rewards.mathematics import MathGrader
from troll_sandbox.errors import SandboxError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quikstart"], "did you mean quickstart"),
        (["train", "quickstart", "--model_name_or_path", "/nonexistent"], "cannot load the model"),
        (["train", "--kl_bound", "0.1", "quickstart"], "the recipe comes first: troll train RECIPE"),
        (["train", "quickstart", "--task", "reasoning_gym:chain_sums"], "did you mean chain_sum? it has "),
        (["train", "quickstart", "--task_options.max_term", "2"], "no option 'max_term', did you mean max_terms? it"),
        (["train", "smollm2-sums"], "run make smollm2 in a checkout of TROLL, and give its folder models/SmolLM2"),
        (["train", "smollm2-sums", "--model_name_or_path", "models/SmolLM2-135M-Instruct"], "run make smollm2"),
        (["compare", "--seeds", "3", "quickstart"], "the recipe comes first: troll compare RECIPE"),
        (["compare", "quickstart", "quikstart", "--seeds", "3"], "did you mean quickstart"),
        (["compare", "quickstart", "--kl_bound", "0.1", "-1"], "kl_bound must be above 0, got -1.0"),
        (["report", "/nonexistent"], "not a run folder"),
        (["report", __file__], "not a run folder"),
        (["report", "/nonexistent", "/nonexistent"], "neither a run folder"),
        (["report", "/nonexistent", "--output_dir", "x"], "for the page about several runs"),
        (["eval", "/nonexistent"], "there is no folder /nonexistent: check the path; for a model on the hub, name a"),
        (["eval", "runs"], "there is no folder runs: check the path"),
        (["eval", str(Path(__file__).parent)], "has no task.json of troll train: name a task with --task"),
        (["eval", "runs/wide", "--task", "gsm8k"], "cannot load the model 'runs/wide': there is no such folder"),
        (["eval", "m", "--task", "gsm8k", "math", "--dataset_path", "x"], "write --dataset_path gsm8k=... math=..."),
        (["tasks", "check", "gsm9k"], "unknown task 'gsm9k', did you mean gsm8k? known tasks: aime24"),
        (["tasks", "check", "reasoning-gym:chain_sum"], "did you mean reasoning_gym? known tasks"),
        (["tasks", "check", "gsm8k", "--limit", "0"], "limit must be at least 1, got 0"),
        # What argparse finds.
        (["eval", "m", "--task", "gsm8k", "--samples", "two"], "argument --samples: invalid int value: 'two'"),
        (["evaluate"], "invalid choice: 'evaluate'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        assert cli.main(arguments) == 2
    except SystemExit as ended:  # of argparse
        assert ended.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("troll: error: ")
    assert error.count("\n") == 1
    assert not {"config.yaml", "compare.json"} & {path.name for path in tmp_path.rglob("*")}, "nothing has begun"


def test_eval_goes_on_where_it_was_stopped(tiny_model, tmp_path, monkeypatch, capsys):  # noqa: F811
    from troll_lab.evaluation import run

    command = ["eval", str(tiny_model), "--task", "reasoning_gym:chain_sum", "--eval_size", "2"]
    command += ["--max_new_tokens", "4", "--output_dir", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(run, "load_model", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(command) == 130
    assert "the same command resumes" in capsys.readouterr().out
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "reasoning_gym:chain_sum" in shown
    assert str(tmp_path / "out" / "results.json") in shown
    assert cli.main([*command, "--seed", "1"]) == 2
    assert "seed is 0 there and 1 here" in capsys.readouterr().err


def test_eval_prompts_a_copied_model_as_its_training_did(tiny_model, tmp_path, monkeypatch, capsys):  # noqa: F811
    from troll_lab.evaluation.training_task import TrainingTask

    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "copied")
    options = {"min_terms": 2, "max_terms": 2, "prompt": "{expression} ="}
    TrainingTask("reasoning_gym:chain_sum", None, options, 3, {}).write(tmp_path / "copied")
    command = ["eval", "copied", "--max_new_tokens", "2"]

    def prompts(folder: str) -> list[str]:
        path = tmp_path / folder / "generations" / "reasoning_gym-chain_sum.jsonl"
        return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]

    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert 'as in training: task reasoning_gym:chain_sum, task_options {"min_terms": 2' in shown.out
    assert "warning" not in shown.err
    assert len(prompts("runs/eval-copied")) == 3
    assert all(re.fullmatch(r"\d+ [+-] \d+ =", prompt) for prompt in prompts("runs/eval-copied"))

    assert cli.main([*command, "--task_options", '{"prompt": "{question}"}', "--output_dir", "other"]) == 0
    shown = capsys.readouterr()
    assert "troll: warning: reasoning_gym:chain_sum is not prompted as the model was in training" in shown.err
    assert 'task_options.prompt was "{expression} =" and is "{question}"' in shown.err
    assert not any(re.fullmatch(r"\d+ [+-] \d+ =", prompt) for prompt in prompts("other"))


def test_eval_tells_a_mistake_in_local_data_alone(tiny_model, tmp_path, monkeypatch, capfd):  # noqa: F811
    """Without the bars and tracebacks of Hugging Face's libraries."""
    (tmp_path / "rows.jsonl").write_text('{"q": "1?"}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command = ["eval", str(tiny_model), "--task", "math500", "--dataset_path", str(tmp_path / "rows.jsonl")]
    assert cli.main([*command, "--output_dir", str(tmp_path / "out"), "--trust_remote_code"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("troll: error: the test rows of ") and said.count("\n") == 1


def test_version_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"troll {importlib.metadata.version('troll-rl')}\n"


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert "reasoning_gym:<data set>" in shown
    assert "prompts[:<hub data set>]" in shown
    assert re.search(r"aime24\W+Problems of AIME 2024.*to evaluate on only", shown)


def test_tasks_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golds = tmp_path / "golds.jsonl"
    command = ["tasks", "check", "math500", "--dataset_path", str(golds)]
    rows = [{"problem": f"Question {gold}?", "answer": gold} for gold in ("72", r"\sqrt{2}", "{1, 2")]
    golds.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert re.search(r"the gold answer itself\W+right\W+2\W+0\W+0", shown)
    golds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(command) == 1
    assert "{1, 2" in capsys.readouterr().out
    assert cli.main([*command, "--limit", "2"]) == 0
    assert cli.main([*command, "--task_options", '{"answer_format": "tag"}']) == 0


def test_a_machine_that_can_grade_nothing_is_no_traceback(tmp_path, capsys, monkeypatch):
    cannot = SandboxError("no program of 3 batches in a row could be tested")
    monkeypatch.setattr(MathGrader, "grade", Mock(side_effect=cannot))
    golds = tmp_path / "golds.jsonl"
    golds.write_text(json.dumps({"problem": "Question?", "answer": "72"}) + "\n")
    assert cli.main(["tasks", "check", "math500", "--dataset_path", str(golds)]) == 2
    assert capsys.readouterr().err == f"troll: error: {cannot}\n"


def test_ctrl_c_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "_train", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["train", "quickstart"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_help_of_train_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    from troll_lab import recipes
    from troll_lab.episodic import config

    with pytest.raises(SystemExit):
        cli.main(["train", "-h"])
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.partition("\nrecipes:\n")[2].splitlines()]
    assert [name for name, _ in listed] == recipes.names() + sorted(config.recipe_names())
    for name, about in listed:
        folder = config.FOLDER if name.startswith("tce-") else recipes.FOLDER
        comment = " ".join((folder / f"{name}.yaml").read_text().replace("\n#", "").split())
        assert comment.startswith(f"# {about}")
        assert about.endswith(".") or "; run it with: troll compare" in about


def test_a_missing_package_is_named_with_what_brings_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['yaml'] = None; from troll_lab import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "report", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert 'pip install "troll-rl[report]"' in result.stderr and result.stderr.count("\n") == 1


def test_compare_hands_over_the_whole_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from troll_lab.runs import compare

    made = Mock(side_effect=["finished", "failed", "interrupted"])
    monkeypatch.setattr(compare, "compare", made)
    command = ["compare", "grpo", "rloo", "--surrogate", "troll", "none", "--jobs", "2", "--output_dir", "here"]
    assert [cli.main(command) for _ in range(3)] == [0, 1, 130]
    (runs, folder, _, *more), _ = made.call_args
    assert [run.name for run in runs] == ["grpo-troll", "grpo-none", "rloo-troll", "rloo-none"]
    assert (folder, more) == (Path("here"), [2, "troll " + " ".join(command)])


def test_a_report_about_several_runs_is_one_page(tmp_path, monkeypatch, capsys):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "config.yaml").write_text(f"seed: {seed}\n")
        (tmp_path / str(seed) / "summary.json").write_text('{"status": "finished", "success_after": 0.5}')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "0"]) == 0
    assert (tmp_path / "0" / "report.html").is_file()
    assert cli.main(["report", "0", "1"]) == 0
    assert cli.main(["report", "0", "1", "--output_dir", "out"]) == 0
    assert capsys.readouterr().out.split() == ["0/report.html", "comparison.html", "out/comparison.html"]
    assert (tmp_path / "out" / "comparison.html").is_file()
