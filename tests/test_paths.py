"""The files and modules that pages, scripts, workflows and comments name are there."""

import re
from pathlib import PurePath

from tests import checkout, compat, portable
from tests.checkout import ROOT

#: Paths of other repositories, and files that a command makes.
ELSEWHERE = {
    *("examples/cispo_trainer", "examples/dppo_trainer", "examples/gspo_trainer"),  # verl's
    "src/prime_rl/trainer/rl/loss.py",
    *("benchmarks/results", "docs/assets/katex", "docs/results/tce-metaworld-reach.jsonl"),
}
FOLDERS = r"src|tests|docs|examples|benchmarks|experiments|\.github"
#: From the root of the checkout or, in backticks, from `src`.
PATH = re.compile(rf"(?<![\w./}}-])((?:{FOLDERS}|(?<=`)troll(?:_lab|_sandbox)?)/[\w.*/-]*[\w*])")
MODULE = re.compile(
    r"(?:(?<![\w-])-m\s+|pkg://)((?:troll|troll_lab|troll_sandbox|tests|benchmarks|experiments)\b[\w.]*)"
)


def texts() -> dict[str, str]:
    """What the checkout says, by file. Tables and what was once so are left out."""
    left_out = ("docs/results/", "tests/mutation.csv", "CHANGELOG.md")
    found = {name: (ROOT / name).read_bytes() for name in checkout.files() if not name.startswith(left_out)}
    return {name: data.decode() for name, data in found.items() if b"\0" not in data}


def is_there(path: str) -> bool:
    # A word in capitals stands for any name.
    pattern = "/".join(re.sub(r"^[A-Z]+(?=\.|$)", "*", part) for part in path.split("/"))
    return path in ELSEWHERE or any(ROOT.glob(pattern)) or any((ROOT / "src").glob(pattern))


def is_module(name: str) -> bool:
    path = PurePath(*name.rstrip(".").split("."))
    return any((ROOT / root / f"{path}{end}").is_file() for root in ("src", ".") for end in (".py", "/__init__.py"))


@checkout.needs_git
def test_paths_that_files_name_exist() -> None:
    named = [(name, path) for name, text in texts().items() for path in PATH.findall(text)]
    assert {"README.md", "Makefile", "docs/verl.md", "AGENTS.md"} <= {name for name, _ in named}
    assert [(name, path) for name, path in named if not is_there(path)] == []


@checkout.needs_git
def test_modules_that_commands_name_exist() -> None:
    named = [(name, module) for name, text in texts().items() for module in MODULE.findall(text)]
    assert {"Makefile", "AGENTS.md", "docs/reference/rewards.md"} <= {name for name, _ in named}
    assert [(name, module) for name, module in named if not is_module(module)] == []


def test_tests_that_run_elsewhere_exist() -> None:
    run = [*compat.TESTS, *(path for _, arguments in portable.TESTS.values() for path in arguments)]
    assert [path for path in run if path.startswith("tests") and not (ROOT / path).exists()] == []
