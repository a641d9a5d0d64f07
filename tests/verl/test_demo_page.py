"""The page that the demo ends with, of metrics as verl logs them."""

from __future__ import annotations

from html.parser import HTMLParser

from demo_page import HELD_OUT, PLOTS, STEP_SECONDS, median_seconds, metric_points, page

CLIP = {
    0: {HELD_OUT: 0.25},
    1: {"critic/score/mean": 0.3, "actor/entropy": 1.5, STEP_SECONDS: 4.0},
    2: {"critic/score/mean": 0.4, "actor/entropy": 1.4, STEP_SECONDS: 3.0, HELD_OUT: 0.5},
    3: {"critic/score/mean": 0.5, "actor/entropy": 1.2, STEP_SECONDS: 9.0},
}
TROLL = {step: {**values, "actor/trust_region/kl_before_mean": 0.01 * step} for step, values in CLIP.items()}


class Text(HTMLParser):
    """The page's texts, by the tag that they stand in; unclosed tags are errors of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def test_the_page_says_what_each_method_came_to() -> None:
    made = page({"clip": CLIP, "troll": {**TROLL, 4: {HELD_OUT: 0.75}}})
    text = Text()
    text.feed(made)
    assert not text.open
    assert text.texts["b"] == ["50.0\N{NO-BREAK SPACE}%", "75.0\N{NO-BREAK SPACE}%"]
    cells = [value.replace("\N{NO-BREAK SPACE}", " ") for value in text.texts["td"]]
    assert cells == ["25.0 %", "50.0 %", "4.0 s", "3", "25.0 %", "75.0 %", "4.0 s", "4"]
    assert text.texts["h3"] == [title for title, *_ in PLOTS]
    assert made.count("<svg") == len(PLOTS)
    # A line for each method that has the metric.
    assert [made.count(f">{name}</li>") for name in ("clip", "troll")] == [3, 4]


def test_a_metric_that_nobody_logged_leaves_a_sentence() -> None:
    assert "Nothing was logged." in page({"clip": CLIP})


def test_metrics_are_read_in_the_order_of_steps() -> None:
    assert metric_points({2: {"x": 1.0}, 1: {"x": 3.0}, 3: {"y": 2.0}}, "x") == [(1, 3.0), (2, 1.0)]
    assert median_seconds(CLIP) == 4.0
