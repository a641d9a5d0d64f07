from pathlib import Path
from typing import Any

import pytest

import troll_sandbox


@pytest.mark.needs_bubblewrap
def test_readme_example_prints_what_it_shows() -> None:
    code = (Path(troll_sandbox.__file__).parent / "README.md").read_text().split("```python\n")[1].split("```")[0]
    shown = code.replace("executor.run(", "found = executor.run(")
    space: dict[str, Any] = {}
    exec(shown, space)
    assert f"# {space['found']}\n" in code
