"""Templates, with everything that a page can be given."""

from pathlib import Path

import pandas as pd

from tests.pages import Page
from troll_lab.reports.figures import inline_figure
from troll_lab.reports.page import Card, Section, render

ATTACK = """</script><img src=x onerror="alert('1')">&amp;\\1 \\g<0> {{ 7 * 7 }}"""


def fill(folder: Path, body: str, **values: object) -> Page:
    (folder / "test.html").write_text(
        '{% extends "base.html" %}{% from "macros.html" import details, section, table %}'
        f"{{% block title %}}a title{{% endblock %}}{{% block body %}}{body}{{% endblock %}}"
    )
    path = folder / "page.html"
    path.write_text(render("test.html", folder=folder, **values))
    return Page(path)


def test_every_text_of_a_card_is_escaped(tmp_path: Path) -> None:
    def paint(axes):
        axes.text(0, 0, ATTACK, parse_math=False)

    figure = inline_figure("slug", ATTACK, paint)
    card = Card("slug", ATTACK, figure, ATTACK, {ATTACK: "first"}, ATTACK)
    page = fill(tmp_path, "{{ section(one) }}", one=Section(ATTACK, [card], ATTACK, [ATTACK]))
    assert "img" not in page.tags
    assert page.text.count(ATTACK) == 8, "section, title, unit, legend, figure, caption, note, what is missing"
    assert page.attributes["aria-label"] == [ATTACK]


def test_every_text_of_a_table_is_escaped(tmp_path: Path) -> None:
    frame = pd.DataFrame([{ATTACK: ATTACK, "number": 0.5, "lines": "one,\ntwo"}, {ATTACK: "x" * 100}])
    page = fill(tmp_path, "{{ table(frame) }}{{ details(attack, attack) }}", frame=frame, attack=ATTACK)
    assert "img" not in page.tags
    assert page.text.count(ATTACK) == 4
    assert "0.5one, two" in page.text
    assert "x" * 100 in page.text, "nothing is cut off"


def test_a_figure_without_data_is_a_sentence(tmp_path: Path) -> None:
    page = fill(tmp_path, "{{ section(one) }}", one=Section("a", [Card("slug", "b", None)]))
    assert "Nothing was logged." in str(page.card("slug"))
