"""What commands print."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, line: str) -> None:
    """Prints a line as it is: unbroken, and with its square brackets, which rich would take for markup."""
    console.print(line, soft_wrap=True, markup=False)


def one_line(message: object, most: int | None = None) -> str:
    """An error's message without its line breaks, and at most so many characters of it."""
    return " ".join(str(message).split())[:most]
