import warnings
from pathlib import Path

import pytest

from troll_lab.terminal import ignore_remarks_of_libraries


@pytest.mark.parametrize(("folder", "said"), [("lib/site-packages", 0), ("work", 1)])
def test_ignore_remarks_of_libraries_keeps_those_about_other_code(tmp_path: Path, folder: str, said: int) -> None:
    """Python compiles a module at its first import, and may warn of its source then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_remarks_of_libraries()
        compile("1 is 1", str(tmp_path / folder / "module.py"), "exec")
        warnings.warn("of transformers", FutureWarning, stacklevel=1)
    assert [each.category for each in caught] == said * [SyntaxWarning]
