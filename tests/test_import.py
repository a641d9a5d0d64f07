"""What an import takes with it, which names are public, and what is said where a package is missing."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

PROBE = """
import importlib, sys
import torch
before = set(sys.modules)  # what torch itself takes is not ours to answer for
for module in sys.argv[1:]:
    importlib.import_module(module)
    taken = set(sys.modules) - before
    print(module, *sorted({name if name.startswith("troll.") else name.split(".")[0] for name in taken}))
"""

HEAVY = {
    *("trl", "transformers", "triton", "accelerate", "datasets", "peft", "verl", "numpy", "scipy"),
    *("math_verify", "sympy", "reasoning_gym", "rich"),
}
LANGUAGE_MODELS = {"trl", "transformers", "datasets"}

#: What a module may not import, those that take more after those that take less: one process imports them all.
LEFT_OUT = {
    "troll": {*HEAVY, "troll.testing"},
    "troll.testing": {*HEAVY, "pytest"},
    "troll.gaussian": HEAVY,
    "troll_lab.episodic": HEAVY,
    "troll_lab.rewards": HEAVY,
    "troll_lab.evaluation": HEAVY,
    "troll_lab.terminal": HEAVY,
    "troll_lab.evaluation.estimators": LANGUAGE_MODELS,
    "troll_lab.runs.statistics": {"scipy"},
    "troll_lab.episodic.train": LANGUAGE_MODELS,
    "troll_lab.evaluation.run": {"trl"},
    "troll_lab.evaluation.command": {"trl"},
}


def test_imports_take_no_heavy_dependency() -> None:
    command = [sys.executable, "-c", PROBE, *LEFT_OUT]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    taken = {module: set(names) for module, *names in map(str.split, lines)}
    assert taken.keys() == LEFT_OUT.keys() and "troll" in taken["troll"]
    for module, left_out in LEFT_OUT.items():
        assert not taken[module] & left_out, module


SAYS_NOTHING = """
import sys
sys.modules["numpy"] = None  # not installed
import troll
assert "torch" in sys.modules
"""


def test_import_prints_nothing_without_numpy() -> None:
    result = subprocess.run([sys.executable, "-c", SAYS_NOTHING], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")


def test_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    import troll

    assert troll.__version__ == importlib.metadata.version("troll-rl")

    def no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_version)
    with pytest.raises(AttributeError, match="troll-rl is not installed"):
        troll.__version__  # noqa: B018


QUIET = """
import os, sys, threading
import torch, transformers
from trl import GRPOConfig, GRPOTrainer  # what these start, and need of the system, is not ours to answer for
for name in ("fcntl", "resource"):
    sys.modules[name] = None  # as on Windows: an import fails
found = []
register = os.register_at_fork
os.register_at_fork = lambda **hooks: (found.append(hooks), register(**hooks))
events = ("subprocess.Popen", "os.fork", "os.posix_spawn")
sys.addaudithook(lambda event, arguments: found.append(event) if event in events else None)
threads = threading.active_count()
import troll, troll.trl, troll.huggingface, troll_lab.rewards, troll_lab.rewards.mathematics, troll.files
print(found, threading.active_count() - threads, [name for name in sys.modules if name.startswith("troll_sandbox")])
"""


def test_import_of_adapters_starts_nothing_and_needs_no_unix() -> None:
    pytest.importorskip("trl")
    result = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[] 0 []"


SANDBOX = """
import sys
import troll_sandbox
print(*sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""


def test_import_of_the_sandbox_takes_only_the_library() -> None:
    result = subprocess.run([sys.executable, "-c", SANDBOX], capture_output=True, text=True, check=True)
    taken = set(result.stdout.split())
    assert "troll_sandbox" in taken
    assert not taken & ({"troll", "torch"} | HEAVY)


# troll.trl and troll.verl are imported where their trainers are: tests/troll/trl and tests/troll/verl.
@pytest.mark.parametrize(
    "package",
    [
        *("troll", "troll.diagnostics", "troll_lab.episodic", "troll.gaussian", "troll_lab.rewards"),
        *("troll.testing", "troll_sandbox"),
    ],
)
def test_public_names_are_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert hasattr(module, name), name


def test_evaluation_is_imported_when_it_is_named() -> None:
    pytest.importorskip("transformers")
    import troll_lab.evaluation
    import troll_lab.evaluation.run  # importing the module must not hide the function

    for name in troll_lab.evaluation.__all__:
        assert hasattr(troll_lab.evaluation, name), name
    assert callable(troll_lab.evaluation.evaluate)
    with pytest.raises(AttributeError, match=r"module 'troll_lab.evaluation' has no attribute 'evaluation'"):
        troll_lab.evaluation.evaluation  # noqa: B018


#: What a module needs, by its name, and the extra that brings it.
NEEDED = {
    "troll.trl": ("trl", "trl transformers accelerate datasets peft"),
    "troll.huggingface": ("trl", "transformers accelerate peft"),
    "troll_lab.tasks": ("tasks", "datasets"),
    "troll_lab.episodic.environments": ("episodic", "gymnasium mujoco"),
}

WITHOUT = """
import importlib, sys
for module, needed in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.modules |= dict.fromkeys(needed.split())  # an import fails
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(error)
    for name in needed.split():
        del sys.modules[name]
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """What each import says without what it needs: one process tries them all."""
    command = [sys.executable, "-c", WITHOUT]
    for module, (_, needed) in NEEDED.items():
        command += [module, needed]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(NEEDED, lines, strict=True))


@pytest.mark.parametrize("module", NEEDED)
def test_import_names_the_extra_that_is_missing(errors: dict[str, str], module: str) -> None:
    extra, _ = NEEDED[module]
    assert errors[module].startswith(f"{module} needs ")
    assert errors[module].endswith(f'pip install "troll-rl[{extra}]"')
