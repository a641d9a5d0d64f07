"""The comparisons of movements in docs/study/movements.md are what was measured."""

from statistics import fmean

import pytest

from experiments import movements
from experiments.rows import read_rows

TINY = ["--iterations", "1", "--episodes", "2", "--eval_episodes", "2", "--num_envs", "2", "--updates", "1"]


@pytest.mark.parametrize("name", movements.SHOWN)
def test_figure_has_the_mean_of_each_method_and_each_seed(name: str) -> None:
    rows = read_rows(movements.result(name))
    (axes,) = movements.draw(rows).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}  # type: ignore[arg-type]
    for method in movements.METHODS:
        runs = movements.counted(rows, method)
        assert list(runs) == list(movements.SEEDS)
        curves = zip(*(row["success"] for row in runs.values()), strict=True)
        assert lines[method] == pytest.approx([100 * fmean(values) for values in curves])
    assert len(axes.lines) == len(movements.METHODS) * (1 + len(movements.SEEDS))


@pytest.mark.parametrize("name", movements.SHOWN)
def test_page_has_the_table_and_the_figure(name: str) -> None:
    page, figure = (movements.DOCS / "study" / "movements.md").read_text(), movements.figure(name)
    assert movements.outcome(read_rows(movements.result(name))) in page
    assert f"](../assets/{figure.name})" in page and figure.is_file()


@pytest.mark.parametrize("name", movements.SHOWN)
def test_rate_is_the_best_of_the_tuning_seed(name: str) -> None:
    rows = read_rows(movements.result(name))
    tuned = {(row["method"], row["learning_rate"]): row["success"][-1] for row in rows if row["seed"] == 0}
    assert sorted(tuned) == sorted((method, rate) for method, rate, _ in movements.tuning())
    for method, rate in movements.best_rates(rows).items():
        assert tuned[method, rate] == max(tuned[method, other] for other in movements.RATES)


def test_a_run_is_made_once(tmp_path, monkeypatch) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(movements, "DOCS", tmp_path)
    rows = read_rows(movements.result("tce-reach"))
    assert rows == []
    for _ in range(2):
        assert movements.make(rows, "tce-reach", tmp_path / "runs", "clip", "1e-3", 7, TINY)
    assert read_rows(movements.result("tce-reach")) == rows and len(rows) == 1
    assert rows[0]["environment_steps"] == [0, 200] and len(rows[0]["success"]) == 2
