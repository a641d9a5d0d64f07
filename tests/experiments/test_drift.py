"""The figure of drift in docs/method.md, and what the page says of it, are what was measured."""

import json
from statistics import fmean

import numpy as np

from experiments import drift

MEASURED = json.loads((drift.DOCS / "results" / "drift.json").read_text())


def test_figure_has_the_mean_of_each_method_and_each_seed() -> None:
    (axes,) = drift.draw(MEASURED).axes
    _, labels = axes.get_legend_handles_labels()
    assert labels == list(drift.METHODS) == list(MEASURED)
    named = {line.get_label(): line.get_ydata() for line in axes.lines}
    for name, runs in MEASURED.items():
        np.testing.assert_equal(
            named[name], [fmean(values) for values in zip(*(run["kl"] for run in runs), strict=True)]
        )
    assert len(axes.lines) == sum(1 + len(runs) for runs in MEASURED.values())


def test_page_says_where_each_method_ends() -> None:
    troll, penalty, proximal = (f"{fmean(run['kl'][-1] for run in runs):.1f}" for runs in MEASURED.values())
    said = (
        f"by {troll} nats a token at the end with TROLL, {penalty} with a KL penalty, {proximal} with the proximal pull"
    )
    assert said in " ".join((drift.DOCS / "method.md").read_text().split())
