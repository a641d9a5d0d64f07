"""`docs/results.md` and its figures, from the tables of runs and `template.md`.

The template is the page's prose. Between double braces stands what the data fill in: `{{hypotheses}}`,
`{{contrasts}}`, `{{fast}}`, `{{changes}}`, `{{settings}}`, `{{moved}}`, `{{tabular}}`, `{{signal}}`, `{{data}}`,
`{{figure robustness}}`, `{{figure contrasts}}`; `{{regime NAME}}`, everything about a primary regime, and
`{{kept NAME}}`, what its methods kept and learned; `{{exploratory TABLE}}`, a table's exploratory runs, which must be
there for each table that has any; `{{second TABLE}}`, the tuning of a regime of the second part; and within a sentence
`{{REGIME METHOD}}`, a success, or `{{REGIME METHOD - METHOD}}`, the difference of two, by surrogates, each at its own
rates or, with ` @ RATE`, at one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import figures, second, tables
from experiments.analysis import Section, exploratory_sections, primary_sections
from experiments.protocol import METHODS, REGIMES
from experiments.table import Result, read_csv
from troll.files import read_json, write_atomically
from troll.runs.statistics import paired_difference, seed_mean

TEMPLATE = Path(__file__).with_name("template.md")
_PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}")


@dataclass(frozen=True)
class Page:
    """The page, not written yet.

    Attributes:
        text: The text in Markdown.
        figures: The figures by name.
    """

    text: str
    figures: dict[str, figures.Drawing] = field(default_factory=dict)


def write_page(folder: Path, output: Path) -> Path:
    """Writes `results.md` and the figures in `results/`.

    Args:
        folder: The folder of the tables.
        output: The folder of the page; its figures go into a folder there.

    Returns:
        The page's path.

    Raises:
        ValueError: A table or the template cannot be used.
    """
    from matplotlib import style as matplotlib_style

    page = build(read_tables(folder), folder, TEMPLATE.read_text(encoding="utf-8"))
    (output / "results").mkdir(parents=True, exist_ok=True)
    for name, drawing in page.figures.items():
        with matplotlib_style.context(["default", figures.style(name)]):
            figures.save(drawing.draw(drawing.data), drawing.data, output / "results" / name)
    write_atomically(output / "results.md", page.text)
    return output / "results.md"


def read_tables(folder: Path) -> dict[str, list[Result]]:
    """The rows of every table by its name."""
    return {path.stem: read_csv(path) for path in sorted(folder.glob("*.csv"))}


def build(rows: Mapping[str, Sequence[Result]], folder: Path, template: str) -> Page:
    """Fills in the template.

    Args:
        rows: The rows of each table, by its name.
        folder: The folder of the tables, for the lists of questions.
        template: The page with placeholders, as the module's docstring describes them.

    Raises:
        ValueError: A placeholder is unknown, exploratory runs have none, or the data contradict the protocol.
    """
    first = {name: results for name, results in rows.items() if name not in second.REGIMES}
    primary = primary_sections(first, folder)
    explored = exploratory_sections(first)
    asked = [key.strip() for key in _PLACEHOLDER.findall(template)]
    if hidden := [table for table in explored if f"exploratory {table}" not in asked]:
        raise ValueError(
            f"the template shows no exploratory runs of {', '.join(hidden)}: add {{{{exploratory {hidden[0]}}}}} to it"
        )
    page = Page("")
    sections = [section for section in primary.values() if section.methods]
    blocks: dict[str, Callable[[], list[str]]] = {
        "hypotheses": lambda: [tables.hypotheses(primary)],
        "changes": lambda: [tables.changes(primary)],
        "contrasts": lambda: [tables.contrasts(sections)],
        "fast": lambda: [tables.fast(sections)],
        "settings": lambda: [tables.settings(sections)],
        "moved": lambda: [tables.moved(sections)],
        "tabular": lambda: [tables.tabular(_measured(folder, "tabular-cpu").get("rows", []))],
        "signal": lambda: [tables.signal(_measured(folder, "signal"))],
        "data": lambda: [_data(rows), *_commands(folder, rows)],
    }

    def fill(found: re.Match[str]) -> str:
        key = found[1].strip()
        kind, _, name = key.partition(" ")
        if kind == "exploratory" and name:
            parts = _explored(name, explored[name], page) if name in explored else ["Nothing to show yet."]
            return _block(key, parts)
        if kind == "regime" and name in REGIMES:
            return _block(key, _regime(primary[name], page))
        if kind == "second" and name in second.REGIMES:
            return _block(key, [tables.second_tuning(name, rows.get(name, ()))])
        if kind == "kept" and name in REGIMES:
            return _block(key, [tables.kept(primary[name])])
        if key == "figure robustness":
            return _block(key, [_figure("robustness", figures.rates(sections), page)])
        if key == "figure contrasts":
            return _block(key, [_figure("contrasts", figures.contrasts(sections), page)])
        if key in blocks:
            return _block(key, blocks[key]())
        if kind in REGIMES:
            return _number(primary[kind], name)
        raise ValueError(f"the template asks for {{{{{key}}}}}, which is unknown: experiments/page.py has the list")

    return Page(_PLACEHOLDER.sub(fill, template), page.figures)


def _block(key: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"<!-- from the tables: {key} -->", *parts, "<!-- end -->"])


def _regime(section: Section, page: Page) -> list[str]:
    if not section.methods:
        parts = ["*No counted runs yet.*"]
    else:
        parts = [f"*{tables.status(section)}*", _figure(section.regime, figures.rates([section]), page)]
        parts += [tables.by_rate(section), tables.secondary(section)]
    return parts + ([tables.tuning(section)] if section.tuning else [])


def _explored(table: str, sections: Sequence[Section], page: Page) -> list[str]:
    parts = [_figure(table, figures.seeds(sections), page)]
    for section in sections:
        size = sum(run.phase == "exploratory" for run in section.every_run)
        counted = ", with the counted runs of these rates and seeds" if size < section.size else ""
        parts += [f"*{table}: recipe `{section.regime}`, {size} exploratory runs{counted}.*", tables.explored(section)]
    return parts


def _figure(name: str, drawing: figures.Drawing, page: Page) -> str:
    """Notes a figure, and refers to it."""
    if not drawing.data:
        return "Nothing to show yet."
    page.figures[name] = drawing
    return f"![{drawing.caption}; the numbers are in the tables](results/{name}.svg)"


def _number(section: Section, wanted: str) -> str:
    """A success, or a difference with its interval."""
    names, _, rate = wanted.partition(" @ ")
    first, minus, second = names.partition(" - ")
    if unknown := {first, second or first} - set(METHODS):
        raise ValueError(f"the template asks for {{{{{section.regime} {wanted}}}}}: {unknown.pop()!r} is no method")
    finals, *others = [section.finals(name, float(rate) if rate else None) for name in (first, second) if name]
    found = paired_difference(finals, others[0]) if minus else seed_mean(list(finals.values())) if finals else None
    if found is None:
        return "(no runs yet)"
    if minus:
        return f"{tables.points(found.mean)} points {tables.interval(found.interval)}{section.mark}"
    return f"{tables.success(found)} %{section.mark}"


def _data(rows: Mapping[str, Sequence[Result]]) -> str:
    head = ["table", "recipe", "runs", "machine", "versions"]
    lines = []
    for table, results in rows.items():
        kinds = Counter((row.regime, row.phase, row.machine, row.versions) for row in results)
        lines += [
            [f"[{table}.csv](results/{table}.csv)", f"`{regime}`", f"{count} {phase}", machine, versions]
            for (regime, phase, machine, versions), count in sorted(kinds.items())
        ]
    return tables.table(head, lines)


def _measured(folder: Path, name: str) -> dict[str, Any]:
    """What a command wrote as JSON next to the tables; empty if it did not."""
    path = folder / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def _commands(folder: Path, rows: Mapping[str, Sequence[Result]]) -> list[str]:
    """With what the runs were made, as far as that is known."""
    files = [path for table in rows if (path := folder / f"{table}.txt").is_file()]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return ["\n".join(["```", *dict.fromkeys(lines), "```"])] if lines else []
