"""Statistics of the trust region in every update, over micro-batches and processes, for the log and the warnings."""

from __future__ import annotations

import warnings
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from troll.trl.surrogates import SURROGATES
from troll.trust_region.diagnostics import support_too_small
from troll.trust_region.metrics import Tally, masked_total, step_tally, support_tally
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import TrustRegionStep

#: The advice in errors about NaN and infinity, and what it says of the learning rate where no KL sets it.
REMEDY = (
    "and the update was not made. Resume from the last checkpoint with a lower max_grad_norm, or begin a new run from "
    "its weights with a lower {}; in fp16, use bf16"
)
_RATE = "learning_rate (a resumed run keeps that of its checkpoint)"
#: Where users find how to choose the settings that warnings name.
CHOOSING = "see docs/trl.md#choosing-kl_target-and-kl_bound"
#: A larger fraction of projected tokens than this, over this many rollouts, is worth a warning. A healthy run had
#: 11 %, and one with a bound that was too narrow 86 %.
LARGE_FRACTION, WATCHED_ROLLOUTS = 0.3, 2
#: And so is none in this many updates of a policy that had moved since its tokens were sampled.
IDLE_UPDATES = 100
#: The means over an update's tokens that the host needs before the update ends.
_NEEDED_EVERY_UPDATE = ("projected_fraction", "kl_before_mean")


class Monitor:
    """Collects `TrustRegionStep` of the micro-batches of a training; every method runs on every process.

    Args:
        accelerator: Adds up the statistics of the trainer's processes.
        args: The trainer's `TrollConfig`.
    """

    def __init__(self, accelerator: Accelerator, args: Any) -> None:
        self._accelerator, self._args = accelerator, args
        self._remedy = REMEDY.format(_RATE if args.kl_target is None else "kl_target")
        #: Finds whether the bound is too wide or too narrow.
        self.watch = Watch(args)
        self._warned_of_coverage = False
        #: The sums since the last log.
        self.tally = Tally()
        # The sums that the host needs: of the current update, on the device; and of the last one, on the host.
        self._update, self._of_update = Tally(), dict[str, Tensor]()

    def observe(self, step: TrustRegionStep, old: SparsePolicy, mask: Tensor, entropy: Tensor | None = None) -> None:
        """Adds the N tokens of a micro-batch.

        Args:
            step: Their trust region, each (N,).
            old: Their old policies, (N,).
            mask: (N,), 1 for the tokens that count.
            entropy: Their entropy in nats, (N,), if the update's mean is to be known.
        """
        tally = step_tally(step, mask)
        # Tool tokens are masked by multiplication in the parent, which NaN survives: they are counted too.
        counts = {"nonfinite": (~step.kl_before.isfinite()).sum().to(step.kl_before)}
        self._update += Tally({name: tally.totals[name] for name in _NEEDED_EVERY_UPDATE}, counts=counts)
        if entropy is not None:
            self._update += Tally({"entropy": masked_total(entropy, mask)})
        self.tally += tally + support_tally(old, mask)

    def add(self, sums: Tally) -> None:
        """Adds sums of a micro-batch that `check` is to return."""
        self._update += sums

    def observe_loss(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch."""
        self._update += Tally(counts={"nonfinite_losses": (~loss.detach().isfinite()).to(loss.dtype)})

    def check(self, global_step: int) -> Tally:
        """Checks the tokens and losses of an update, made after `global_step` others, before its last backward pass.

        All sums that the host needs are fetched with one collective and one wait for the device.

        Returns:
            These sums, over all micro-batches and processes.

        Raises:
            FloatingPointError: If logits or losses are NaN or infinite in any process, on every process.
        """
        sums, self._update = over_processes(self._update, self._accelerator), Tally()
        self._of_update = sums.totals
        if broken := sums.counts.get("nonfinite"):
            raise FloatingPointError(
                f"step {global_step + 1}: the logits of {int(broken)} tokens are NaN or infinite, {self._remedy}"
            )
        if sums.counts.get("nonfinite_losses"):
            raise FloatingPointError(f"step {global_step + 1}: the loss is NaN or infinite, {self._remedy}")
        return sums

    def end_update(self, kl_bound: float, *, moved: bool, last: bool) -> None:
        """Warns if the update that ends here, over all processes, shows that the bound does not fit.

        Args:
            kl_bound: ε in this update, in nats.
            moved: Whether the policy had changed since the update's tokens were sampled.
            last: Whether the update was the last one of a rollout.
        """
        sums, self._of_update = self._of_update, {}
        if not sums:
            return
        (projected, tokens), (kl, _) = sums["projected_fraction"].tolist(), sums["kl_before_mean"].tolist()
        message = self.watch.observe(projected, tokens, kl, kl_bound, moved=moved, last=last)
        if message is not None and self._accelerator.is_main_process:
            warnings.warn(message, stacklevel=2)

    def metrics(self) -> dict[str, float]:
        """`trust_region/*` over all tokens since the last call and all processes, and a warning about the support."""
        if not self.tally.totals:
            return {}
        tally = over_processes(self.tally, self._accelerator)
        self.tally = Tally()
        metrics = {name: value.item() for name, value in tally.values(empty=0.0).items()}
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


class Watch:
    """Finds, once in a training, that hardly any token or too many are projected; the same on every process.

    A resumed run counts anew, so it may repeat a warning.

    Args:
        args: The trainer's `TrollConfig`.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        projects = SURROGATES[args.surrogate].projects
        # The counts for the two warnings; None where there will be no warning, or no other.
        # While no token has been projected: the updates of a policy that had moved. The proximal pull acts on every
        # token, also on those within the bound.
        self._idle: int | None = 0 if projects and args.pull == "projection" else None
        # Projected tokens, all tokens, and whole rollouts. One multiplier for many tokens projects them all.
        watches_for_many = projects and args.constraint == "token"
        self._recent: tuple[float, float, int] | None = (0.0, 0.0, 0) if watches_for_many else None

    def observe(
        self, projected: float, tokens: float, kl: float, kl_bound: float, *, moved: bool, last: bool
    ) -> str | None:
        """Counts an update of `tokens` tokens, some of them projected; returns a warning if there is one.

        `kl` is the sum of their KL divergences before the projection, in nats; the other arguments are those of
        `Monitor.end_update`.
        """
        has_no_effect = self._has_no_effect(projected, counts=moved and tokens > 0)
        large_share = self._large_share(projected, tokens, last)
        args = self._args
        reuse = "updates_per_rollout" if args.updates_per_rollout else "steps_per_generation"
        reuse = f"{reuse} (now {getattr(args, reuse)})"
        speed = "learning_rate" if args.kl_target is None else "kl_target"
        speed = f"{speed} (now {getattr(args, speed):g})"
        if has_no_effect:
            return (
                f"TROLL has no effect: no token was projected in {IDLE_UPDATES} updates of a policy that "
                f"had moved since its rollout. In the last one its mean KL was {kl / tokens:.1g} nats, and kl_bound is "
                f"{kl_bound:g}. Raise {speed} or {reuse}, or lower kl_bound: {CHOOSING}"
            )
        if large_share is not None:
            return (
                f"{large_share:.0%} of the tokens of the last {WATCHED_ROLLOUTS} rollouts were projected, so the bound "
                f"rather than the advantages decides the update: raise kl_bound (now {kl_bound:g}), or lower {speed} "
                f"or {reuse}: {CHOOSING}"
            )
        return None

    def _has_no_effect(self, projected: float, *, counts: bool) -> bool:
        """Counts an update, if it counts; whether no token was projected until now, and it is time to say so."""
        if self._idle is None:
            return False
        self._idle = None if projected else self._idle + counts
        if self._idle != IDLE_UPDATES:
            return False
        self._idle = None
        return True

    def _large_share(self, projected: float, tokens: float, last: bool) -> float | None:
        """Counts an update; the share of projected tokens in the last rollouts, if it is too large."""
        if self._recent is None:
            return None
        projected, tokens, rollouts = self._recent[0] + projected, self._recent[1] + tokens, self._recent[2] + last
        if rollouts < WATCHED_ROLLOUTS:
            self._recent = projected, tokens, rollouts
            return None
        is_large = projected > LARGE_FRACTION * tokens
        self._recent = None if is_large else (0.0, 0.0, 0)
        return projected / tokens if is_large else None


def over_processes(tally: Tally, accelerator: Accelerator) -> Tally:
    """The tally of all processes, in host memory; every process has to call it."""
    return tally.reduced(
        lambda sums: accelerator.reduce(sums, reduction="sum").cpu(),
        lambda maxima: accelerator.gather(maxima.unsqueeze(0)).amax(0).cpu(),
    )
