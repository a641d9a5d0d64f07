import warnings
from pathlib import Path

import pytest

from troll_lab.terminal import USAGE_ERROR, UsageError, ignore_remarks_of_libraries, raised_as, run_command
from troll_sandbox import SandboxError


@pytest.mark.parametrize(("folder", "said"), [("lib/site-packages", 0), ("work", 1)])
def test_ignore_remarks_of_libraries_keeps_other_remarks(tmp_path: Path, folder: str, said: int) -> None:
    """Python compiles a module at its first import, and may warn of its source then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_remarks_of_libraries()
        compile("1 is 1", str(tmp_path / folder / "module.py"), "exec")
        warnings.warn("of transformers", FutureWarning, stacklevel=1)
    assert [each.category for each in caught] == said * [SyntaxWarning]


def test_raised_as_changes_the_kind_of_an_error() -> None:
    with pytest.raises(UsageError, match=r"^field: two lines$") as error, raised_as(UsageError, "field: "):
        raise ValueError("two\n  lines")
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(KeyError), raised_as(UsageError):
        raise KeyError("name")


@pytest.mark.parametrize("error", [UsageError("no such task"), SandboxError("no sandbox can start")])
def test_run_command_reports_in_one_line_what_the_user_can_mend(error: Exception, capsys) -> None:
    def command() -> int:
        raise error

    assert run_command(command) == USAGE_ERROR
    assert capsys.readouterr().err == f"troll: error: {error}\n"
