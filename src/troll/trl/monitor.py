"""What the trust region did in every update, over micro-batches and processes: for the log and for adaptive bounds."""

from __future__ import annotations

import warnings

import torch
from accelerate import Accelerator
from torch import Tensor

from troll.trl.config import TrollConfig
from troll.trust_region.bounds import BoundStatistics
from troll.trust_region.diagnostics import support_too_small
from troll.trust_region.metrics import Tally, step_tally, support_tally
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import TrustRegionStep

#: What to do about NaN and infinity.
REMEDY = (
    "and the update was not made. Resume from the last checkpoint with a lower learning_rate or max_grad_norm; in "
    "fp16, use bf16"
)
#: A larger fraction of projected tokens than this, over this many optimiser steps, is worth a warning.
WATCHED_FRACTION, WATCHED_STEPS = 0.1, 100


class Monitor:
    """Collects `TrustRegionStep` of the micro-batches; every method runs on every process.

    Args:
        accelerator: Adds up what the trainer's processes saw.
        args: The trainer's configuration.
    """

    def __init__(self, accelerator: Accelerator, args: TrollConfig) -> None:
        self._accelerator, self._args = accelerator, args
        self.start()
        self._watched = {"projected": 0.0, "tokens": 0.0}
        self._watched_since: int | None = None
        self._warned_of_coverage = False

    def start(self) -> None:
        """Drops the sums of an interrupted update."""
        self.tally = Tally()
        self._update = torch.zeros(3, dtype=torch.float64)

    def observe(self, step: TrustRegionStep, old: SparsePolicy, mask: Tensor, loss: Tensor, global_step: int) -> None:
        """Adds the N tokens of a micro-batch.

        Args:
            step: What the trust region did with them, each (N,).
            old: Their old policies, (N,).
            mask: (N,), 1 for the tokens that count.
            loss: That of the micro-batch.
            global_step: Optimiser steps made so far, for the error.

        Raises:
            FloatingPointError: If logits or the loss are NaN or infinite in any process, on every process.
        """
        tally = step_tally(step, mask)
        # Tool tokens are masked by multiplication in the parent, which NaN survives: they are counted too.
        tally.counts["nonfinite"] = nonfinite = (~step.kl_before.isfinite()).sum().to(step.kl_before)
        # One collective, and one wait for the device, for all that the host has to know now.
        (projected, tokens), (kl, _) = tally.totals["projected_fraction"], tally.totals["kl_before_mean"]
        known = torch.stack([(~loss.detach().isfinite()).to(tokens), nonfinite, tokens, projected, kl])
        losses, broken, *update = self._accelerator.reduce(known, reduction="sum").cpu().double()
        if broken:
            raise FloatingPointError(
                f"step {global_step + 1}: the logits of {int(broken)} tokens are NaN or infinite, {REMEDY}"
            )
        _check_losses(losses, global_step)
        self._update += torch.stack(update)
        if self._watched_since is None:
            self._watched_since = global_step
        self.tally += tally + support_tally(old, mask)

    def check_loss(self, loss: Tensor, global_step: int) -> None:
        """Checks the loss of a micro-batch, for updates in which no distributions are observed.

        Raises:
            FloatingPointError: If it is NaN or infinite in any process, on every process.
        """
        nonfinite = (~loss.detach().isfinite()).float()
        _check_losses(self._accelerator.reduce(nonfinite, reduction="sum"), global_step)

    def end_update(self) -> BoundStatistics | None:
        """What all processes saw since the last call, one optimiser step ago; None if no token was observed."""
        tokens, projected, kl = self._update.tolist()
        self._update = torch.zeros_like(self._update)
        return BoundStatistics(projected_fraction=projected / tokens, kl=kl / tokens) if tokens else None

    def metrics(self, global_step: int) -> dict[str, float]:
        """`trust_region/*` over all tokens since the last call and all processes, and warnings about them."""
        if not self.tally.totals:
            return {}
        tally = over_processes(self.tally, self._accelerator)
        self.tally = Tally()
        metrics = tally.values(empty=0.0)
        # One multiplier for many tokens projects them all, and a controller projects as many as it was told to.
        if self._args.constraint == "token" and self._args.kl_bound_schedule != "hold_projected_fraction":
            projected, tokens = tally.totals["projected_fraction"].tolist()
            self._watch_projections(projected, tokens, global_step)
        self._watch_coverage(metrics["tail_mass"].item())
        return {f"trust_region/{name}": value.item() for name, value in metrics.items()}

    def _watch_projections(self, projected: float, tokens: float, global_step: int) -> None:
        self._watched["projected"] += projected
        self._watched["tokens"] += tokens
        if self._watched_since is None or global_step - self._watched_since < WATCHED_STEPS:
            return
        fraction = self._watched["projected"] / max(self._watched["tokens"], 1)
        if fraction > WATCHED_FRACTION:
            warnings.warn(
                f"{fraction:.0%} of the tokens were projected in the last {WATCHED_STEPS} steps or more, so the bound "
                "rather than the advantages decides the update: lower learning_rate or the updates per rollout",
                stacklevel=2,
            )
        self._watched, self._watched_since = {"projected": 0.0, "tokens": 0.0}, None

    def _watch_coverage(self, tail_mass: float) -> None:
        message = support_too_small(tail_mass, top_k=self._args.support_top_k, setting="support_top_k")
        if message is not None and not self._warned_of_coverage:
            self._warned_of_coverage = True
            warnings.warn(message, stacklevel=2)


def over_processes(tally: Tally, accelerator: Accelerator) -> Tally:
    """The tally of all processes, in host memory; every process has to call it."""
    return tally.reduced(
        lambda sums: accelerator.reduce(sums, reduction="sum").cpu(),
        lambda maxima: accelerator.gather(maxima.unsqueeze(0)).amax(0).cpu(),
    )


def _check_losses(nonfinite: Tensor, global_step: int) -> None:
    """Raises if the losses of some processes, `nonfinite` of them, are NaN or infinite."""
    if nonfinite:
        raise FloatingPointError(f"step {global_step + 1}: the loss is NaN or infinite, {REMEDY}")
