"""What verl loads of us in every process, by its entry point ``verl.plugins``: hooks that wait for two of its modules.

verl logs what goes wrong here at DEBUG, and goes on; runs without TROLL load it too. So nothing is done before it is
needed, and it is the configuration that asks whether all is there, and raises.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from wrapt import when_imported


@when_imported("verl.workers.rollout.replica")
def _report(module: Any) -> None:
    def load() -> Any:
        from troll.verl.vllm_rollout import replica_class

        return replica_class()

    module.RolloutReplicaRegistry.register("vllm", load)


@when_imported("verl.experimental.agent_loop.agent_loop")
def _carry(_: Any) -> None:
    with suppress(ImportError):  # of something that verl lacks: a run without TROLL has to go on
        from troll.verl.agent_loop import carry_old_policies

        carry_old_policies()
