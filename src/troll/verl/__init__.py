"""TROLL in stock verl (Ray, FSDP, Megatron, vLLM): chosen by settings, without a fork. See docs/verl.md.

``hydra.searchpath=[pkg://troll.verl.config] +troll=fsdp`` on verl's command line selects it; `troll/fsdp.yaml` beside
this file names the settings. Importing this package registers the engines and the policy loss with verl, which every
Ray worker does by itself as it reads the actor's configuration.
"""

from importlib.metadata import PackageNotFoundError, version

VERIFIED = "0.9.1"

try:
    _found = version("verl")
except PackageNotFoundError:
    raise ImportError(f"troll.verl needs verl {VERIFIED}: pip install 'troll-rl[verl]'") from None
if _found != VERIFIED:
    raise ImportError(
        f"troll.verl is verified with verl {VERIFIED} and builds on its private methods, but {_found} is installed: "
        f"pip install verl=={VERIFIED}"
    )

from verl.workers.engine import MegatronEngine  # noqa: E402

from troll.verl import fsdp, loss  # noqa: E402, F401 (registers)

if MegatronEngine is not None:
    from troll.verl import megatron  # noqa: F401 (registers)
from troll.verl.settings import TrollFSDPActorConfig, TrollMcoreActorConfig, TrollPolicyLossConfig  # noqa: E402

__all__ = ["TrollFSDPActorConfig", "TrollMcoreActorConfig", "TrollPolicyLossConfig"]
