"""The progress and the table that an evaluation prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from troll_lab.evaluation.config import EvaluationConfig
from troll_lab.evaluation.folder import Record
from troll_lab.terminal import say


def results_table(results: Mapping[str, Mapping[str, Any]], config: EvaluationConfig) -> Table:
    """A table of results by task, as in `results.json`: one row for each, in per cent with 95 % intervals."""
    mean, majority = f"mean@{config.samples}", f"maj@{config.samples}"
    names = [f"pass@{k}" for k in config.resolved_ks]
    if any(_gives_partial_credit(one["metrics"], mean) for one in results.values()):
        names.append(mean)
    if any(majority in one["metrics"] for one in results.values()):
        names.append(majority)
    sampling = "greedy" if config.resolved_temperature == 0 else f"temperature {config.resolved_temperature:g}"
    completions = "1 completion" if config.samples == 1 else f"{config.samples} completions"
    table = Table(
        title=f"per cent, {completions} per problem, {sampling}",
        caption="95 % intervals over questions: Wilson's, with the effective number of trials",
    )
    table.add_column("task", overflow="fold", min_width=16)
    for name in (*names, "problems", "finished", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, one in results.items():
        cells = [_cell(one, name) for name in names]
        table.add_row(task, *cells, str(one["problems"]), f"{one['finished']:.1%}", f"{one['tokens']:.0f}")
    return table


def _gives_partial_credit(metrics: Mapping[str, float], mean: str) -> bool:
    """Whether the mean score of a task differs from its success."""
    both = "pass@1" in metrics and mean in metrics
    return not both or not math.isclose(metrics["pass@1"], metrics[mean], abs_tol=1e-9)


def print_table(console: Console, table: Table) -> None:
    """Prints a table in its full width, unless a terminal is narrower."""
    if not console.is_terminal:
        table.width = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.print(table, crop=False)


def _cell(result: Mapping[str, Any], name: str) -> str:
    if name not in result["metrics"]:
        return "–"
    low, high = result["intervals"][name]
    # Rich takes square brackets for markup, unless a backslash is before them.
    return f"{100 * result['metrics'][name]:.1f}\n\\[{100 * low:.1f}, {100 * high:.1f}]"


class CompletionProgress:
    """A progress bar, with the success at its end; on anything but a terminal, a line after every tenth of the task.

    The success of a part would mislead: long prompts come first, and are often the hard ones.

    Args:
        console: The console to show it on.
        name: The name of the task.
        total: The number of all completions.
        records: The records from an earlier command.
    """

    def __init__(self, console: Console, name: str, total: int, records: Sequence[Record]) -> None:
        self.console, self.name, self.total = console, name, total
        self.done = self.judged = self.successes = 0
        columns = (TextColumn(name, markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
        more = (TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, *more, console=console)
        self._count(records)
        self.bar = self.progress.add_task(self._success(), total=total, completed=self.done)
        if console.is_terminal:
            self.progress.start()

    def advance(self, records: Sequence[Record]) -> None:
        """Counts more completions."""
        tenths = 10 * self.done // self.total
        self._count(records)
        self.progress.update(self.bar, completed=self.done, description=self._success())
        if not self.console.is_terminal and 10 * self.done // self.total > tenths:
            say(self.console, f"{self.name}  {self.done}/{self.total}  {self._success()}".rstrip())

    def stop(self) -> None:
        """Ends the bar."""
        if self.progress.live.is_started:
            self.progress.stop()

    def _count(self, records: Sequence[Record]) -> None:
        self.done += len(records)
        self.judged += sum(record["score"] is not None for record in records)
        self.successes += sum(record["score"] == 1 for record in records)

    def _success(self) -> str:
        return f"success {self.successes / self.judged:.1%}" if self.judged and self.done == self.total else ""
