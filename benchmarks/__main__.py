"""`python -m benchmarks NAME [NAME ...] [--device cuda] [--repeats 7] [--small] [--model FOLDER] [--output FOLDER]`."""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import measure
from troll.files import json_text, write_atomically

NAMES = (
    "head",
    "capture",
    "projection",
    "ratio",
    "step",
    "scaling",
    "packed",
    "anchor",
    "count",
    "sandbox",
    "gaussian",
)
#: Benchmarks that "all" leaves out: they answer other questions, take longer, or need verl's environment.
OTHERS = (
    "coverage",
    "compile",
    "gpu",
    "host",
    "kl_target",
    "simulate",
    "transfer",
    "tabular",
    "rollout_anchor",
    "verl_update",
    "engine",
    "truncation",
    "memory",
    "memory_runs",
)


def main() -> None:
    """Runs benchmarks, prints their tables, and writes one JSON file each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = (*NAMES, "all", *OTHERS)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the tables show medians and ranges")
    parser.add_argument("--small", action="store_true", help="tiny shapes, only to check that everything runs")
    parser.add_argument(
        "--model", nargs="+", help="checkpoints of Hugging Face models, for coverage, engine, step and truncation"
    )
    parser.add_argument("--minutes", type=float, default=12, help="time for gpu, which skips what does not fit")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of the JSON files")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if {"coverage", "engine", "truncation"} & {*arguments.names} and not arguments.model:
        parser.error(
            "coverage, engine and truncation need --model FOLDER: make smollm2 writes models/SmolLM2-135M-Instruct"
        )
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")

    warnings.filterwarnings("ignore")
    measure.small = arguments.small
    Console().print(measure.environment(arguments.device))
    arguments.output.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    expanded = [each for name in arguments.names for each in (NAMES if name == "all" else (name,))]
    for name in dict.fromkeys(expanded):
        try:
            module = import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("benchmarks", "tests", "troll", "troll_lab", "troll_sandbox"):
                raise
            Console().print(f"skipped: {name} ({error.name} is not installed)")
            continue
        if name == "gpu":
            if not module.main(arguments.device, arguments.repeats, arguments.output, arguments.minutes):
                sys.exit(1)
            continue
        models = [arguments.model] if name in ("coverage", "engine", "step", "truncation") and arguments.model else []
        try:
            rows = module.main(arguments.device, arguments.repeats, *models)
        except measure.Skipped as reason:
            Console().print(f"skipped: {name} ({reason})")
            continue
        environment = measure.environment(arguments.device)  # a benchmark may take fewer threads
        torch.set_num_threads(threads)
        given = "-".join(Path(model).name for each in models for model in each)
        path = arguments.output / f"{'-'.join(filter(None, (name, given, arguments.device)))}.json"
        write_atomically(path, json_text({"environment": environment, "rows": rows}, indent=1))
        Console().print(f"{path}\n")


main()
