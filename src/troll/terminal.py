"""Printing lines and errors of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `one_line` is for packages that do without it
    from rich.console import Console


def say(console: Console, line: str) -> None:
    """Prints a line unchanged: rich would break it, and take its square brackets for markup."""
    console.print(line, soft_wrap=True, markup=False)


def one_line(message: object, most: int | None = None) -> str:
    """An error's message without its line breaks, cut to at most `most` characters."""
    return " ".join(str(message).split())[:most]
