"""The pages of results and their figures, from the tables of runs and the templates in `pages/`.

A template is a page's prose. Between double braces stands what the data fill in: `{{hypotheses}}`, `{{contrasts}}`,
`{{fast}}`, `{{changes}}`, `{{settings}}`, `{{moved}}`, `{{tabular}}`, `{{signal}}`, `{{data}}`;
`{{figure robustness}}`, `{{figure contrasts}}`, the same of the second part, `{{figure second-robustness}}` and
`{{figure second-contrasts}}`, and `{{figure TABLE}}`, that of a table's exploratory runs;
`{{regime NAME}}`, everything about a primary regime, and `{{kept NAME}}`, what its methods kept and learned;
`{{exploratory TABLE}}`, a table's exploratory runs, which must be there for each table that has any;
`{{second TABLE}}`, the runs of a regime of the second part, and `{{second hypotheses}}`;
`{{third TABLE}}`, the runs of a regime of the third part, `{{course TABLE}}`, their rates and successes in training,
`{{third hypotheses}}`, `{{third contrasts}}`, `{{third dial}}`, `{{third predictions}}` and `{{third laws}}`; and
within a sentence `{{third size}}`, how many of its runs there are,
`{{REGIME METHOD}}`, a success, or `{{REGIME METHOD - METHOD}}`, the difference of two, by surrogates, each at its own
rates or, with ` @ RATE`, at one. In the second part a regime is a table's name, and methods are the keys of
`second.METHODS`; `others-a` is `second-a` with the third part's runs of the same configurations, so on more seeds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import figures, second, second_analysis, tables, third, third_analysis
from experiments.analysis import Section, exploratory_sections, primary_sections
from experiments.protocol import METHODS, REGIMES
from experiments.second_analysis import Contest
from experiments.table import Result, read_csv
from troll.files import read_json, write_atomically
from troll_lab.runs.statistics import paired_difference, seed_mean

#: The templates: a page of `docs/study/` each, by the same name.
TEMPLATES = Path(__file__).with_name("pages")
_PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)  # a sentence may break in it


@dataclass(frozen=True)
class Pages:
    """The pages, not written yet.

    Attributes:
        texts: The Markdown of each page, by its name.
        figures: The figures by name.
    """

    texts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, figures.Drawing] = field(default_factory=dict)


def write_pages(folder: Path, output: Path) -> list[Path]:
    """Writes the pages into `study/`, and their figures into `results/`.

    Args:
        folder: The folder of the tables.
        output: The folder of the documentation, in which both are.

    Returns:
        The paths of the pages.

    Raises:
        ValueError: A table or a template cannot be used.
    """
    from matplotlib import style as matplotlib_style

    pages = build(read_tables(folder), folder, read_templates())
    for name in ("results", "study"):
        (output / name).mkdir(parents=True, exist_ok=True)
    for name, drawing in pages.figures.items():
        with matplotlib_style.context(["default", figures.style(name)]):
            figures.save(drawing.draw(drawing.data), drawing.data, output / "results" / name)
    for name, text in pages.texts.items():
        write_atomically(output / "study" / f"{name}.md", text)
    return [output / "study" / f"{name}.md" for name in pages.texts]


def read_templates() -> dict[str, str]:
    """The templates by the names of their pages."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.md"))}


def read_tables(folder: Path) -> dict[str, list[Result]]:
    """The rows of every table by its name."""
    return {path.stem: read_csv(path) for path in sorted(folder.glob("*.csv"))}


def build(rows: Mapping[str, Sequence[Result]], folder: Path, templates: Mapping[str, str]) -> Pages:
    """Fills in the templates.

    Args:
        rows: The rows of each table, by its name.
        folder: The folder of the tables, for the lists of questions.
        templates: Pages with placeholders, as the module's docstring describes them, by name.

    Raises:
        ValueError: A placeholder is unknown, exploratory runs have none, or the data contradict the protocol.
    """
    first = {
        name: results
        for name, results in rows.items()
        if name not in {*second.REGIMES, *third.REGIMES, third.DIAL, third.RIVALS}
    }
    primary = primary_sections(first, folder)
    contests = {name: second_analysis.contest(name, rows.get(name, ())) for name in second.REGIMES}
    targeted = {name: third_analysis.contest(name, rows.get(name, ())) for name in third.REGIMES}
    others = {
        former.replace("second", "others"): third_analysis.OtherSeeds(contests[former], targeted[name])
        for name, former in third.FORMER.items()
    }
    explored = exploratory_sections(first)
    asked = {" ".join(key.split()) for template in templates.values() for key in _PLACEHOLDER.findall(template)}
    if hidden := [table for table in explored if f"exploratory {table}" not in asked]:
        raise ValueError(
            f"no template shows the exploratory runs of {', '.join(hidden)}: add {{{{exploratory {hidden[0]}}}}} to one"
        )
    pages = Pages()
    sections = [section for section in primary.values() if section.methods]
    blocks: dict[str, Callable[[], list[str]]] = {
        "hypotheses": lambda: [tables.hypotheses(primary)],
        "changes": lambda: [tables.changes(primary)],
        "contrasts": lambda: [tables.contrasts(sections)],
        "fast": lambda: [tables.fast(sections)],
        "settings": lambda: [tables.settings(sections)],
        "moved": lambda: [tables.moved(sections)],
        "tabular": lambda: [tables.tabular(_measured(folder, "tabular-cpu").get("rows", []))],
        "second hypotheses": lambda: [tables.second_hypotheses(contests)],
        "third hypotheses": lambda: [tables.third_hypotheses(targeted)],
        "third dial": lambda: [tables.third_dial(third_analysis.dials(targeted["third-a"], rows.get(third.DIAL, ())))],
        "third rivals": lambda: [
            tables.third_rivals(
                targeted["third-a"], third_analysis.rivals(targeted["third-a"], rows.get(third.RIVALS, ()))
            )
        ],
        "third contrasts": lambda: [tables.third_contrasts(targeted.values())],
        "third predictions": lambda: [tables.third_predictions(contests)],
        "third laws": lambda: [tables.third_laws(contests)],
        "signal": lambda: [tables.signal(_measured(folder, "signal"))],
        "data": lambda: [_data(rows), *_commands(folder, rows)],
    }

    drawings: dict[str, Callable[[], figures.Drawing]] = {
        "starts": lambda: figures.starts(
            [
                (targeted[name], contests[former].methods)
                for name, former in third.FORMER.items()
                if third.REGIMES[name].gates
            ]
        ),
        "followed": lambda: figures.followed(_measured(folder, "followed").get("lines", [])),
        "robustness": lambda: figures.rates([(each.title, each.methods) for each in sections]),
        "contrasts": lambda: figures.contrasts(
            "TROLL", [(s.title, one.second.label, one.estimate) for s in sections for one in s.contrasts]
        ),
        "second-robustness": lambda: figures.rates(
            [(each.title, [*each.methods.values()]) for each in contests.values()]
        ),
        "second-contrasts": lambda: figures.contrasts(
            second.METHODS[second.NEW].name, tables.second_differences(contests.values())
        ),
    }

    def fill(found: re.Match[str]) -> str:
        key = " ".join(found[1].split())
        kind, _, name = key.partition(" ")
        if kind == "exploratory" and name:
            parts = _explored(name, explored[name], pages) if name in explored else ["Nothing to show yet."]
            return _block(key, parts)
        if kind == "regime" and name in REGIMES:
            return _block(key, _regime(primary[name], pages))
        if kind == "second" and name in second.REGIMES:
            return _block(key, [tables.second_runs(contests[name]), tables.second_tuning(name, rows.get(name, ()))])
        if kind == "third" and name in third.REGIMES:
            former = contests.get(third.FORMER.get(name, ""))
            return _block(key, [tables.third_runs(targeted[name], former)])
        if kind == "course" and name in third.REGIMES:
            return _block(key, [tables.third_course(targeted[name])])
        if key == "third size":
            return tables.third_size(targeted.values())
        if kind == "kept" and name in REGIMES:
            return _block(key, [tables.kept(primary[name])])
        if kind == "figure" and name:
            drawing = drawings[name]() if name in drawings else figures.seeds(explored.get(name, []))
            return _block(key, [_figure(name, drawing, pages)])
        if key in blocks:
            return _block(key, blocks[key]())
        if kind in REGIMES:
            return _number(kind, primary[kind], METHODS, name)
        if kind in others:
            return _number(kind, others[kind], second.METHODS, name)
        if kind in second.REGIMES:
            return _number(kind, contests[kind], second.METHODS, name)
        raise ValueError(f"the template asks for {{{{{key}}}}}, which is unknown: experiments/page.py has the list")

    pages.texts.update({name: _PLACEHOLDER.sub(fill, template) for name, template in templates.items()})
    return pages


def _block(key: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"<!-- from the tables: {key} -->", *parts, "<!-- end -->"])


def _regime(section: Section, pages: Pages) -> list[str]:
    if not section.methods:
        parts = ["*No counted runs yet.*"]
    else:
        drawing = figures.rates([(section.title, section.methods)])
        parts = [f"*{tables.status(section)}*", _figure(section.regime, drawing, pages)]
        parts += [tables.by_rate(section), tables.secondary(section)]
    return parts + ([tables.tuning(section)] if section.tuning else [])


def _explored(table: str, sections: Sequence[Section], pages: Pages) -> list[str]:
    parts = [_figure(table, figures.seeds(sections), pages)]
    for section in sections:
        size = sum(run.phase == "exploratory" for run in section.every_run)
        counted = ", with the counted runs of these rates and seeds" if size < section.size else ""
        parts += [f"*{table}: recipe `{section.regime}`, {size} exploratory runs{counted}.*", tables.explored(section)]
    return parts


def _figure(name: str, drawing: figures.Drawing, pages: Pages) -> str:
    """Notes a figure, and refers to it."""
    if not drawing.data:
        return "Nothing to show yet."
    pages.figures[name] = drawing
    return f"![{drawing.caption}; the numbers are in the tables](../results/{name}.svg)"


def _number(
    regime: str, section: Section | Contest | third_analysis.OtherSeeds, known: Collection[str], wanted: str
) -> str:
    """A success, or a difference with its interval."""
    names, _, rate = wanted.partition(" @ ")
    first, minus, other = names.partition(" - ")
    if unknown := {first, other or first} - set(known):
        raise ValueError(f"the template asks for {{{{{regime} {wanted}}}}}: {unknown.pop()!r} is not a method")
    finals, *others = [section.finals(name, float(rate) if rate else None) for name in (first, other) if name]
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
            [f"[{table}.csv](../results/{table}.csv)", f"`{regime}`", f"{count} {phase}", machine, versions]
            for (regime, phase, machine, versions), count in sorted(kinds.items())
        ]
    return tables.table(head, lines)


def _measured(folder: Path, name: str) -> dict[str, Any]:
    """The JSON that a command wrote next to the tables; empty if it did not."""
    path = folder / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def _commands(folder: Path, rows: Mapping[str, Sequence[Result]]) -> list[str]:
    """The commands that made the runs, as far as they are known."""
    files = [path for table in rows if (path := folder / f"{table}.txt").is_file()]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return ["\n".join(["```", *dict.fromkeys(lines), "```"])] if lines else []
