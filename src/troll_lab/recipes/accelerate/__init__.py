"""Configurations of `accelerate launch`, by name.

`python -m troll_lab.recipes.accelerate NAME` prints the path of one, for `accelerate launch --config_file`.
"""

from pathlib import Path

CONFIGURATIONS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
