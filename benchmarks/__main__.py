"""``python -m benchmarks NAME [NAME ...] [--device cuda] [--repeats 7] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import json
import warnings
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import measure

NAMES = ("head", "capture", "projection", "step", "scaling", "packed", "anchor", "sandbox")
#: Not among "all": they answer other questions, take longer, or need verl's environment.
OTHERS = ("simulate", "predict", "staleness", "ray_store")


def main() -> None:
    """Runs benchmarks, prints their tables, and writes one JSON file each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = (*NAMES, "all", *OTHERS)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the tables show medians and ranges")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of the JSON files")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")

    warnings.filterwarnings("ignore")
    environment = measure.environment(arguments.device)
    Console().print(environment)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in NAMES if "all" in arguments.names else arguments.names:
        rows = import_module(f"benchmarks.{name}").main(arguments.device, arguments.repeats)
        path = arguments.output / f"{name}-{arguments.device}.json"
        path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
        Console().print(f"{path}\n")


main()
