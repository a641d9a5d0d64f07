"""The old policy of a rollout: captured where TRL scores the completions, or read from the engine's reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from troll.huggingface.policies import capture_tokens, scatter, spread, targets_of
from troll.trl.seam import Scores, add_metrics, loss_mask, standing_in
from troll.trust_region.metrics import masked_total
from troll.trust_region.policy.packed import PackedPolicy

#: The old policy travels through TRL's buffer (shuffled, split) under this key, as a list with one packed policy for
#: each completion.
OLD_POLICY = "troll_old_policy"


class OldPolicy:
    """Adds the old policy to a rollout, if its updates need more than the sampled tokens' log-probabilities.

    Without an `anchor`, the old policy is captured when the training network scores the rollout. Every method runs on
    every process.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._args, self._anchor = trainer, trainer.args, trainer.anchor
        self._reads, self._scores_expected = False, False
        # The policies of a rollout, and the log-probabilities that TRL got with them.
        self._captured: tuple[list[PackedPolicy], Tensor] | None = None
        # Sampled tokens that the kept sets lacked, and all, (2,).
        self._added = torch.zeros(2)

    def start(self) -> None:
        """Begins a rollout; drops one that an exception has interrupted."""
        trainer, training = self._trainer, self._trainer.model.training
        reads = self._args.reads_policies or trainer.diagnostics.due(rollout=True)
        self._captured, self._reads = None, training and reads and not self._args.always_on_policy
        # TRL's first scoring pass is the policy's; the reference's, with PEFT of the same model, follows.
        self._scores_expected = training and self._args.scores_rollouts and (self._reads or self._anchor is not None)
        if self._anchor is not None:
            self._anchor.reports.clear()

    def claim_scoring(self) -> bool:
        """Whether TRL's current scoring pass is that of the old policy: true at most once in a rollout."""
        expected, self._scores_expected = self._scores_expected, False
        return expected

    def score(
        self,
        score: Callable[..., tuple[Any, ...]],
        model: Any,
        ids: Tensor,
        mask: Tensor,
        length: int,
        *rest: Any,
        **named: Any,
    ) -> tuple[Any, ...]:
        """Scores a rollout like TRL's own method, and captures its policies in the same pass.

        Args:
            score: TRL's method, which calls a model for some sequences at a time; it takes all other arguments.
            model: The model to score with.
            ids: Token ids of prompts and completions, (B, P + T).
            mask: Their attention mask, (B, P + T).
            length: T, the tokens of a completion.
            *rest: Further positional arguments.
            **named: Further keyword arguments.
        """
        if self._anchor is not None:  # the engine has scored the completions: no pass
            return Scores(ids.new_zeros((len(ids), length), dtype=torch.float32), None, None)
        policies: list[PackedPolicy] = []
        self._added = torch.zeros(2, device=ids.device)

        def capture(labels: Tensor, **inputs: Tensor) -> Scores:
            targets = targets_of(inputs["input_ids"], labels)[:, -length:]
            captured, added = capture_tokens(
                model,
                targets,
                temperature=self._trainer.temperature,
                top_k=self._args.support_top_k,
                mass_threshold=self._args.mass_threshold,
                truncation=self._args.truncation,
                head_in_float32=self._args.cast_lm_head_to_fp32,
                **inputs,
            )
            if added is not None:
                self._added += masked_total(added.float(), torch.ones_like(added))
            # Packed at once: padded, a token takes 12 bytes for each of K slots.
            policies.extend(spread(PackedPolicy.of(captured), targets != -100).unbind())
            return Scores(scatter(captured.log_prob, targets != -100), None, None)

        scores = score(standing_in(capture), ids, mask, length, *rest, **named)
        self._captured = policies, scores[0]
        return scores

    def added_to(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the old policy.

        Raises:
            RuntimeError: If TRL took its old log-probabilities from elsewhere than `score`.
        """
        if self._anchor is not None:
            rolled_out = self._anchor.as_old_policy(rolled_out)
            policies = self._anchor.policies(rolled_out) if self._reads else []
            self._anchor.reports.clear()
        else:
            policies, log_probs = self._captured or ([], None)
            if self._reads and (log_probs is None or rolled_out.get("old_per_token_logps") is not log_probs):
                raise RuntimeError("GRPOTrainer did not score the old policy where TrollTrainer expects it")
            self._captured = None
            if "sampling_per_token_logps" in rolled_out and "old_per_token_logps" in rolled_out:
                old, sampling = (rolled_out[f"{name}_per_token_logps"] for name in ("old", "sampling"))
                add_metrics(self._trainer, mismatch(self._trainer.accelerator, old, sampling, loss_mask(rolled_out)))
        if not self._reads:
            return rolled_out
        if self._args.truncation is not None and self._anchor is None:
            added, tokens = self._trainer.accelerator.reduce(self._added, reduction="sum").tolist()
            add_metrics(self._trainer, {"sampling/added_fraction": added / max(tokens, 1)})
        # At the end of the dictionary, since the first entry sets the batch size.
        return rolled_out | {OLD_POLICY: policies}


def mismatch(accelerator: Any, old_log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """KL(p_s ‖ p) in nats from the policy p_s that sampled a rollout to the old policy p, over all processes.

    With r = p(o)/p_s(o), the mean of r − 1 − log r over the sampled tokens estimates it without bias. No term is
    negative, and `sampling/mismatch_kl_max` is the largest.

    Args:
        accelerator: Adds up over the trainer's processes.
        old_log_probs: log p of the sampled tokens, (B, T).
        sampled_log_probs: log p_s, (B, T); tokens with NaN do not count.
        mask: (B, T), 1 for the tokens that count.
    """
    log_ratio = old_log_probs - sampled_log_probs
    kl = torch.expm1(log_ratio) - log_ratio
    counts = mask.bool() & ~kl.isnan()
    total, count = accelerator.reduce(masked_total(kl, counts), reduction="sum").tolist()
    largest = accelerator.gather(kl.masked_fill(~counts, 0.0).max().reshape(1)).max().item()
    return {"sampling/mismatch_kl": total / max(count, 1), "sampling/mismatch_kl_max": largest}
