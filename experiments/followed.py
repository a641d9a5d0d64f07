"""How the learning rate followed a KL target, from the folders of runs: writes docs/results/followed.json.

    python -m experiments.followed runs/study/third-starts

`{{figure followed}}` of `experiments/page.py` draws it: a line for each start, a column for each surrogate.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from troll.files import json_text, write_atomically
from troll_lab.runs.recorded import Run, metric, read_runs

RESULT = Path(__file__).parents[1] / "docs" / "results" / "followed.json"
#: Of each line of a run's metrics: the KL that was measured, that which was wanted, and the rate then.
METRICS = {
    "kl": "trust_region/kl_target/measured",
    "wanted": "trust_region/kl_target/wanted",
    "rate": "learning_rate",
}


def main() -> int:
    """Reads the runs, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path, help="runs with a kl_target, or comparisons of such runs")
    lines = [line_of(run) for run in read_runs(parser.parse_args().folder)]
    write_atomically(RESULT, json_text({"lines": lines}) + "\n")
    return 0


def line_of(run: Run) -> dict[str, Any]:
    """What the figure needs of a run: lists of numbers with three digits, one for each logged step.

    Raises:
        ValueError: If the run has no KL target.
    """
    series = {name: metric(run.rows, key) for name, key in METRICS.items()}
    if missing := [METRICS[name] for name, values in series.items() if values.empty]:
        raise ValueError(f"{run.folder} has no kl_target, or is of another commit: its metrics lack {missing[0]}")
    found = {name: [float(f"{value:.3g}") for value in values] for name, values in series.items()}
    start = float(run.settings["learning_rate"])
    return {"surrogate": run.surrogate, "start": start, "step": list(map(int, series["wanted"].index)), **found}


if __name__ == "__main__":
    raise SystemExit(main())
