import subprocess
import sys
from pathlib import Path

import pytest

from troll_sandbox.control_groups import MemoryGroups
from troll_sandbox.lifetime import at_end, temporary_folder

#: Makes something, and forks a process that drops it and ends.
FORK = """
import os, sys
from pathlib import Path
from tests.troll_sandbox.test_lifetime import MAKE

kept = MAKE[sys.argv[1]](Path(sys.argv[2]))
if os.fork() == 0:
    del kept
    sys.exit()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(len(os.listdir(sys.argv[2])))
"""


class Owner:
    pass


def folder(place: Path) -> Owner:
    owner = Owner()
    temporary_folder(owner, f"{place}/")
    return owner


def group(place: Path) -> MemoryGroups:
    groups = MemoryGroups(place)
    groups.give_back(groups.take(1))
    return groups


MAKE = {"a temporary folder": folder, "an idle group": group}


@pytest.mark.parametrize("thing", MAKE)
def test_at_end_does_nothing_in_a_forked_process(thing: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, thing, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not list(tmp_path.iterdir())  # removed at the end of the parent


def test_at_end_acts_once() -> None:
    owner = Owner()
    done: list[int] = []
    at_end(owner, done.append, 1)
    called = at_end(owner, done.append, 2)
    called()
    assert done == [2] and not called.alive
    del owner
    assert done == [2, 1]
