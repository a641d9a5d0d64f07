"""The modules of the package and how they import each other."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path
from typing import Any

import troll_sandbox
from tests.troll_sandbox.processes import needs_bubblewrap

PACKAGE = Path(troll_sandbox.__file__).parent
OUTSIDE = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
INSIDE = {path.stem: path for path in (PACKAGE / "inside").glob("*.py")}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, also for type checkers, without the package's name."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.removeprefix("troll_sandbox.") for name in names}


def test_modules_import_each_other_in_one_direction() -> None:
    for modules in (OUTSIDE, INSIDE):
        graph = {name: imported(path) & set(modules) for name, path in modules.items()}
        assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)  # CycleError names a cycle


def test_module_names_are_unique() -> None:
    assert set(OUTSIDE) & set(INSIDE) == set()


def test_nothing_imports_torch_or_troll() -> None:
    for path in (*OUTSIDE.values(), *INSIDE.values()):
        assert not {name.split(".")[0] for name in imported(path)} & {"torch", "troll"}, path


@needs_bubblewrap
def test_readme_example_prints_what_it_shows() -> None:
    code = (PACKAGE / "README.md").read_text().split("```python\n")[1].split("```")[0]
    shown = code.replace("executor.run(", "found = executor.run(")
    space: dict[str, Any] = {}
    exec(shown, space)
    assert f"# {space['found']}\n" in code
