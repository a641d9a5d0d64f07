"""Detailed measurements of an update, every `TrollConfig.diagnostics_steps` steps: see docs/diagnostics.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from troll.huggingface.policies import scatter
from troll.trl.monitor import over_processes
from troll.trl.seam import loss_mask, micro_batches_done, sequences
from troll.trl.surrogates import ScoredTokens
from troll.trust_region.diagnostics import (
    coverage,
    dual_report,
    old_to_new_kl,
    ratio_report,
    sequence_report,
    tail_gap,
    tail_report,
)
from troll.trust_region.metrics import Tally
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.reading.capture import capture

#: Tokens of a rollout, on each process, whose whole distributions are compared.
PROBED_TOKENS = 32


@dataclass(frozen=True)
class Probe:
    """Some tokens of one completion, and their whole old distributions.

    Attributes:
        input_ids: (1, L) of the prompt and the completion.
        attention_mask: (1, L), 0 at padding.
        positions: (n,), where the tokens' logits are, counted from the end: virtual tokens of PEFT stand in front.
        old_logits: (n, V) at the rollout.
        old: The sparse policy captured of them, (n,).
    """

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    old_logits: Tensor
    old: SparsePolicy


class Diagnostics:
    """Measures an update of a `TrollTrainer`, micro-batch by micro-batch; every method runs on every process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._args = trainer, trainer.args
        self._tally = Tally()
        self._probe: Probe | None = None
        self._probed_update: int | None = None

    def due(self, *, rollout: bool = False) -> bool:
        """Whether the current update is measured; with `rollout`, whether any update of a rollout made now is."""
        updates, every, step = 1, self._args.diagnostics_steps, self._trainer.state.global_step
        if rollout:  # its micro-batches may begin and end within an update
            accumulated = self._args.gradient_accumulation_steps
            updates = -(-(micro_batches_done(self._trainer) % accumulated + self._args.rollout_steps) // accumulated)
        return every > 0 and (step + updates) // every > step // every

    def probe(self, rolled_out: dict[str, Any]) -> None:
        """Keeps the old distributions of some tokens of the longest completion, for the updates of a scored rollout.

        A rollout with images is skipped, since the images are not passed on.
        """
        self._probe = None
        if self._args.anchor != "old":
            return
        # Images may be on some processes only, and all have to read the probe, or none.
        if any(gather_object(["pixel_values" in rolled_out])):
            return
        mask = loss_mask(rolled_out)
        row = mask.sum(-1).argmax()
        at = mask[row].nonzero().squeeze(-1)
        at = at[torch.linspace(0, max(len(at) - 1, 0), min(PROBED_TOKENS, len(at)), device=at.device).long()]
        ids, attention = (each[row].unsqueeze(0) for each in sequences(rolled_out))
        positions = at - mask.shape[1] - 1
        logits = self.full_logits(ids, attention, positions)
        old = capture(
            logits,
            rolled_out["completion_ids"][row][at],
            top_k=self._args.support_top_k,
            mass_threshold=self._args.mass_threshold,
        )
        self._probe = Probe(ids, attention, positions, logits, old)

    @torch.no_grad()
    def observe(self, tokens: ScoredTokens, scored: Tensor, mask: Tensor) -> None:
        """Adds a micro-batch of an update; the probe is read once in each update.

        Args:
            tokens: Its N scored tokens in both policies.
            scored: (B, T) bool, true at those tokens.
            mask: (B, T), 1 for the tokens that count.
        """
        old, new = tokens.old, tokens.new
        assert old is not None and new is not None
        token_kl = old_to_new_kl(new, old)
        log_ratio, counts = tokens.log_ratio, mask[scored]
        tally = sequence_report(scatter(token_kl, scored), scatter(log_ratio, scored), mask * scored)
        tally += coverage(old, counts) + ratio_report(log_ratio, tokens.advantages, counts)
        if self._trainer.surrogate.projects:
            tally += dual_report(new, old, counts, tokens.kl_bound, tokens.constraint)
        probe, update = self._probe, self._trainer.state.global_step
        if probe is not None and self._probed_update != update:
            self._probed_update = update
            new_logits = self.full_logits(probe.input_ids, probe.attention_mask, probe.positions)
            gap = tail_gap(new_logits, probe.old_logits, probe.old)
            tally += tail_report(gap, torch.ones_like(gap.gap))
        self._tally += tally

    @torch.no_grad()
    def full_logits(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        """The network's current logits at some positions of a sequence, (n, V); arguments as in `Probe`."""
        trainer = self._trainer
        with trainer.accelerator.autocast():
            output = trainer.model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=positions)
        return output.logits[0].float() / trainer.temperature

    def metrics(self) -> dict[str, float]:
        """`trust_region/diagnostics/*` since the last call, over all tokens and processes.

        Metrics without a measurement are left out.
        """
        if not self._tally.totals:
            return {}
        found = over_processes(self._tally, self._trainer.accelerator).values()
        self._tally = Tally()
        numbers = {name: value.item() for name, value in found.items()}
        return {f"trust_region/diagnostics/{name}": x for name, x in numbers.items() if not math.isnan(x)}
