import subprocess
import sys
from pathlib import Path

import pytest

from troll import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quikstart"], "did you mean quickstart"),
        (["train", "quickstart", "--learing_rate", "1"], "did you mean --learning_rate"),
        (
            ["train", "quickstart", "--task", "nonsense", "--model_name_or_path", "/nonexistent"],
            "cannot load the model",
        ),
        (["report", "/nonexistent"], "not a run folder"),
        (["train", "--kl_bound", "0.1", "quickstart"], "the recipe comes first"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("troll: error: ")
    assert error.count("\n") == 1


def test_ctrl_c_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", interrupted)
    assert cli.main(["train", "quickstart"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_usage_is_quick_and_needs_no_torch() -> None:
    program = "import sys; from troll import cli\ntry: cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "train" in result.stdout
    assert result.returncode == 0


def test_a_report_needs_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["report", str(file)]) == 2
