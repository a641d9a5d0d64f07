"""The pages of the study are what its committed tables say. No run is made again here."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from matplotlib import style

from experiments import (
    analysis,
    drift,
    figures,
    memory_agent,
    movements,
    overthinking,
    overthinking_smollm2,
    page,
    second_analysis,
    table,
    tables,
)
from experiments.rows import Row, read_rows
from tests.experiments.made import DOCS, REGIME, fill, result

#: Without the settings, recipes and surrogates of the package: pages of finished runs do not depend on what these are.
ROWS_ONLY = """
import sys
gone = ("troll.trl", "troll.verl", "troll_lab.recipes", "troll_lab.tasks", "troll_lab.runs.grid", "trl", "transformers")
sys.modules.update(dict.fromkeys(gone))  # an import fails
from pathlib import Path
from experiments.page import write_pages
write_pages(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_pages_are_made_from_the_tables_and_need_only_these(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROWS_ONLY, str(DOCS / "results"), str(tmp_path)]
    subprocess.run(command, cwd=DOCS.parent, check=True)
    written = [*(tmp_path / "study").iterdir()]
    assert {path.stem for path in written} == page.read_templates().keys()
    for path in written:
        assert path.read_bytes() == (DOCS / "study" / path.name).read_bytes(), "run: make results"
    drawn = {path.name for path in (tmp_path / "results").glob("*.svg")}
    for name in drawn:  # the bytes depend on the fonts of the machine
        ours, published = (figures.shown(folder / "results" / name) for folder in (tmp_path, DOCS))
        assert ours == published, f"run: make results ({name})"
        assert (DOCS / "results" / name).with_suffix(".png").is_file(), "run: make results"
    assert {path.name for path in (DOCS / "results").glob("*.svg")} == drawn, "a figure of former data"


def test_numbers_in_sentences_stand_in_the_tables() -> None:
    """Sentences are written by hand: one whose number is in no table any more was forgotten."""
    templates = page.read_templates()
    pages = "".join((DOCS / "study" / f"{name}.md").read_text(encoding="utf-8") for name in templates)
    blocks = re.findall(r"<!-- from the tables.*?<!-- end -->", pages, re.S)
    prose = re.sub(r"\{\{.*?\}\}|`[^`]*`", "", "".join(templates.values()))
    decimals = r"(?<![\w.])\d+\.\d+"
    found = set(re.findall(decimals, prose))
    assert len(found) > 30
    assert found - set(re.findall(decimals, "".join(blocks))) == {"0.95", "2509.26114"}, "Adam's β₂ and a paper remain"


def test_committed_tables_are_sorted_consistent_and_small() -> None:
    for path in (DOCS / "results").glob("*.csv"):
        rows = table.read_csv(path)
        assert table.to_csv(table.merge([], rows)) == path.read_text(encoding="utf-8"), path
        for row in rows:
            if row.verdicts:
                assert row.successes.mean() == pytest.approx(row.success_after, abs=1e-6), (path, row.identity)
                assert len(table.read_questions(path.parent, row.questions)) == row.eval_size
    assert sum(path.stat().st_size for path in (DOCS / "results").glob("*")) < 10e6


def test_runs_that_were_made_again_are_the_same() -> None:
    """The page says so of those that are in two tables."""
    counted = {row.identity: row for row in table.read_csv(DOCS / "results" / "sparse-signal.csv")}
    for row in table.read_csv(DOCS / "results" / "forgetting.csv"):
        first = counted[row.identity]
        for name in ("success_after", "curve", "verdicts", "entropy", "sequence_kl"):
            assert getattr(row, name) == getattr(first, name), (name, row.identity)


def altered(row: table.Result, changes: dict[str, Any]) -> table.Result:
    """A run with other values, of which those of `settings` are added to its own."""
    settings = dict(row.settings) | changes.get("settings", {})
    return replace(row, **{**changes, "settings": tuple(settings.items())})


@pytest.mark.parametrize(
    ("every", "changes", "message"),
    [
        (False, {}, "troll at .* with seed 0 is in two tables"),
        (False, {"settings": {"kl_bound": "0.3"}}, "counted runs of troll differ in their settings"),
        (False, {"learning_rate": 1e-5}, "counted runs at 1e-5, which the protocol adds only when"),
        (True, {"settings": {"kl_bound": "0.3"}}, "the bound of troll is 0.3 in the counted runs, but the tuning"),
        (True, {"questions": "other"}, "runs answer different questions"),
    ],
)
def test_primary_sections_refuse_what_the_first_part_has_not(
    every: bool, changes: dict[str, Any], message: str
) -> None:
    """One more run of TROLL than there is, or every one of its runs."""
    folder = DOCS / "results"
    rows = [row for row in table.read_csv(folder / "sparse-signal.csv") if row.phase == "tuning" or row.seed < 3]
    counted = [row for row in rows if (row.phase, row.surrogate) == ("counted", "troll")]
    other = [altered(row, changes) for row in (counted if every else counted[:1])]
    kept = [row for row in rows if not every or row not in counted]
    with pytest.raises(ValueError, match=f"^sparse-signal: {message}"):
        analysis.primary_sections({"one": kept, "two": other}, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-3}, r"counted runs at 0\.001, which the protocol adds only when"),
        (
            {"settings": {"epsilon": "0.4"}},
            "a counted run of clip .* has a configuration that the tuning did not choose",
        ),
        ({"settings": {"epsilon": "0.3"}}, "a counted run of clip .* has a configuration that the protocol does not"),
        ({"settings": {"rollout_delay": "8"}}, "a counted run of clip .* has a configuration that the protocol does"),
        (
            {"settings": {"solver": "bisection"}},
            "a counted run of clip .* has solver=bisection, and another one solver=,",
        ),
    ],
)
def test_contest_refuses_what_the_second_part_has_not(changes: dict[str, Any], message: str) -> None:
    rows = table.read_csv(DOCS / "results" / "second-d.csv")
    clip = next(row for row in rows if (row.phase, row.surrogate) == ("counted", "clip"))
    with pytest.raises(ValueError, match=f"^second-d: {message}"):
        second_analysis.contest("second-d", [*rows, altered(clip, changes)])


def said_of_drift() -> str:
    troll, penalty, proximal = (f"{fmean(run['kl'][-1] for run in runs):.1f}" for runs in DRIFT.values())
    return (
        f"by {troll} nats a token at the end with TROLL, {penalty} with a KL penalty, {proximal} with the proximal pull"
    )


def table_of_weights() -> str:
    made = read_rows(overthinking.RESULT)
    weights = {recipe: overthinking.chosen(made, recipe) for recipe in overthinking.WEIGHTS}
    return overthinking.outcome(made, weights, overthinking.SEEDS)


def table_of_smollm2() -> str:
    rows = read_rows(overthinking_smollm2.RESULT)
    return overthinking.outcome(rows, overthinking_smollm2.WEIGHTS, overthinking_smollm2.SEEDS)


DRIFT = json.loads((DOCS / "results" / "drift.json").read_text())
MOVED = {name: read_rows(movements.result(name)) for name in movements.RECIPES}
CONTROLS = read_rows(memory_agent.RESULT)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("method", said_of_drift),
        ("study/shorter-answers", table_of_weights),
        ("study/shorter-answers", table_of_smollm2),
        ("study/memory-agent", lambda: memory_agent.conversations_table(CONTROLS)),
        ("study/memory-agent", lambda: memory_agent.updates_table(CONTROLS)),
        *(("study/movements", lambda rows=rows: movements.outcome(rows)) for rows in MOVED.values()),
        *(("study/movements", lambda name=name: f"](../assets/{movements.figure(name).name})") for name in MOVED),
    ],
)
def test_pages_have_what_single_scripts_make(name: str, made: Callable[[], str]) -> None:
    assert " ".join(made().split()) in " ".join((DOCS / f"{name}.md").read_text().split())


def seeds_of(rows: list[Row], *fields: str) -> dict[tuple[str, ...], list[int]]:
    """The seeds of the runs by these fields."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row["seed"])
    return {key: sorted(seeds) for key, seeds in found.items()}


def test_every_run_of_single_scripts_is_there() -> None:
    made = read_rows(overthinking.RESULT)
    weighed = seeds_of(made, "recipe", "weight")
    assert weighed.keys() == {(recipe, one) for recipe, weights in overthinking.WEIGHTS.items() for one in weights}
    assert all(overthinking.TUNING_SEED in seeds for seeds in weighed.values())
    for recipe in overthinking.WEIGHTS:
        every = sorted({overthinking.TUNING_SEED, *overthinking.SEEDS})
        assert weighed[recipe, overthinking.chosen(made, recipe)] == every
    assert seeds_of(read_rows(overthinking_smollm2.RESULT), "recipe") == {
        (recipe,): sorted(overthinking_smollm2.SEEDS) for recipe in overthinking_smollm2.WEIGHTS
    }
    trained = [*memory_agent.CONVERSATIONS, *map(memory_agent.longer, memory_agent.CONVERSATIONS)]
    trained += [f"{surrogate}, {rate}" for surrogate in memory_agent.SURROGATES for rate in memory_agent.RATES]
    once = {memory_agent.CONTROL, memory_agent.longer(memory_agent.CONTROL)}
    assert seeds_of(CONTROLS, "method") == {(each,): [*range(1 if each in once else 5)] for each in trained}
    for rows in MOVED.values():
        expected = {(method, rate): [seed] for method, rate, seed in movements.tuning()}
        for one in movements.compared(rows):
            expected[one] = [*expected.get(one, []), *movements.SEEDS]
        assert seeds_of(rows, "method", "learning_rate") == expected


@pytest.mark.parametrize("name", ["drift", *MOVED])
def test_figures_have_means_of_methods_and_lines_of_seeds(name: str) -> None:
    if name == "drift":
        figure, curves = drift.draw(DRIFT), {method: [run["kl"] for run in runs] for method, runs in DRIFT.items()}
    else:
        figure, of = movements.draw(MOVED[name]), movements.counted(MOVED[name]).items()
        curves = {one: [[100 * share for share in run["success"]] for run in runs.values()] for one, runs in of}
    (axes,) = figure.axes
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}
    for method, runs in curves.items():
        assert lines[method] == pytest.approx([fmean(values) for values in zip(*runs, strict=True)])
    assert len(axes.lines) == sum(1 + len(runs) for runs in curves.values())


def explored() -> list[table.Result]:
    """TROLL and the clip at two rates, four seeds each."""
    means = {("troll", 1e-4): 0.4, ("troll", 3e-4): 0.6, ("clip", 1e-4): 0.45, ("clip", 3e-4): 0.1}
    spread = (-0.05, 0.0, 0.0, 0.05)
    return [
        result(surrogate, rate, seed, mean + by, phase="exploratory")
        for (surrogate, rate), mean in means.items()
        for seed, by in enumerate(spread)
    ]


def test_rates_are_drawn_where_the_data_are() -> None:
    (section,) = analysis.exploratory_sections({"one": explored()})["one"]
    data = figures.rate_data("", section.methods)
    axes = figures.draw_rates([data]).axes[0]
    drawn = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert drawn == [line["mean"] for line in data["lines"].values()]
    assert [text.get_text() for text in axes.texts] == ["TROLL", "clip"]


@pytest.mark.parametrize("success", [0.0, 0.5])
def test_labels_of_equal_methods_are_apart(success: float) -> None:
    rows = [result(surrogate, 1e-4, seed, success) for surrogate in ("troll", "clip", "none") for seed in range(2)]
    axes = figures.draw_rates([figures.rate_data("", analysis.group(rows))]).axes[0]
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert heights[0] >= 0 and np.diff(heights).min() > 0.05 * max(0.05, success)


def test_methods_without_success_have_no_range_of_rates() -> None:
    rows = [result("troll", rate, seed, 0.0) for rate in (1e-4, 3e-4) for seed in range(2)]
    section = analysis.Section(REGIME, analysis.group(rows), [], [])
    assert tables.secondary(section).splitlines()[2].startswith("| TROLL | – | – | 2 of 2 |")


def test_seeds_are_drawn_where_the_data_are(tmp_path: Path) -> None:
    """In the row of their method, with a bar at their mean, and a colour for each rate that the legend names."""
    drawing = figures.seeds(analysis.exploratory_sections({"one": explored()})["one"])
    figure = drawing.draw(drawing.data)
    axes, (legend,) = figure.axes[0], figure.legends
    dots, bars = axes.lines[::2], axes.lines[1::2]
    rows = {(row["method"], row["rate"]): row["success"] for row in drawing.data}
    assert [np.asarray(line.get_xdata()).tolist() for line in dots] == list(rows.values())
    assert [np.asarray(line.get_xdata())[0] for line in bars] == pytest.approx([*map(fmean, rows.values())])
    ticks = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    drawn = [ticks[min(ticks, key=lambda y: abs(y - np.asarray(line.get_ydata())[0]))] for line in dots]
    assert drawn == [method for method, _ in rows]
    assert [text.get_text() for text in legend.get_texts()] == ["1e-4", "3e-4"]
    assert len({line.get_color() for line in dots}) == 2
    for name in ("one", "two"):  # the same bytes again
        with style.context(["default", figures.style("seeds")]):
            figures.save(drawing.draw(drawing.data), drawing.data, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    ("placeholder", "message"),
    [
        ("third third-x", "asks for {{third third-x}}, which is unknown"),
        ("exploratory", "asks for {{exploratory}}, which is unknown"),
        ("second-a trol", "'trol' is not a method"),
    ],
)
def test_build_names_a_mistake_in_a_template(tmp_path: Path, placeholder: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fill({}, tmp_path, f"{{{{{placeholder}}}}}")


def test_build_refuses_explored_runs_that_no_template_shows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no template shows the exploratory runs of rivals: add"):
        fill({"rivals": explored()}, tmp_path, "Prose.")
