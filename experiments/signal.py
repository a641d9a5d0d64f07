"""The proximal pull on groups without signal only, and on the others only: of docs/study/exploration.md.

    python -m experiments.signal --output_dir runs/signal [--seeds 4]

A group whose rewards are all equal has no signal: its advantages are 0, and the pull is all that acts on its tokens.
The recipe `sparse-signal` is trained at a fast rate with the pull KL(p ‖ p̃) everywhere, on these groups only, and on
the others only. Writes docs/results/signal.json; finished runs are not made again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments import RECIPES
from troll.files import json_text, read_json, write_atomically
from troll.trl.surrogates import SURROGATES, ScoredTokens, Terms, formulas
from troll_lab.cli import main as troll
from troll_lab.runs.recorded import read_summary

RESULT = Path(__file__).parents[1] / "docs" / "results" / "signal.json"
RECIPE = str(RECIPES / "sparse-signal.yaml")
COMMAND = [RECIPE, "--learning_rate", "3e-4", "--pull", "proximal", "--kl_bound", "0.5"]


def pulled(tokens: ScoredTokens, args: Any, own: Any, where: Tensor) -> Terms:
    """TROLL with its pull on some of the tokens only."""
    terms = formulas.troll(tokens, args, own)
    assert terms.penalty is not None
    return replace(terms, penalty=terms.penalty * where)


def without_signal(tokens: ScoredTokens, args: Any, own: Any) -> Terms:
    """TROLL with its pull on tokens with advantage 0 only."""
    return pulled(tokens, args, own, tokens.advantages == 0)


def with_signal(tokens: ScoredTokens, args: Any, own: Any) -> Terms:
    """TROLL with its pull on the other tokens only."""
    return pulled(tokens, args, own, tokens.advantages != 0)


PLACES = {"everywhere": formulas.troll, "without signal": without_signal, "with signal": with_signal}


def main() -> int:
    """Trains, and shows the success of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, list[float]] = {place: [] for place in PLACES}
    surrogate = SURROGATES["troll"]
    for seed in range(options.seeds):
        for place, terms in PLACES.items():
            folder = options.output_dir / f"{place.replace(' ', '-')}-{seed}"
            if read_summary(folder).get("status") != "finished":
                shutil.rmtree(folder, ignore_errors=True)
                SURROGATES["troll"] = replace(surrogate, terms=terms)
                if code := troll(["train", *COMMAND, "--seed", str(seed), "--output_dir", str(folder)]):
                    return code
            found[place].append(read_json(folder / "summary.json")["success_after"])
    write_atomically(RESULT, json_text(found, indent=1) + "\n")
    table = Table("pull", "success", "mean")
    for place, successes in found.items():
        table.add_row(place, " ".join(f"{success:.1%}" for success in successes), f"{fmean(successes):.1%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
