"""Imports Python files of the user."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from troll_lab.terminal import UsageError, one_line


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
