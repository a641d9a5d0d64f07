"""The plugin that verl loads in every process by its entry point `verl.plugins`: hooks that wait for three modules.

Runs without TROLL load this plugin too, and verl logs a plugin's errors only at DEBUG. So the hooks import the rest of
`troll.verl`, and raise errors, only where a configuration names TROLL without selecting it, or where a rollout with
`anchor: rollout` begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from wrapt import when_imported


@when_imported("verl.utils.config")
def _check(module: Any) -> None:
    """Checks a configuration on the driver where verl validates it, before Ray starts."""
    validate = getattr(module, "validate_config", None)
    if validate is None:  # another verl, which the configuration reports if TROLL is asked for
        return

    @wraps(validate)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_unread(config)
        return validate(config, *args, **kwargs)

    module.validate_config = validate_config


def refuse_unread(config: Any) -> None:
    """Refuses a configuration that names TROLL where nothing reads it: verl would train with its own loss.

    Hydra adds `+troll=fsdp` as a plain value where it does not find the group, and every `+troll.name=value`. A group
    that is put elsewhere, as in `+troll@actor=fsdp`, does not reach the actor.

    Args:
        config: verl's whole configuration, as Hydra composed it.

    Raises:
        ValueError: If there is such a name.
    """
    from hydra.core.hydra_config import HydraConfig

    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    elsewhere = [group for group in chosen if group.startswith("troll@")]
    if "troll" not in config and not elsewhere:
        return
    named = elsewhere[0] if elsewhere else f"troll={config.troll}"
    raise ValueError(
        f"{named} selects nothing, and verl would train with its own loss: select TROLL by +troll=fsdp or "
        "+troll=megatron on the command line, or by the entry `- troll: fsdp` in a file's list `defaults`, and set "
        "actor_rollout_ref.actor.policy_loss.kl_bound and so on. If you did, Hydra does not find troll-rl's files: "
        "install troll-rl by pip, a checkout too"
    )


@when_imported("verl.workers.rollout.replica")
def _report(module: Any) -> None:
    """With `anchor: rollout`, gives verl's vLLM replicas a server that reports its distributions."""
    registry = getattr(module, "RolloutReplicaRegistry", None)
    own = getattr(registry, "_registry", {}).get("vllm")
    if registry is None or own is None:  # another verl, which the configuration reports if TROLL is asked for
        return

    def serve(replica: Any) -> None:
        from troll.verl.vllm_rollout import server_class

        replica.server_class = server_class()

    def load() -> type:
        replica = own()
        return type(replica.__name__, (replica,), {"__init__": _then(replica.__init__, "config", serve)})

    registry.register("vllm", load)


@when_imported("verl.experimental.agent_loop.agent_loop")
def _carry(module: Any) -> None:
    """With `anchor: rollout`, makes agent loops carry records: verl makes one for each sample."""

    def begin(_: Any) -> None:
        from troll.verl.agent_loop import begin_sample

        begin_sample()

    base = module.AgentLoopBase
    base.__init__ = _then(base.__init__, "rollout_config", begin)


def _then(init: Callable[..., None], config: str, act: Callable[[Any], None]) -> Callable[..., None]:
    """Wraps an `__init__` that sets a rollout's configuration: with `anchor: rollout`, `act` follows.

    Raises:
        RuntimeError: In the new `__init__`, if `act` fails.
    """

    @wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        custom = getattr(getattr(self, config, None), "custom", None) or {}
        if (custom.get("trust_region") or {}).get("anchor") != "rollout":
            return
        try:
            act(self)
        except Exception as error:
            raise RuntimeError(
                "actor_rollout_ref.actor.policy_loss.anchor=rollout needs the rollout to report its distributions, and "
                f"troll.verl cannot be used here: {error}. Fix this on every machine, or set anchor=old"
            ) from error

    return initialise
