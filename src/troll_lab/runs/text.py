"""Numbers and tables as text, for pages, cards and the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def duration(seconds: float) -> str:
    """A time in words, such as 2 h 5 min."""
    whole = round(seconds)
    if whole < 600:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def problems(size: int, different: int | None) -> str:
    """A number of held-out problems in words, with the number of different ones where some are repeated."""
    return f"{size} problems" if different in (None, size) else f"{size} problems, {different} different"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(map(_markdown_row, [head, ["---"] * len(head), *rows]))


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
