"""What programs see of this machine: enough to run Python, and nothing else."""

from __future__ import annotations

import os
import sys
import sysconfig
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Modules of the standard library that need libraries of the system.
NEED_LIBRARIES = ("_bz2", "_ctypes", "_curses", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_uuid", "zlib")


@dataclass(frozen=True)
class System:
    """Files and folders that have the same path inside as outside.

    Attributes:
        shown: The interpreter, the system's libraries and the time zones, read-only. None contains another.
        hidden: Folders of installed packages within `shown`; they are empty inside.
        links: Symbolic links and their targets.
    """

    shown: Sequence[Path]
    hidden: Sequence[Path]
    links: Mapping[Path, str]


def system(interpreter: Path, all_of_usr: bool) -> System:
    """Finds what programs have to see.

    Args:
        interpreter: The Python that runs them.
        all_of_usr: Show all of /usr and of the interpreter's own folder, where libraries are not enough.
    """
    prefix = Path(sys.base_prefix).resolve()
    base = {"base": str(prefix), "platbase": str(prefix), "installed_base": str(prefix)}
    paths = {name: Path(sysconfig.get_path(name, vars=base)).resolve() for name in sysconfig.get_path_names()}
    folders = [interpreter, *map(Path, ("/etc/ld.so.cache", "/usr/lib64", "/lib64", *zoneinfo.TZPATH))]
    if prefix in (Path("/"), Path("/usr")):
        folders += [paths["stdlib"], paths["platstdlib"]]
    else:
        folders += [prefix] if all_of_usr else [prefix / "lib", prefix / "lib64"]
    if architecture := sysconfig.get_config_var("MULTIARCH"):
        folders += [Path("/usr/lib", architecture), Path("/lib", architecture)]
    if all_of_usr:
        folders += [Path("/usr"), Path("/lib")]
    shown: list[Path] = []
    for path in sorted({path.resolve() for path in folders if path.exists()}):  # a folder comes before its content
        if not any(path.is_relative_to(folder) for folder in shown):
            shown.append(path)
    installed = {paths["purelib"], paths["platlib"], *paths["stdlib"].glob("*-packages")}
    hidden = [path for path in installed if path.is_dir() and any(path.is_relative_to(folder) for folder in shown)]
    libraries = map(Path, ("/lib", "/lib64", "/lib32", "/libx32"))
    return System(shown, hidden, {path: os.readlink(path) for path in libraries if path.is_symlink()})
