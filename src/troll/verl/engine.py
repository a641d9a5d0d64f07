"""The part that verl's FSDP and Megatron engines share when they capture and project."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed import ProcessGroup

from troll.trust_region.metrics import Tally
from troll.verl.hooks import Capture, Hook, Score, Update
from troll.verl.kl_target import NOT_LOGGED, KLTargetScheduler, computes_in_bfloat16
from troll.verl.old_policies import OldPolicyStore
from troll.verl.seam import tu
from troll.verl.seam.training import assign
from troll.verl.settings import BACKEND_PREFIX, TrollPolicyLossConfig

logger = logging.getLogger(__name__)

#: The devices that the engines are registered for: those with a platform in verl, or in a plug-in of it.
DEVICES = ("cuda", "npu", "xpu", "cpu")


class TrustRegionEngine:
    """A mixin, to be put before one of verl's engines with an LM head among the base classes.

    The pass that computes a rollout's old log-probabilities also captures its old policies, an update projects onto the
    trust region around them, and every other pass reads log-probabilities. All of them read the LM head in the model's
    forward, without computing all logits; if that is not possible, they read the logits.

    Attributes:
        hook: Reads the current batch; None for a pass that is left to verl.
        from_head: Whether the hook reads the head, instead of logits.
        old_policies: The old policies of the last rollout that was scored.
        kl_target: The scheduler that sets every update's learning rate; None without a `kl_target`.

    Raises:
        ValueError: If the configuration is not one of troll.verl.
    """

    trust_region: TrollPolicyLossConfig
    engine_config: Any
    hook: Hook | None = None
    old_policies: OldPolicyStore
    kl_target: KLTargetScheduler | None = None
    #: What goes around verl's scheduler if there is a `kl_target`.
    scheduler_class: type[KLTargetScheduler] = KLTargetScheduler
    from_head: bool = False
    _skips_update: bool = False

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = getattr(engine_config, "trust_region", None)
        if settings is None:
            raise ValueError(
                f"the engine {engine_config.strategy} gets its settings from the actor's configuration: select it with "
                "+troll=fsdp or +troll=megatron"
            )
        self.trust_region = settings
        # verl's engine compares the strategy with its own names.
        assign(engine_config, strategy=engine_config.strategy.removeprefix(BACKEND_PREFIX))
        # verl's fused kernels would replace the forward in which the head is read. The reference and the critic share
        # the model's configuration, and keep them.
        model_config = copy.copy(model_config)
        for config in (model_config, engine_config):
            assign(config, use_fused_kernels=False)
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]
        self.old_policies = OldPolicyStore()

    def processes(self) -> ProcessGroup | None:
        """The processes among which the tokens of a batch are divided."""
        raise NotImplementedError

    def check_head(self) -> None:
        """Prepares the model for readings of its head.

        Raises:
            ValueError: If its head cannot be read.
        """
        raise NotImplementedError

    def from_last_stage(self, numbers: dict[str, float]) -> dict[str, float]:
        """The numbers of a pipeline's last stage, which alone knows them, on all stages; every process must call it."""
        return numbers

    def _build_lr_scheduler(self, *arguments: Any) -> Any:
        """Overrides the parent: with a KL target, the parent's scheduler only makes the schedule."""
        scheduler = super()._build_lr_scheduler(*arguments)  # type: ignore[misc]
        if self.trust_region.kl_target is None:
            return scheduler
        warns = torch.distributed.get_rank() == 0
        bfloat16 = computes_in_bfloat16(self.engine_config)
        self.kl_target = self.scheduler_class(scheduler, self.trust_region, bfloat16=bfloat16, warns=warns)
        return self.kl_target

    @cached_property
    def reads_head(self) -> bool:
        """Whether the head can be read; otherwise the logits are."""
        try:
            self.check_head()
        except ValueError as error:
            logger.warning("TROLL reads whole logits here, which takes more memory and time: %s", error)
            return False
        return True

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Overrides the parent: passes a hook instead of the loss function."""
        self.hook = hook = self._hook(data, loss_function, forward_only)
        if hook is None:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        # The head takes one temperature for all samples; different ones are applied to logits.
        self.from_head = (
            self.reads_head
            and not isinstance(data["temperature"], torch.Tensor)
            and not tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False)
        )
        output = super().forward_backward_batch(data, hook, forward_only)  # type: ignore[misc]
        if isinstance(hook, Capture):
            self.old_policies = hook.old_policies
        if isinstance(hook, Update):
            sums = hook.sums() if hook.observed else Tally()
            metrics = {name: value.item() for name, value in sums.values(empty=0.0).items() if name not in NOT_LOGGED}
            means = self.from_last_stage({name: value.item() for name, value in sums.values().items()})
            self._skips_update = means["nonfinite"] > 0
            if self.kl_target is not None:
                metrics |= self.kl_target.update(means)
            if hook.observed:
                output["metrics"].update({f"trust_region/{name}": [value] for name, value in metrics.items()})
        return output

    def optimizer_step(self) -> float:
        """Overrides the parent: if logits were NaN or infinite, no process makes the update."""
        norm = math.nan
        if self._skips_update:
            logger.warning("NaN or infinite logits: the update is skipped, as verl does if gradients are not finite")
        else:
            norm = super().optimizer_step()  # type: ignore[misc]
        if self.kl_target is not None and not math.isfinite(norm):
            self.kl_target.skipped()
        return norm

    def _hook(self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool) -> Hook | None:
        entropy = tu.get_non_tensor_data(data, "calculate_entropy", default=False)
        if not forward_only:
            assert loss_function is not None
            return Update(self.trust_region, entropy, self.old_policies, loss_function, self.processes())
        if loss_function is not None:
            return None
        # A LoRA reference pass asks for no entropy.
        captures = entropy and self.trust_region.anchor == "old"
        return (Capture if captures else Score)(self.trust_region, entropy)
