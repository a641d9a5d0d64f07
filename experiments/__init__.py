"""The results of the study: from run folders to tables in `docs/results/`, and from these to the pages of results."""

from pathlib import Path

#: The recipes of the study, which are not installed: `troll train` and `troll compare` find them by path.
RECIPES = Path(__file__).with_name("recipes")
