"""Plugins: files and modules of the user that register surrogates, estimators or tasks before settings are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.trl.estimators import ESTIMATORS
from troll.trl.surrogates import SURROGATES
from troll_lab.tasks.registry import known_tasks
from troll_lab.terminal import UsageError
from troll_lab.user_files import import_file_or_module, module_name

#: The surrogates that each loaded plugin has registered.
_surrogates_of: dict[str, frozenset[str]] = {}


def resolved(plugins: Any, folder: Path) -> list[str]:
    """The plugins as a run's settings name them: a file by its absolute path, a module by its name.

    Args:
        plugins: The names that a user gave. A file's name ends in `.py`.
        folder: The folder to which files are relative.

    Raises:
        UsageError: If they are not a list of names.
    """
    if isinstance(plugins, str):
        raise UsageError(f"takes a list, got {plugins!r}: write [{plugins}]")
    if not isinstance(plugins, list | None) or not all(isinstance(name, str) for name in plugins or ()):
        raise UsageError(f"takes a list of Python files and modules, got {plugins!r}")
    return [
        str((folder / Path(name).expanduser()).resolve()) if name.endswith(".py") else name for name in plugins or ()
    ]


def load(plugins: Sequence[str]) -> None:
    """Imports plugins, each once in a process.

    Args:
        plugins: Their names, from `resolved`.

    Raises:
        UsageError: If a file is missing, or a plugin cannot be imported or registers nothing; names it, in one line.
    """
    for plugin in plugins:
        if plugin not in _surrogates_of:
            _surrogates_of[plugin] = frozenset(_load(plugin))


def plugin_of(surrogate: str) -> str | None:
    """The plugin that has registered a surrogate; None if none has."""
    return next((plugin for plugin, names in _surrogates_of.items() if surrogate in names), None)


def _load(plugin: str) -> list[str]:
    """Imports a plugin, and returns the names of the surrogates that it registers."""
    name = module_name(Path(plugin)) if plugin.endswith(".py") else plugin
    imported_before, before = name in sys.modules, _registered()
    import_file_or_module(plugin)
    after = _registered()
    if after == before and not imported_before:
        del sys.modules[name]
        raise UsageError(
            f"{plugin} registers no surrogate, estimator or task: it must call register_surrogate, for example"
        )
    return [name for name, entry in SURROGATES.items() if before[0].get(name) is not entry]


def _registered() -> list[Mapping[str, Any]]:
    """The entries of every registry that a plugin can add to, surrogates first."""
    return [dict(SURROGATES), dict(ESTIMATORS), known_tasks()]
