"""The tables of the study and their page.

python -m experiments run docs/results/NAME.csv RECIPE --field value ... --output_dir runs/study/NAME
python -m experiments collect RUNS... --output docs/results/NAME.csv
python -m experiments page
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from troll.cli import without_fields

DOCS = Path("docs")


def main() -> None:
    """Makes runs, collects their folders into a table, or writes the page from all tables."""
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
    collecting.add_argument("--exploratory", action="store_true", help="runs that are not the protocol's")
    page = commands.add_parser("page", help="write docs/results.md and its figures from docs/results/*.csv")
    page.add_argument("--output", type=Path, default=DOCS, help="folder of the page (default: docs)")
    given, fields = sys.argv[1:], list[str]()
    if given[:1] == ["run"] and not {"-h", "--help"} & set(given):
        given, fields = without_fields(given)
    arguments = parser.parse_args(given)
    try:
        if arguments.command == "run":
            from experiments.grid import run

            outcome, found = run(arguments.table, arguments.recipes, fields)
            print(f"{arguments.table}: {found} runs added or replaced")
            sys.exit(0 if outcome == "finished" else 1)
        elif arguments.command == "collect":
            from experiments.collect import collect

            added, unfinished = collect(arguments.folders, arguments.output, arguments.exploratory)
            print(f"{arguments.output}: {added} runs added or replaced; {unfinished} are not finished")
        else:
            from experiments.page import write_page

            print(write_page(DOCS / "results", arguments.output))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
