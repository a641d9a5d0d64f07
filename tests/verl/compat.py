"""The tests of `troll.verl` on other versions of verl: `make test-compat`, like tests/compat.py.

Each version has an environment of its own below `.venv-compat/`, in which only verl differs from the environment that
runs this file. Where `VERL_SOURCES` names a checkout of verl, the tests run with that too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.compat import FOLDER, make, run, sources

#: What pip installs; the last is the environment that runs this file.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "oldest-verl": ("--editable", ".[verl]", "verl==0.9.0"),
    "newest-verl": (),
}

#: The environment with the checkout, whose version `pyproject.toml` need not allow.
SOURCES = "verl-sources"


#: Prints the version that an environment imports, and where it is.
_VERL = """
from importlib import metadata, util
print(metadata.version("verl"), util.find_spec("verl").origin)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests with every verl and prints a table; 1 if a test failed anywhere."""
    checkout = sources(os.environ, "VERL_SOURCES", "verl/version/version")
    known = ENVIRONMENTS | ({} if checkout is None else {SOURCES: checkout})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", nargs="+", choices=known, default=list(known))
    parser.add_argument("--tests", nargs="+", default=("tests/verl",), metavar="PATH")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    logs = Path(tempfile.mkdtemp(prefix="troll-compat-"))
    console = Console(soft_wrap=True)
    console.print(f"logs in {logs}")
    table = Table("environment", "verl", "passed", "failed", "skipped", "minutes", box=None)
    failed = 0
    for name in chosen.environments:
        if name == SOURCES:  # which may have changed
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        python = make(name, *known[name]) if known[name] else Path(sys.executable)
        version, origin = subprocess.check_output([python, "-c", _VERL], text=True).split()
        if known[name] and FOLDER not in Path(origin).parents:
            raise RuntimeError(f"the environment {name} imports the verl of another one: {origin}")
        ended = run(python, chosen.tests, chosen.workers, logs / f"{name}.log")
        console.print(name, *ended.lines, sep="\n    ", markup=False, highlight=False)
        failed += ended.failed
        counts = ended.counts.get("passed", 0), ended.failed, ended.counts.get("skipped", 0)
        table.add_row(name, version, *map(str, counts), f"{ended.minutes:.0f}")
    console.print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
