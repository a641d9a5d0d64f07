"""The plugin that verl loads in every process by its entry point `verl.plugins`: hooks that wait for two modules.

verl logs errors of plugins only at DEBUG, and runs without TROLL load this one too. So nothing is done before it is
needed, and the configuration checks whether everything is there, and raises if not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from wrapt import when_imported


@when_imported("verl.workers.rollout.replica")
def _report(module: Any) -> None:
    registry = getattr(module, "RolloutReplicaRegistry", None)
    own = getattr(registry, "_registry", {}).get("vllm")
    if registry is None or own is None:  # another verl, as the configuration says where TROLL is asked for
        return

    def load() -> Any:
        try:
            from troll.verl.vllm_rollout import replica_class
        except Exception:  # of a verl that lacks something: with TROLL the driver has raised before
            return own()
        return replica_class(own())

    registry.register("vllm", load)


@when_imported("verl.experimental.agent_loop.agent_loop")
def _carry(_: Any) -> None:
    with suppress(Exception):  # likewise
        from troll.verl.agent_loop import carry_old_policies

        carry_old_policies()
