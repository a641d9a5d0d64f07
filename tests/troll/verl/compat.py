"""The tests of `troll.verl` on other versions of verl: `make test-compat`, like tests/compat.py.

Each version has an environment of its own below `.venv-compat/`, in which only verl differs from the environment that
runs this file. Where `VERL_SOURCES` names a checkout of verl, the tests run with that too.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.compat import FOLDER, compare, sources

#: What pip installs; the last is the environment that runs this file.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "oldest-verl": ("--editable", ".[verl]", "verl==0.9.0"),
    "newest-verl": (),
}

#: Prints the version that an environment imports, and where it is.
_VERL = """
from importlib import metadata, util
print(metadata.version("verl"), util.find_spec("verl").origin)
"""


def version(python: Path) -> list[str]:
    """The version of verl that an environment imports, which has to be its own."""
    found, origin = subprocess.check_output([python, "-c", _VERL], text=True).split()
    if python != Path(sys.executable) and FOLDER not in Path(origin).parents:
        raise RuntimeError(f"the environment of {python} imports the verl of another one: {origin}")
    return [found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests with every verl and prints a table; 1 if a test failed anywhere."""
    checkout = sources(os.environ, "VERL_SOURCES", "verl/version/version")
    known = ENVIRONMENTS | ({} if checkout is None else {"verl-sources": checkout})
    failed, table, console = compare(known, list(known), ("tests/troll/verl",), version, ("verl",), __doc__, arguments)
    console.print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
