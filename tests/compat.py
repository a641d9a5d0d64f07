"""The tests of the TRL side on other versions of TRL and transformers (`make test-compat`) and of torch.

Each combination of versions has an environment of its own below `.venv-compat/`: pip installs the versions that differ
there, and all other packages are those of the environment that runs this file. So it takes half a minute and 150 MB,
and rows differ only in what is named. Other versions of torch (`make test-compat-torch`) are the exception: gigabytes,
where pip finds no CPU build. pip installs this checkout there as well, so versions that `pyproject.toml` does not allow
are an error. An environment is made again when `pyproject.toml` changes.

TRL before 1.15 has no fused LM head in the forward; there, `import troll.trl` has to say so.

An environment takes about a quarter of an hour on two cores; name some to have a part of it. Where `TRL_SOURCES`
names a checkout of TRL, the tests can run with that too: `--environments trl-sources`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-compat"

#: What differs from the environment that runs this file; the last is that environment itself.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "oldest-trl": ("trl==1.15.*",),
    # vLLM 0.31, the newest that TRL 1.15 and 1.16 support, wants transformers >= 5.10.4 and < 5.18.
    "oldest-transformers": ("trl==1.16.*", "transformers==5.10.4"),
    "newest-for-vllm": ("trl==1.16.*", "transformers==5.17.*"),
    "newest": (),
}

#: The ends of the range of torch. Triton's interpreter of that time does not work with numpy 2.4.
TORCH: dict[str, tuple[str, ...]] = {
    "oldest-torch": ("torch==2.8.*", "numpy<2.4"),
    "newest-torch": ("--upgrade", "torch"),
}

#: The newest TRL that is refused.
REFUSED = "trl==1.14.*"

TESTS = (
    "tests/troll/huggingface",
    "tests/troll/trl",
    "tests/troll_lab/trl",
    "tests/troll_lab/recipes",
    "tests/troll_lab/runs",
)


@dataclass(frozen=True)
class Outcome:
    """How the tests of one environment ended."""

    #: Tests by pytest's word for their outcome, and 1 `error` where pytest came to no end.
    counts: Mapping[str, int]
    #: pytest's summary: what failed, and why something was skipped.
    lines: Sequence[str] = field(default=())
    minutes: float = 0.0

    @property
    def failed(self) -> int:
        """Failed tests and errors."""
        return sum(number for word, number in self.counts.items() if word in ("failed", "error"))


def sources(variables: Mapping[str, str], variable: str, file: str) -> tuple[str, ...] | None:
    """What `pip install` takes for the checkout that an environment variable names; None where there is none.

    Raises:
        ValueError: If the folder does not hold `file`.
    """
    if not variables.get(variable):
        return None
    folder = Path(variables[variable]).resolve()
    if not (folder / file).is_file():
        raise ValueError(f"{variable} must be a checkout of {file.partition('/')[0]}, and {folder} has no {file}")
    return "--no-deps", str(folder)


def make(name: str, *install: str) -> Path:
    """The Python of an environment in which these arguments of `pip install` come before the packages of this one.

    Raises:
        subprocess.CalledProcessError: If pip finds no such versions.
    """
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([sys.executable, install, (ROOT / "pyproject.toml").read_text()])
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(folder, clear=True, symlinks=True)
        packages = Path(subprocess.check_output([python, "-c", _PURELIB], text=True).strip())
        # As a folder of packages with their own .pth files, and after those that pip will install.
        this = sysconfig.get_path("purelib")
        (packages / "zz-others.pth").write_text(f"import site; site.addsitedir({this!r})\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *install], cwd=ROOT, check=True)
        stamp.write_text(wanted)
    return python


_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def versions(python: Path) -> list[str]:
    """Those of torch, TRL and transformers."""
    code = "from importlib.metadata import version as v; print(v('torch'), v('trl'), v('transformers'))"
    return subprocess.check_output([python, "-c", code], text=True).split()


def refusal(python: Path) -> str:
    """The last line of what `import troll.trl` says, empty if it imports."""
    done = subprocess.run([python, "-c", "import troll.trl"], capture_output=True, text=True, env=_variables())
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def run(python: Path, tests: Sequence[str], workers: int, log: Path) -> Outcome:
    """Runs pytest. Its output stays in `log`."""
    start = time.monotonic()
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "worksteal"]
    with log.open("w") as output:
        done = subprocess.run([*pytest, *tests], cwd=ROOT, env=_variables(), stdout=output, stderr=subprocess.STDOUT)
    return outcome(log.read_text(), done.returncode, (time.monotonic() - start) / 60)


def outcome(log: str, status: int, minutes: float = 0.0) -> Outcome:
    """All that pytest wrote (with `-ra`), read."""
    lines = log.splitlines() or [""]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    summary = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    if status and not counts.keys() & {"failed", "error"}:  # a pytest that did not come to its end has failed too
        counts["error"] = 1
    return Outcome(counts, summary, minutes)


def compare(
    known: Mapping[str, Sequence[str]],
    default: Sequence[str],
    tests: Sequence[str],
    versions: Callable[[Path], list[str]],
    columns: Sequence[str],
    description: str | None,
    arguments: Sequence[str] | None,
) -> tuple[int, Table, Console]:
    """Runs the tests in the environments that the command line names; how many failed, and the table of all.

    What is known are the arguments of `pip install` by environment, none for the one that runs this.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", nargs="+", choices=known, default=default)
    parser.add_argument("--tests", nargs="+", default=tests, metavar="PATH")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    logs = Path(tempfile.mkdtemp(prefix="troll-compat-"))
    console = Console(soft_wrap=True)
    console.print(f"logs in {logs}")
    table = Table("environment", *columns, "passed", "failed", "skipped", "minutes", box=None)
    failed = 0
    for name in chosen.environments:
        if name.endswith("-sources"):  # which may have changed
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        python = make(name, *known[name]) if known[name] else Path(sys.executable)
        found = versions(python)
        ended = run(python, chosen.tests, chosen.workers, logs / f"{name}.log")
        console.print(name, *ended.lines, sep="\n    ", markup=False, highlight=False)
        failed += ended.failed
        counts = ended.counts.get("passed", 0), ended.failed, ended.counts.get("skipped", 0)
        table.add_row(name, *found, *map(str, counts), f"{ended.minutes:.0f}")
    return failed, table, console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests in every environment and prints a table; 1 if a test failed anywhere."""
    checkout = sources(os.environ, "TRL_SOURCES", "trl/trainer/grpo_trainer.py")
    known = {name: ("--editable", ".[dev]", *rest) if rest else () for name, rest in (ENVIRONMENTS | TORCH).items()}
    known |= {} if checkout is None else {"trl-sources": checkout}
    columns = "torch", "TRL", "transformers"
    failed, table, console = compare(known, list(ENVIRONMENTS), TESTS, versions, columns, __doc__, arguments)
    python = make("refused", "--no-deps", REFUSED)
    said, (torch, trl, transformers) = refusal(python), versions(python)
    is_refused = said.startswith("ImportError: ") and f"TRL {trl}" in said
    table.add_row("refused", torch, trl, transformers, "refused" if is_refused else "NOT REFUSED")
    console.print(table)
    console.print(said or "import troll.trl did not fail", markup=False, highlight=False)
    return int(failed > 0 or not is_refused)


def _variables() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
