"""The tables of the study and their page, and contests of tuned methods.

python -m experiments run docs/results/NAME.csv RECIPE --field value ... --output_dir runs/study/NAME
python -m experiments collect RUNS... --output docs/results/NAME.csv
python -m experiments page
python -m experiments tune RECIPE --tune FIELD=VALUE,VALUE --tuning_seeds SEED ... --field value ...
python -m experiments contest RUNS... --output runs/contest
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from experiments.protocol import Phase
from troll_lab.terminal import FAILED, INTERRUPTED, UsageError, run_command, silence_libraries, without_fields

DOCS = Path("docs")

_CODES = {"finished": 0, "failed": FAILED, "interrupted": INTERRUPTED}


def main() -> int:
    """Makes runs, collects their folders into a table, or writes pages; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser(
        "run",
        help="make the runs of a grid that the table does not have yet, and add them to it",
        description="The grid is that of troll compare, and so are the fields that follow. The same command resumes.",
    )
    running.add_argument("table", type=Path, metavar="CSV", help="docs/results/NAME.csv")
    running.add_argument("recipes", nargs="+", metavar="RECIPE")
    collecting = commands.add_parser("collect", help="add finished runs to a table")
    collecting.add_argument(
        "folders", nargs="+", type=Path, metavar="RUNS", help="folders of troll compare, or of runs"
    )
    collecting.add_argument("--output", type=Path, required=True, metavar="CSV", help="docs/results/NAME.csv")
    collecting.add_argument(
        "--phase",
        choices=get_args(Phase),
        default="exploratory",
        help="what the runs count for in a protocol (default: exploratory)",
    )
    page = commands.add_parser("page", help="write the pages of results and their figures from docs/results/*.csv")
    page.add_argument("--output", type=Path, default=DOCS, help="folder of the documentation (default: docs)")
    tuning = commands.add_parser(
        "tune",
        help="choose settings for each method on seeds of their own, then compare the methods",
        description="Fields and options are those of troll compare, and --tune FIELD=VALUE,VALUE ... with "
        "--tuning_seeds SEED ...: the values to choose from, and the seeds to choose on. The same command resumes.",
    )
    tuning.add_argument("recipes", nargs="+", metavar="RECIPE")
    contest = commands.add_parser(
        "contest", help="write the page about methods at their best learning rates, with tests of their differences"
    )
    contest.add_argument("folders", nargs="+", type=Path, metavar="RUNS", help="folders of troll compare, or of runs")
    contest.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the page")
    given, fields = sys.argv[1:], list[str]()
    if given[:1] in (["run"], ["tune"]) and not {"-h", "--help"} & set(given):
        given, fields = without_fields(given)
    arguments = parser.parse_args(given)
    return run_command(lambda: _run(arguments, fields), extras="trl,tasks,experiments")


def _run(arguments: argparse.Namespace, fields: list[str]) -> int:
    try:
        if arguments.command == "run":
            from experiments.grid import run

            silence_libraries()
            outcome, found = run(arguments.table, arguments.recipes, fields)
            print(f"{arguments.table}: {found} runs added or replaced")
            return _CODES[outcome]
        if arguments.command == "tune":
            from rich.console import Console

            from experiments.tuning import tune

            silence_libraries()
            return _CODES[tune(arguments.recipes, fields, Console())]
        if arguments.command == "collect":
            from experiments.collect import collect

            added, unfinished = collect(arguments.folders, arguments.output, arguments.phase)
            print(f"{arguments.output}: {added} runs added or replaced; {unfinished} are not finished")
        elif arguments.command == "contest":
            from experiments.contest_page import write_contest

            print(write_contest(arguments.folders, arguments.output))
        else:
            from experiments.page import write_pages

            print(*write_pages(DOCS / "results", arguments.output), sep="\n")
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
