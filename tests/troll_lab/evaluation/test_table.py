import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from troll_lab.evaluation.config import EvaluationConfig
from troll_lab.evaluation.table import CompletionProgress, print_table, results_table


def result(**metrics: float) -> dict[str, Any]:
    named = {name.replace("_at_", "@"): value for name, value in metrics.items()}
    return {
        "metrics": named,
        "intervals": {name: [0.0, 1.0] for name in named},
        "problems": 7,
        "finished": 0.5,
        "tokens": 12.3,
    }


def shown(config: EvaluationConfig, terminal: bool = False, **results: dict[str, Any]) -> str:
    console = Console(record=True, file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    print_table(console, results_table(results, config))
    return console.export_text()


def test_a_row_for_each_task_and_only_columns_that_say_something(settings: Callable[..., EvaluationConfig]) -> None:
    text = shown(settings(ks=[1]), gsm8k=result(pass_at_1=0.25, mean_at_3=0.25 + 1e-16))
    for part in ("gsm8k", "25.0", "[0.0, 100.0]", "50.0%", "12", "3 completions per problem, temperature 1"):
        assert part in text
    assert "mean@3" not in text
    assert "maj@3" not in text
    text = shown(
        settings(ks=[1]),
        gsm8k=result(pass_at_1=0.25, mean_at_3=0.25, maj_at_3=0.375),
        mbpp=result(pass_at_1=0.25, mean_at_3=0.625),
    )
    assert "62.5" in text
    assert "37.5" in text
    assert "–" in text


def test_a_task_without_a_verdict_has_a_row_without_numbers(settings: Callable[..., EvaluationConfig]) -> None:
    text = shown(settings(ks=[1]), mbpp=result(), gsm8k=result(pass_at_1=0.25, mean_at_3=0.25))
    assert "25.0" in text and "–" in text and "mbpp" in text
    assert "greedy" in shown(settings(samples=1), mbpp=result())


def test_progress_counts_only_judged_completions() -> None:
    console = Console(record=True, file=io.StringIO(), width=80)
    progress = CompletionProgress(console, "task", 5, [{"score": None}])
    progress.advance([{"score": None}])
    progress.advance([{"score": 1.0}, {"score": None}, {"score": 0.0}])
    progress.stop()
    assert console.export_text().splitlines() == ["task  2/5", "task  5/5  success 50.0%"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_no_success_before_the_end(terminal: bool) -> None:
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=terminal)
    progress = CompletionProgress(console, "task", 20, [{"score": 0.0}] * 4)
    progress.advance([{"score": 0.0}] * 15)
    assert "success" not in console.export_text()
    progress.advance([{"score": 1.0}])
    progress.stop()
    assert "success 5.0%" in console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_in_a_file_the_table_is_as_wide_as_it_needs(settings: Callable[..., EvaluationConfig], terminal: bool) -> None:
    name = "a-task-with-a-long-name" * 3
    text = shown(settings(ks=[1]), terminal, **{name: result(pass_at_1=0.25, mean_at_3=0.25)})
    assert (name in text) != terminal
    assert "25.0" in text


def test_progress_without_a_terminal_is_a_line_a_tenth() -> None:
    console = Console(record=True, file=io.StringIO(), width=80)
    records = [{"score": float(index % 2)} for index in range(40)]
    progress = CompletionProgress(console, "[task]", 40, records[:4])
    for start in range(4, 40, 2):
        progress.advance(records[start : start + 2])
    progress.stop()
    lines = console.export_text().splitlines()
    assert len(lines) == 9
    assert lines[0] == "[task]  8/40"
    assert lines[-1] == "[task]  40/40  success 50.0%"


def test_progress_on_a_terminal_is_a_bar() -> None:
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    progress = CompletionProgress(console, "task", 1, [])
    progress.advance([{"score": 1.0}])
    progress.stop()
    assert re.search(r"1/1 .*success 100.0%", console.export_text())
