"""The undocumented parts of verl, Megatron and vLLM that the plug-in uses: the purpose of each, and its parameters.

verl changes every few weeks. So nothing here checks its version: `training` and `rollout` check at import that every
class, method and parameter is there, `vllm` when a server starts, and they report what is missing. Nothing else in
`troll.verl` imports from verl. A process imports only the module that it needs: a server does not load the training
engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from troll.needed import Needed

#: Versions that the tests ran with.
VERIFIED = ("0.9.0", "0.9.1")

try:
    _found = version("verl")
except PackageNotFoundError:
    raise ImportError("troll.verl needs verl: pip install 'troll-rl[verl]'") from None

from verl.utils import tensordict_utils as tu  # noqa: E402, F401


def lacking(what: object) -> ImportError:
    """The error to raise for something that the installed verl lacks."""
    return ImportError(
        f"troll.verl does not work with verl {_found}: {what}. It is verified with verl {' and '.join(VERIFIED)}"
    )


def check(needed: Iterable[Needed]) -> None:
    """Raises ImportError unless everything is there."""
    missing = [clause for each in needed for clause in each.missing()]
    if missing:
        raise lacking("; ".join(missing))
