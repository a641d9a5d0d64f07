import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from troll_lab.evaluation.config import EvaluationConfig
from troll_lab.evaluation.table import CompletionProgress, print_table, results_table


def result(**metrics: float) -> dict[str, Any]:
    named = {name.replace("_at_", "@"): value for name, value in metrics.items()}
    intervals = {name: [0.0, 1.0] for name in named}
    return {"metrics": named, "intervals": intervals, "problems": 7, "finished": 0.5, "tokens": 12.3}


def shown(config: EvaluationConfig, terminal: bool = False, **results: dict[str, Any]) -> str:
    console = Console(record=True, file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    print_table(console, results_table(results, config))
    return console.export_text()


def test_results_table_has_rows_and_only_telling_columns(settings: Callable[..., EvaluationConfig]) -> None:
    text = shown(settings(ks=[1]), gsm8k=result(pass_at_1=0.25, mean_at_3=0.25 + 1e-16))
    for part in ("gsm8k", "25.0", "[0.0, 100.0]", "50.0%", "12", "3 completions per problem, temperature 1"):
        assert part in text
    assert "mean@3" not in text and "maj@3" not in text
    text = shown(
        settings(ks=[1]),
        gsm8k=result(pass_at_1=0.25, mean_at_3=0.25, maj_at_3=0.375),
        mbpp=result(pass_at_1=0.25, mean_at_3=0.625),
    )
    assert "62.5" in text and "37.5" in text and "–" in text
    text = shown(settings(ks=[1]), mbpp=result(), gsm8k=result(pass_at_1=0.25, mean_at_3=0.25))  # mbpp has no verdict
    assert "25.0" in text and "–" in text and "mbpp" in text
    assert "greedy" in shown(settings(samples=1), mbpp=result())


@pytest.mark.parametrize("terminal", [True, False])
def test_table_is_as_wide_as_a_file_needs(settings: Callable[..., EvaluationConfig], terminal: bool) -> None:
    name = "a-task-with-a-long-name" * 3
    text = shown(settings(ks=[1]), terminal, **{name: result(pass_at_1=0.25, mean_at_3=0.25)})
    assert (name in text) != terminal
    assert "25.0" in text


def progress_of(name: str, *parts: Sequence[float | None], terminal: bool = False) -> str:
    """The progress of batches with these scores, of which the first is from an earlier command."""
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=terminal)
    before, *batches = [[{"score": score} for score in part] for part in parts]
    progress = CompletionProgress(console, name, sum(map(len, parts)), before)
    for batch in batches:
        progress.advance(batch)
    progress.stop()
    return console.export_text()


def test_progress_without_a_terminal_is_a_line_a_tenth() -> None:
    scores = [float(index % 2) for index in range(40)]
    lines = progress_of("[task]", scores[:4], *(scores[start : start + 2] for start in range(4, 40, 2))).splitlines()
    assert len(lines) == 9
    assert (lines[0], lines[-1]) == ("[task]  8/40", "[task]  40/40  success 50.0%")


def test_progress_counts_success_among_judged_completions() -> None:
    lines = progress_of("task", [None], [None], [1.0, None, 0.0]).splitlines()
    assert lines == ["task  2/5", "task  5/5  success 50.0%"]


def test_progress_on_a_terminal_is_a_bar_with_success_at_its_end() -> None:
    text = progress_of("task", [0.0] * 4, [0.0] * 15, [1.0], terminal=True)
    assert re.search(r"20/20 .*success 5.0%", text)
    assert text.count("success") == 1
