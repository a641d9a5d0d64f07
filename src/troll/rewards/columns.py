"""Columns of a data set that reward functions cannot get, since their names mean something else there."""

from __future__ import annotations

from collections.abc import Iterable

#: What TRL passes to every reward function next to the columns. It would raise "multiple values for keyword argument"
#: in the first rollout, or silently pass its own value instead of the column.
TAKEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def clash(columns: Iterable[str], more: Iterable[str] = ()) -> str | None:
    """What is wrong with the names of a data set's columns, and what to do; None if nothing is.

    Args:
        columns: All names.
        more: More names than `TAKEN` that reward functions get something else by.
    """
    found = sorted({*TAKEN, *more}.intersection(columns))
    if not found:
        return None
    names = " and ".join(repr(name) for name in found)
    return (
        f"the data set cannot have a column named {names}: reward functions get an argument of that name from TRL. "
        f"Rename it (rename_column({found[0]!r}, ...) of datasets), or remove it (remove_columns)"
    )
