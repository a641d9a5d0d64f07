"""Configurations of `accelerate launch`, found by name.

`python -m troll.recipes.accelerate NAME` prints the path of one, for `accelerate launch --config_file`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the configurations in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a configuration.

    Raises:
        ValueError: If there is none.
    """
    if name not in names():
        raise ValueError(f"no configuration {name!r} of accelerate; there are {', '.join(names())}")
    return FOLDER / f"{name}.yaml"
