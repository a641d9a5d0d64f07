"""What an import takes with it, and which names are public."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PROBE = """
import sys
import torch
before = set(sys.modules)  # what torch itself takes is not ours to answer for
import {}
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""

HEAVY = {
    *("trl", "transformers", "triton", "accelerate", "datasets", "peft", "verl", "numpy", "scipy"),
    *("math_verify", "sympy", "reasoning_gym", "rich"),
}
LANGUAGE_MODELS = {"trl", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("troll", HEAVY),
        ("troll.gaussian", HEAVY),
        ("troll.episodic", HEAVY),
        ("troll.episodic.train", LANGUAGE_MODELS),
        ("troll.rewards", HEAVY),
        ("troll.evaluation", HEAVY),
        ("troll.evaluation.estimators", LANGUAGE_MODELS),
        ("troll.evaluation.run, troll.evaluation.command", {"trl"}),
        ("troll.runs.statistics", {"scipy"}),
        ("troll.terminal", HEAVY),
    ],
)
def test_import_takes_no_heavy_dependency(module: str, heavy: set[str]) -> None:
    result = subprocess.run([sys.executable, "-c", PROBE.format(module)], capture_output=True, text=True, check=True)
    taken = set(result.stdout.split())
    assert "troll" in taken
    assert not taken & heavy


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
import troll, troll.trl, troll.huggingface, troll.rewards, troll.rewards.mathematics, troll.files
print(found, threading.active_count() - threads, [name for name in sys.modules if name.startswith("troll_sandbox")])
"""


def test_import_of_the_adapters_starts_nothing_and_needs_no_unix() -> None:
    pytest.importorskip("trl")
    result = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[] 0 []"


SANDBOX = """
import sys
import troll_sandbox
print(*sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""


def test_import_of_the_sandbox_takes_the_standard_library_only() -> None:
    result = subprocess.run([sys.executable, "-c", SANDBOX], capture_output=True, text=True, check=True)
    taken = set(result.stdout.split())
    assert "troll_sandbox" in taken
    assert not taken & ({"troll", "torch"} | HEAVY)


# troll.trl and troll.verl are imported where their trainers are: tests/trl and tests/verl.
@pytest.mark.parametrize(
    "package",
    [
        "troll",
        "troll.bounds",
        "troll.diagnostics",
        "troll.episodic",
        "troll.gaussian",
        "troll.rewards",
        "troll.testing",
        "troll_sandbox",
    ],
)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert hasattr(module, name), name


def test_evaluation_is_imported_when_it_is_named() -> None:
    pytest.importorskip("transformers")
    import troll.evaluation
    import troll.evaluation.run  # importing the module must not hide the function

    for name in troll.evaluation.__all__:
        assert hasattr(troll.evaluation, name), name
    assert callable(troll.evaluation.evaluate)
    with pytest.raises(AttributeError, match=r"module 'troll.evaluation' has no attribute 'evaluation'"):
        troll.evaluation.evaluation  # noqa: B018
