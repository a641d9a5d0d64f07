"""The page that the demo ends with, of metrics as verl logs them."""

import re
from pathlib import Path

from demo_page import HELD_OUT, PLOTS, STEP_SECONDS, median_seconds, metric, page

from tests.pages import Page, check_page

CLIP = {
    0: {HELD_OUT: 0.25},
    1: {"critic/score/mean": 0.3, "actor/entropy": 1.5, STEP_SECONDS: 4.0},
    2: {"critic/score/mean": 0.4, "actor/entropy": 1.4, STEP_SECONDS: 3.0, HELD_OUT: 0.5},
    3: {"critic/score/mean": 0.5, "actor/entropy": 1.2, STEP_SECONDS: 9.0},
}
TROLL = {step: {**values, "actor/trust_region/kl_before_mean": 0.01 * step} for step, values in CLIP.items()}


def texts(page: str, tag: str) -> list[str]:
    return [text.replace("\N{NO-BREAK SPACE}", " ") for text in re.findall(rf"<{tag}\b[^>]*>([^<]+)</{tag}>", page)]


def test_the_page_says_what_each_method_came_to() -> None:
    made = page({"clip": CLIP, "troll": {**TROLL, 4: {HELD_OUT: 0.75}}})
    assert texts(made, "b") == ["50.0 %", "75.0 %"]
    assert texts(made, "td") == ["25.0 %", "50.0 %", "4.0 s", "3", "25.0 %", "75.0 %", "4.0 s", "4"]
    assert texts(made, "h3") == [title for title, *_ in PLOTS]
    assert made.count("<svg") == len(PLOTS)
    # A line for each method that has the metric.
    assert [made.count(f">{name}</li>") for name in ("clip", "troll")] == [3, 4]


def test_names_of_methods_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page({"<script>": TROLL}))
    read = Page(path)
    check_page(read)
    assert "script" not in read.tags and read.text.count("<script>") == 2 + len(PLOTS), "headline, table and legends"


def test_a_metric_that_nobody_logged_leaves_a_sentence() -> None:
    assert "Nothing was logged." in page({"clip": CLIP})


def test_metrics_are_read_in_the_order_of_steps() -> None:
    assert metric({2: {"x": 1.0}, 1: {"x": 3.0}, 3: {"y": 2.0}}, "x").to_dict() == {1: 3.0, 2: 1.0}
    assert median_seconds(CLIP) == 4.0
