"""TROLL in stock verl (Ray, FSDP, Megatron, vLLM): chosen by settings, without a fork. See docs/verl.md.

``hydra.searchpath=[pkg://troll.verl.config] +troll=fsdp`` on verl's command line selects it; `config/troll` names the
settings. Reading the actor's configuration, which every Ray worker does, takes one of the classes below, and that
registers the engines and the policy loss with verl. Importing this package does nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll.verl.settings import TrollFSDPActorConfig, TrollMcoreActorConfig, TrollPolicyLossConfig

__all__ = ["TrollFSDPActorConfig", "TrollMcoreActorConfig", "TrollPolicyLossConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from troll.verl import fsdp, loss, settings  # noqa: F401 (registers)
    from troll.verl.seam.training import MegatronEngine

    if MegatronEngine is not None:
        from troll.verl import megatron  # noqa: F401 (registers)
    return getattr(settings, name)
