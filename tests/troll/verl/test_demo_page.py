"""The page that the demo ends with, of metrics as verl logs them."""

import re
from pathlib import Path

from demo_page import HELD_OUT, KL, PLOTS, STEP_SECONDS, page

from tests.pages import Page, check_page

CLIP = {
    0: {HELD_OUT: 0.25},
    1: {"critic/score/mean": 0.3, "actor/entropy": 1.5, STEP_SECONDS: 4.0, KL: 0.01, "actor/pg_clipfrac": 0.1},
    2: {"critic/score/mean": 0.4, "actor/entropy": 1.4, STEP_SECONDS: 3.0, KL: 0.03, HELD_OUT: 0.5},
    3: {"critic/score/mean": 0.5, "actor/entropy": 1.2, STEP_SECONDS: 9.0},
}
PROJECTED = "actor/trust_region/projected_fraction"
TROLL = {
    0: CLIP[0],
    1: {"critic/score/mean": 0.3, "actor/entropy": 1.5, STEP_SECONDS: 4.0, PROJECTED: 0.25},
    2: {"critic/score/mean": 0.4, STEP_SECONDS: 3.0, PROJECTED: 0.5},
}
LIMITS = {"clip": "ratio 0.8 to 1.2", "troll": "KL up to ε = 0.05", "<script>": "none"}


def texts(page: str, tag: str) -> list[str]:
    return [text.replace("\N{NO-BREAK SPACE}", " ") for text in re.findall(rf"<{tag}\b[^>]*>([^<]+)</{tag}>", page)]


def test_page_says_what_each_method_came_to() -> None:
    made = page({"clip": CLIP, "troll": {**TROLL, 4: {HELD_OUT: 0.75}}}, LIMITS)
    assert texts(made, "b") == ["50.0 %", "75.0 %"]
    assert "from 25.0 %; one run each, no comparison" in made.replace("\N{NO-BREAK SPACE}", " ")
    assert texts(made, "td") == [
        *("ratio 0.8 to 1.2", "25.0 %", "50.0 %", "10.0 %", "0.0200", "3", "4.0 s"),
        *("KL up to ε = 0.05", "25.0 %", "75.0 %", "37.5 %", "–", "4", "3.5 s"),
    ]
    assert texts(made, "h3") == [title for title, *_ in PLOTS]
    assert made.count("<svg") == len(PLOTS)
    # A line for each method that has the metric.
    assert [made.count(f">{name}</li>") for name in ("clip", "troll")] == [5, 4]


def test_names_of_methods_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page({"<script>": CLIP}, LIMITS))
    read = Page(path)
    check_page(read)
    assert "script" not in read.tags and read.text.count("<script>") == 2 + len(PLOTS), "headline, table and legends"
