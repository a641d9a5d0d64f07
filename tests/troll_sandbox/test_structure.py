import ast
from pathlib import Path
from typing import Any

import pytest

import troll_sandbox

PACKAGE = Path(troll_sandbox.__file__).parent


def test_nothing_imports_torch_or_troll() -> None:
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {name.split(".")[0] for name in names} & {"torch", "troll"}, path


@pytest.mark.needs_bubblewrap
def test_readme_example_prints_what_it_shows() -> None:
    code = (PACKAGE / "README.md").read_text().split("```python\n")[1].split("```")[0]
    shown = code.replace("executor.run(", "found = executor.run(")
    space: dict[str, Any] = {}
    exec(shown, space)
    assert f"# {space['found']}\n" in code
