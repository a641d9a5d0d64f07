"""Imports Python files and modules of the user, and the functions in them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from troll_lab.terminal import UsageError, one_line, raised_as


def module_name(path: Path) -> str:
    """The name under which a file is imported, which no installed module has."""
    return f"troll_file:{path.resolve()}"


def import_file(path: Path) -> ModuleType:
    """Imports a file; once in a process, however often it is asked for.

    Raises:
        UsageError: If it cannot be imported.
    """
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        del sys.modules[name]
        raise UsageError(f"cannot import {path}: {type(error).__name__}: {one_line(error)}") from error
    return module


def import_file_or_module(name: str, folder: Path = Path()) -> ModuleType:
    """Imports a file, whose name ends in `.py`, or an installed module.

    Args:
        name: The file's path, or the module's name.
        folder: The folder that a file's path is relative to.

    Raises:
        UsageError: If the file does not exist, or one of them cannot be imported.
    """
    if name.endswith(".py"):
        path = folder / Path(name).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no file {path}")
        return import_file(path)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        hint = "; the name of a file ends in .py" if "/" in name else ""
        raise UsageError(f"cannot import {name}: {type(error).__name__}: {one_line(error)}{hint}") from error


def load_function(name: str, folder: Path, label: str, *others: str) -> tuple[Callable[..., Any], Path | None]:
    """Loads a user's function, and returns it with its file; None for a module without one.

    Args:
        name: `FILE.py:function` or `module:function`.
        folder: The folder that a file's path is relative to.
        label: The field or option with the name, for errors.
        *others: Other possible values of the field, for errors.

    Raises:
        UsageError: If the function does not exist, or its file or module cannot be imported.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        takes = ", ".join((*others, "FILE.py:function or module:function"))
        raise UsageError(f"{label} must be {takes}, got {name!r}")
    with raised_as(UsageError, f"{label}: "):
        found = import_file_or_module(module, folder)
    function = getattr(found, attribute, None)
    if not callable(function):
        raise UsageError(f"{label}: {module} has no function {attribute!r}")
    file = getattr(found, "__file__", None)
    return function, None if file is None else Path(file)
