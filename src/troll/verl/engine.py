"""What verl's engines have in common once they capture and project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch.distributed import ProcessGroup
from verl.utils import tensordict_utils as tu

from troll.verl.hooks import Capture, Hook, Update
from troll.verl.settings import BACKEND_PREFIX, TrollPolicyLossConfig


class TrustRegionEngine:
    """Stands before one of verl's engines with an LM head among the base classes.

    The pass that computes a rollout's old log-probabilities captures its old policies, an update projects onto the
    trust region around them, and every other pass is the engine's own: a LoRA reference pass asks for no entropy.

    Raises:
        ValueError: If the configuration is not one of troll.verl.
    """

    trust_region: TrollPolicyLossConfig
    engine_config: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = getattr(engine_config, "trust_region", None)
        if settings is None:
            raise ValueError(
                f"the engine {engine_config.strategy} gets its settings from the actor's configuration: select it with "
                "hydra.searchpath=[pkg://troll.verl.config] +troll=fsdp (or megatron)"
            )
        self.trust_region = settings
        # The parent knows itself by its own name.
        object.__setattr__(engine_config, "strategy", engine_config.strategy.removeprefix(BACKEND_PREFIX))
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]

    def processes(self) -> ProcessGroup | None:
        """The processes among which the tokens of a batch are divided."""
        raise NotImplementedError

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """The parent's, with a hook in the loss function's place."""
        hook = self._hook(data, loss_function, forward_only)
        if hook is None:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        output = super().forward_backward_batch(data, hook, forward_only)  # type: ignore[misc]
        if isinstance(hook, Update) and hook.observed:
            output["metrics"].update({name: [value] for name, value in hook.metrics().items()})
        return output

    def _hook(self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool) -> Hook | None:
        if not forward_only:
            assert loss_function is not None
            return Update(self.trust_region, loss_function, self.processes())
        captures = loss_function is None and tu.get_non_tensor_data(data, "calculate_entropy", default=False)
        return Capture(self.trust_region) if captures and self.trust_region.anchor == "old" else None
