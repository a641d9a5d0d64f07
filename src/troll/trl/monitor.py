"""Statistics of the trust region in every update, over micro-batches and processes, for the log and adaptive bounds."""

from __future__ import annotations

import warnings

from accelerate import Accelerator
from torch import Tensor

from troll.trl.config import TrollConfig
from troll.trust_region.bounds import BoundStatistics
from troll.trust_region.diagnostics import support_too_small
from troll.trust_region.metrics import Tally, step_tally, support_tally
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import TrustRegionStep

#: The advice in errors about NaN and infinity.
REMEDY = (
    "and the update was not made. Resume from the last checkpoint with a lower max_grad_norm, or begin a new run from "
    "its weights with a lower learning_rate (a resumed run keeps that of its checkpoint); in fp16, use bf16"
)
#: A larger fraction of projected tokens than this, over this many optimiser steps, is worth a warning.
WATCHED_FRACTION, WATCHED_STEPS = 0.1, 100
#: The means over an update's tokens that the host needs before the update ends.
_KNOWN = ("projected_fraction", "kl_before_mean")


class Monitor:
    """Collects `TrustRegionStep` of the micro-batches; every method runs on every process.

    Args:
        accelerator: Adds up the statistics of the trainer's processes.
        args: The trainer's configuration.
    """

    def __init__(self, accelerator: Accelerator, args: TrollConfig) -> None:
        self._accelerator, self._args = accelerator, args
        self.start()
        # Projected tokens, and all, since some step.
        self._watched = [0.0, 0.0]
        self._watched_since: int | None = None
        self._warned_of_coverage = False

    def start(self) -> None:
        """Begins a training, without the sums of an interrupted update."""
        self.tally = Tally()
        # The sums that the host needs: of the current update, on the device; and of the last one, on the host.
        self._update, self._known = Tally(), dict[str, Tensor]()

    def observe(self, step: TrustRegionStep, old: SparsePolicy, mask: Tensor) -> None:
        """Adds the N tokens of a micro-batch.

        Args:
            step: Their trust region, each (N,).
            old: Their old policies, (N,).
            mask: (N,), 1 for the tokens that count.
        """
        tally = step_tally(step, mask)
        # Tool tokens are masked by multiplication in the parent, which NaN survives: they are counted too.
        tally.counts["nonfinite"] = (~step.kl_before.isfinite()).sum().to(step.kl_before)
        self._update += Tally({name: tally.totals[name] for name in _KNOWN}, counts=tally.counts)
        self.tally += tally + support_tally(old, mask)

    def observe_loss(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch."""
        self._update += Tally(counts={"nonfinite_losses": (~loss.detach().isfinite()).to(loss.dtype)})

    def check(self, global_step: int) -> None:
        """Checks the tokens and losses of an update, made after `global_step` others, before its last backward pass.

        All sums that the host needs are fetched with one collective and one wait for the device.

        Raises:
            FloatingPointError: If logits or losses are NaN or infinite in any process, on every process.
        """
        known, self._update = over_processes(self._update, self._accelerator), Tally()
        self._known = known.totals
        if broken := known.counts.get("nonfinite"):
            raise FloatingPointError(
                f"step {global_step + 1}: the logits of {int(broken)} tokens are NaN or infinite, {REMEDY}"
            )
        if known.counts.get("nonfinite_losses"):
            raise FloatingPointError(f"step {global_step + 1}: the loss is NaN or infinite, {REMEDY}")
        if self._watched_since is None and self._known:
            self._watched_since = global_step

    def end_update(self) -> BoundStatistics | None:
        """The statistics of the update that ends here, over all processes; None if no token was observed."""
        known, self._known = self._known, {}
        if not known:
            return None
        (projected, tokens), (kl, _) = known["projected_fraction"].tolist(), known["kl_before_mean"].tolist()
        return BoundStatistics(projected_fraction=projected / tokens, kl=kl / tokens) if tokens else None

    def metrics(self, global_step: int) -> dict[str, float]:
        """`trust_region/*` over all tokens since the last call and all processes, and warnings about them."""
        if not self.tally.totals:
            return {}
        tally = over_processes(self.tally, self._accelerator)
        self.tally = Tally()
        metrics = {name: value.item() for name, value in tally.values(empty=0.0).items()}
        # One multiplier for many tokens projects them all, and a controller keeps the projected share at a target.
        if self._args.constraint == "token" and self._args.kl_bound_schedule != "hold_projected_fraction":
            projected, tokens = tally.totals["projected_fraction"].tolist()
            self._watch_projections(projected, tokens, global_step)
        message = support_too_small(metrics["tail_mass"], top_k=self._args.support_top_k, setting="support_top_k")
        if (
            self._args.truncation is None
            and message is not None
            and not self._warned_of_coverage
            and self._accelerator.is_main_process
        ):
            self._warned_of_coverage = True
            warnings.warn(message, stacklevel=2)
        return {f"trust_region/{name}": value for name, value in metrics.items()}

    def _watch_projections(self, projected: float, tokens: float, global_step: int) -> None:
        self._watched = [self._watched[0] + projected, self._watched[1] + tokens]
        if self._watched_since is None or global_step - self._watched_since < WATCHED_STEPS:
            return
        fraction = self._watched[0] / max(self._watched[1], 1)
        if fraction > WATCHED_FRACTION and self._accelerator.is_main_process:
            warnings.warn(
                f"{fraction:.0%} of the tokens were projected in the last {WATCHED_STEPS} steps or more, so the bound "
                "rather than the advantages decides the update: lower learning_rate or the updates per rollout",
                stacklevel=2,
            )
        self._watched, self._watched_since = [0.0, 0.0], None


def over_processes(tally: Tally, accelerator: Accelerator) -> Tally:
    """The tally of all processes, in host memory; every process has to call it."""
    return tally.reduced(
        lambda sums: accelerator.reduce(sums, reduction="sum").cpu(),
        lambda maxima: accelerator.gather(maxima.unsqueeze(0)).amax(0).cpu(),
    )
