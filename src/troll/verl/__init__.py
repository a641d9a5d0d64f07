"""TROLL in stock verl (Ray, FSDP, Megatron, vLLM): selected by settings, without a fork. See docs/verl.md.

`+troll=fsdp` on verl's command line selects it; the settings are in `config/troll`, which Hydra finds by the plugin in
`hydra_plugins`. The actor's configuration is one of the classes below; reading it in a Ray worker registers the engines
and the policy loss with verl. Importing only this package does nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll.verl.reported import old_policy_record
    from troll.verl.settings import TrollFSDPActorConfig, TrollMcoreActorConfig, TrollPolicyLossConfig

__all__ = ["TrollFSDPActorConfig", "TrollMcoreActorConfig", "TrollPolicyLossConfig", "old_policy_record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "old_policy_record":
        from troll.verl.reported import old_policy_record

        return old_policy_record
    import troll.verl.seam  # noqa: F401 (first: it says if verl is missing)
    from troll.verl import fsdp, loss, settings  # noqa: F401 (registers)
    from troll.verl.seam.training import MegatronEngine

    if MegatronEngine is not None:
        from troll.verl import megatron  # noqa: F401 (registers)
    return getattr(settings, name)
