"""The walls between the three packages and between their rooms: what imports what, read from the source.

Every import counts, also one in a function or for type checkers only, and one by `import_module`. What Python adds by
itself is left out: with a module it first imports the packages around it, which import their own modules for the names
that they offer. This circle is every package's; but no module may itself name a package that imports it.
"""

import ast
import graphlib
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"

#: The rooms of `troll` from the ground up, `__init__` for `troll` itself. A room imports only rooms of lower floors.
FLOORS = (
    {"trust_region", "files", "grading", "needed", "settings"},
    {"diagnostics", "gaussian", "huggingface"},
    {"__init__"},
    {"testing"},
    {"trl", "verl"},
)


class Import(NamedTuple):
    """That a module imports another one, or a name of it."""

    importer: str
    line: int
    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module} {self.name}".rstrip()


def modules(source: Path) -> dict[str, Path]:
    """The files of a source tree, by the names of their modules."""
    names = {path: ".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(module: str, path: Path, known: Collection[str]) -> Iterator[Import]:
    """All imports of a file, of modules that are known and of others."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    is_package = (path.parent / "__init__.py").exists()

    def found(line: int, origin: str, name: str = "") -> Import:
        # Files of a folder that is no package, as in `troll_sandbox/inside`, import each other by their bare names.
        if not is_package and f"{package}.{origin}" in known:
            origin = f"{package}.{origin}"
        of_package = f"{origin}.{name}"
        return Import(module, line, of_package) if of_package in known else Import(module, line, origin, name)

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (found(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from (found(node.lineno, origin, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = (value.value for value in node.args[:1] if isinstance(value, ast.Constant))
            yield from (found(node.lineno, str(name)) for name in names)


def all_imports(source: Path) -> list[Import]:
    known = modules(source)
    return [each for module, path in known.items() for each in imports(module, path, known)]


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Names that lead from one to the next and back to the first; empty if no such names exist."""
    graph: dict[str, set[str]] = {}
    for importer, imported in edges:
        if importer != imported:
            graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # it lists what is imported first
    return []


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def room(module: str) -> str:
    """The folder or file directly in a package that a module is in; `__init__` for the package itself."""
    return [*module.split("."), "__init__"][1]


MODULES = modules(SOURCE)
IMPORTS = all_imports(SOURCE)


def of(package: str) -> list[Import]:
    """The imports of a package's modules."""
    found = [each for each in IMPORTS if is_in(each.importer, package)]
    assert found, package
    return found


def lines(found: Iterable[Import]) -> list[str]:
    return [str(each) for each in found]


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("troll", ("troll_lab", "troll_sandbox")),
        ("troll_sandbox", ("troll", "troll_lab", "torch")),
        ("hydra_plugins", ("troll", "troll_lab", "troll_sandbox")),
    ],
)
def test_packages_import_only_what_they_may(package: str, others: tuple[str, ...]) -> None:
    assert lines(each for each in of(package) if is_in(each.module, *others)) == []


def test_trust_region_imports_only_torch() -> None:
    foreign = [each for each in of("troll.trust_region") if not is_in(each.module, "troll.trust_region", "torch")]
    foreign = [each for each in foreign if each.module.partition(".")[0] not in sys.stdlib_module_names]
    is_kernel = [each for each in foreign if each.module.startswith("triton") and each.importer.endswith("_triton")]
    assert lines(foreign) == lines(is_kernel)


def test_rooms_of_troll_import_only_lower_floors() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    unknown = {room(module) for module in MODULES if is_in(module, "troll")} - floor.keys()
    assert not unknown, "give a new room of `troll` its floor"
    between = [(each, room(each.importer), room(each.module)) for each in of("troll") if is_in(each.module, "troll")]
    assert lines(each for each, own, other in between if own != other and floor[own] <= floor[other]) == []


def test_nothing_imports_the_command() -> None:
    assert lines(each for each in IMPORTS if is_in(each.module, "troll_lab.cli")) == []


@pytest.mark.parametrize("package", ["troll", "troll_lab", "troll_sandbox"])
def test_private_names_stay_in_their_package(package: str) -> None:
    others = [each for each in IMPORTS if is_in(each.module, package) and not is_in(each.importer, package)]
    private = [each for each in others if any(part.startswith("_") for part in [*each.module.split("."), each.name])]
    assert lines(private) == []


def test_no_circle_of_modules() -> None:
    assert len(MODULES) > 200
    assert circle((each.importer, each.module) for each in IMPORTS if each.module in MODULES) == []


FORMS = """
import house.b
from house import b
from house.b import name
from . import b
from ..house import b
def function():
    from . import b
if TYPE_CHECKING:
    from house.b import Type
importlib.import_module('house.b')
__import__('house.b')
"""


def test_all_imports_finds_every_form_and_circle_sees_them(tmp_path: Path) -> None:
    files = {
        "house/__init__.py": "from house.a import name\n",
        "house/a.py": FORMS,
        "house/b.py": "import torch\n",
        "house/inside/a.py": "import b\n",  # a folder that is no package: files go by bare names
        "house/inside/b.py": "from a import name\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = all_imports(tmp_path)
    assert [each.module for each in found if each.importer == "house.a"] == ["house.b"] * 9
    edges = {(each.importer, each.module) for each in found}
    inside = {("house.inside.a", "house.inside.b"), ("house.inside.b", "house.inside.a")}
    assert edges == {("house", "house.a"), ("house.a", "house.b"), ("house.b", "torch"), *inside}
    assert circle(edges - inside) == [] and {*circle(edges)} == {"house.inside.a", "house.inside.b"}
