"""Prints the path of a configuration: `python -m troll_lab.recipes.accelerate NAME`."""

from __future__ import annotations

import argparse

from troll_lab.recipes.accelerate import CONFIGURATIONS

parser = argparse.ArgumentParser(
    prog="python -m troll_lab.recipes.accelerate", description="Print the path of a configuration of accelerate launch."
)
parser.add_argument("name", metavar="NAME", choices=CONFIGURATIONS, help=", ".join(CONFIGURATIONS))
print(CONFIGURATIONS[parser.parse_args().name])
