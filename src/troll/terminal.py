"""What commands print."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, line: str) -> None:
    """Prints a line as it is: unbroken, and with its square brackets, which rich would take for markup."""
    console.print(line, soft_wrap=True, markup=False)
