"""`python -m benchmarks.study collect RUNS... --output docs/results/NAME.csv`, then `... page`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path("docs")


def main() -> None:
    """Collects run folders into a table, or writes the page from all tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="add finished runs to a table")
    collecting.add_argument(
        "folders", nargs="+", type=Path, metavar="RUNS", help="folders of troll compare, or of runs"
    )
    collecting.add_argument("--output", type=Path, required=True, metavar="CSV", help="docs/results/NAME.csv")
    collecting.add_argument("--exploratory", action="store_true", help="runs that are not the protocol's")
    page = commands.add_parser("page", help="write docs/results.md and its figures from docs/results/*.csv")
    page.add_argument("--output", type=Path, default=DOCS, help="folder of the page (default: docs)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "collect":
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
