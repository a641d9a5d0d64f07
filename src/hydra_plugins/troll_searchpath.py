"""Lets Hydra find the configuration group `troll`: `+troll=fsdp` on verl's command line needs no search path.

Hydra looks for plugins in the package `hydra_plugins`, which distributions share: it has no `__init__.py`. Where Hydra
is not installed, nothing imports this file.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class TrollSearchPath(SearchPathPlugin):
    """Puts the group behind an application's own configuration, which takes precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See the parent."""
        search_path.append("troll", "pkg://troll.verl.config")
