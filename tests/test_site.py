"""The documentation builds without a warning, and its reference has every public name."""

import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]

#: The packages whose `__all__` is public.
PUBLIC = (
    *("troll", "troll.diagnostics", "troll.gaussian", "troll.huggingface", "troll.testing"),
    *("troll.trl", "troll.trl.surrogates", "troll.verl"),
    *("troll_lab.tasks", "troll_lab.rewards", "troll_lab.evaluation", "troll_lab.episodic", "troll_lab.trl"),
    "troll_sandbox",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("katex"))
    shutil.copy(ROOT / "zensical.toml", folder)
    for name in ("src", "examples", "experiments"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "ERROR" not in built.stdout + built.stderr, "of what strictness does not count"
    return folder / "site"


@pytest.fixture(scope="module")
def modules() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    for package in ("troll", "troll_lab", "troll_sandbox"):
        loader.load(package)
    return loader.modules_collection


def linked(nav: list[dict[str, object]]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                assert isinstance(value, list)
                yield from linked(value)


def test_navigation_has_every_page() -> None:
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(linked(CONFIG["nav"])) == sorted(written)


def test_reference_has_every_public_name(site: Path, modules: griffe.ModulesCollection) -> None:
    header, compressed = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)
    assert b"inventory version 2" in header
    known = {line.split()[0] for line in zlib.decompress(compressed).decode().splitlines()}
    for module in PUBLIC:
        exports = modules[module].exports
        missing = {f"{module}.{name}" for name in map(str, exports or ())} - known
        assert exports and not missing


def test_documentation_imports_only_public_names(modules: griffe.ModulesCollection) -> None:
    # examples/verl/cpu stands in for a cluster; the others are made of parts of `troll_lab.runs` and of the toy task.
    made = [ROOT / "examples" / name for name in ("small_model.py", "smollm2_demo.py", "verl/memagent/documents.py")]
    internal = [*(ROOT / "examples" / "verl" / "cpu").rglob("*.py"), *made]
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    imports = [
        (path, module, name.strip())
        for path in documents
        if path not in internal
        for module, names in re.findall(r"^[+ ]*from (troll[\w.]*) import ([\w, ]+)", path.read_text(), re.M)
        for name in names.split(",")
    ]
    assert len(imports) > 10
    for path, module, name in imports:
        assert module in PUBLIC, path
        owner = modules[module]
        assert name in map(str, owner.exports or ()), (path, name)
    for path in (*documents[:1], *(ROOT / "docs").rglob("*.md")):
        assert "troll.trust_region." not in path.read_text(), path
