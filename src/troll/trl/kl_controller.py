"""The weight of a divergence in the loss (α of a pull, β of a KL penalty): fixed, or adapted after each rollout."""

from __future__ import annotations

import warnings

from accelerate import Accelerator
from torch import Tensor

from troll.trust_region.metrics import masked_total
from troll.trust_region.weight import adapted, limited


class AdaptiveKLController:
    """The weight of a divergence over the training, called β here; every method runs on every process.

    The paper compares d with the mean KL of a whole rollout after its last update, which would need another pass. Here
    d is compared with the mean over the tokens of the rollout's last update, over all processes, measured in the
    forward pass of that update: with U updates per rollout, after U − 1 of them. The divergence is the one in the
    penalty. Unlike the paper's, β has limits, and a warning is logged when β reaches one.

    Args:
        accelerator: Adds up the KL of the trainer's processes.
        name: The divergence's name in the log, where its weight is `trust_region/NAME_weight`: "kl_penalty" or
            "regression"; None if the surrogate weights nothing.
        weight: β at the start.
        target: d, in nats; None keeps β.
    """

    def __init__(self, accelerator: Accelerator, name: str | None, weight: float, target: float | None) -> None:
        self._accelerator, self._initial, self._target = accelerator, weight, target
        self._warned = False
        self.name, self.adapts = name, target is not None
        self.start()

    def start(self) -> None:
        """Begins a training with the first β, without the sums of an interrupted update."""
        self.value = self._initial
        self._kl: float | None = None
        self._seen: Tensor | None = None

    def observe(self, kl: Tensor, mask: Tensor) -> None:
        """Adds the KL (N,) of a micro-batch's tokens, in nats; the (N,) mask is 1 for those that count."""
        if self.adapts:
            total = masked_total(kl, mask)
            self._seen = total if self._seen is None else self._seen + total

    def end_update(self, *, adapt: bool) -> None:
        """Ends an update; with `adapt`, β adapts to the KL observed since the last call."""
        seen, self._seen = self._seen, None
        if seen is None or self._target is None or not adapt:
            return
        kl, tokens = self._accelerator.reduce(seen, reduction="sum").tolist()
        if not tokens:
            return
        self._kl = kl / tokens
        weight = adapted(self.value, self._kl, self._target)
        self.value = limited(weight, self._initial)
        if self.value != weight and self._accelerator.is_main_process and not self._warned:
            self._warned = True
            warnings.warn(
                f"trust_region/{self.name}_weight stays at {self.value:g}, the limit of its range, though the mean KL "
                f"is {self._kl:.2g} and the target {self._target:g}: choose another target, learning_rate or "
                "updates_per_rollout",
                stacklevel=2,
            )

    def metrics(self) -> dict[str, float]:
        """`trust_region/NAME_kl`, the mean KL from which β was last adapted, if that was since the last call."""
        kl, self._kl = self._kl, None
        return {} if kl is None else {f"trust_region/{self.name}_kl": kl}

    def state_dict(self) -> dict[str, float]:
        """β, for a checkpoint."""
        return {"weight": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the β of a checkpoint."""
        self.value = state["weight"]
