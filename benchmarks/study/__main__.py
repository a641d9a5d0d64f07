"""The tables of the study and their page.

python -m benchmarks.study run docs/results/NAME.csv RECIPE --field value ... --output_dir runs/study/NAME
python -m benchmarks.study second docs/results/second-a.csv [--seed SEED ...] [--jobs N]
python -m benchmarks.study collect RUNS... --output docs/results/NAME.csv
python -m benchmarks.study page
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.study import second
from troll.cli import without_fields

DOCS = Path("docs")


def main() -> None:
    """Makes runs, collects their folders into a table, or writes the page from all tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser(
        "run",
        help="make the runs of a grid that the table does not have yet, and add them to it",
        description="The grid is that of troll compare, and so are the fields that follow. The same command resumes.",
    )
    running.add_argument("table", type=Path, metavar="CSV", help="docs/results/NAME.csv")
    running.add_argument("recipes", nargs="+", metavar="RECIPE")
    second_part = commands.add_parser(
        "second",
        help="make the runs of the protocol's second part that the table does not have yet, and add them to it",
        description="A seed is one of the tuning or a counted one. All its methods come before the next seed. The same "
        "command resumes.",
    )
    second_part.add_argument("table", type=Path, metavar="CSV", help=f"docs/results/{{{','.join(second.REGIMES)}}}.csv")
    second_part.add_argument(
        "--seed", nargs="+", type=int, default=second.TUNING_SEEDS, help="default: the tuning seeds"
    )
    second_part.add_argument("--jobs", type=int, help="runs at once (default: one for each GPU, or for each core)")
    second_part.add_argument(
        "--output_dir", type=Path, help="folder of the runs (default: runs/study/ and the table's name)"
    )
    collecting = commands.add_parser("collect", help="add finished runs to a table")
    collecting.add_argument(
        "folders", nargs="+", type=Path, metavar="RUNS", help="folders of troll compare, or of runs"
    )
    collecting.add_argument("--output", type=Path, required=True, metavar="CSV", help="docs/results/NAME.csv")
    collecting.add_argument("--exploratory", action="store_true", help="runs that are not the protocol's")
    page = commands.add_parser("page", help="write docs/results.md and its figures from docs/results/*.csv")
    page.add_argument("--output", type=Path, default=DOCS, help="folder of the page (default: docs)")
    given, fields = sys.argv[1:], list[str]()
    if given[:1] == ["run"] and not {"-h", "--help"} & set(given):
        given, fields = without_fields(given)
    arguments = parser.parse_args(given)
    try:
        if arguments.command == "run":
            from benchmarks.study.grid import run

            outcome, found = run(arguments.table, arguments.recipes, fields)
            print(f"{arguments.table}: {found} runs added or replaced")
            sys.exit(0 if outcome == "finished" else 1)
        elif arguments.command == "second":
            from benchmarks.study.grid import run_second

            output = arguments.output_dir or Path("runs", "study", arguments.table.stem)
            outcome, found = run_second(arguments.table, arguments.seed, output, arguments.jobs)
            print(f"{arguments.table}: {found} runs added or replaced")
            sys.exit(0 if outcome == "finished" else 1)
        elif arguments.command == "collect":
            from benchmarks.study.collect import collect

            added, unfinished = collect(arguments.folders, arguments.output, arguments.exploratory)
            print(f"{arguments.output}: {added} runs added or replaced; {unfinished} are not finished")
        else:
            from benchmarks.study.page import write_page

            print(write_page(DOCS / "results", arguments.output))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
