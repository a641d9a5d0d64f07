"""TROLL in stock verl (Ray, FSDP, Megatron, vLLM): chosen by settings, without a fork. See docs/verl.md.

``hydra.searchpath=[pkg://troll.verl.config] +troll=fsdp`` on verl's command line selects it; `troll/fsdp.yaml` beside
this file names the settings. Importing this package registers the engines and the policy loss with verl, which every
Ray worker does by itself as it reads the actor's configuration.
"""

from troll.verl import fsdp, loss  # noqa: F401 (registers)
from troll.verl.seam import MegatronEngine

if MegatronEngine is not None:
    from troll.verl import megatron  # noqa: F401 (registers)
from troll.verl.settings import TrollFSDPActorConfig, TrollMcoreActorConfig, TrollPolicyLossConfig

__all__ = ["TrollFSDPActorConfig", "TrollMcoreActorConfig", "TrollPolicyLossConfig"]
