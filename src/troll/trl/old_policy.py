"""The old policy: captured when TRL scores a rollout, and carried with it to its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from troll.huggingface.policies import capture_tokens, scatter, spread, targets_of
from troll.trl import seam
from troll.trust_region.metrics import masked_total
from troll.trust_region.policy.packed import PackedPolicy

#: The old policy travels through TRL's buffer (shuffled, split) under this key, as a list with one packed policy for
#: each completion.
OLD_POLICY = "troll_old_policy"

#: TRL's `_get_per_token_logps_and_entropies`.
Scoring = Callable[..., tuple[Any, ...]]


class OldPolicyCapture:
    """Adds the old policy to a rollout, if its updates need more than the sampled tokens' log-probabilities.

    It is captured when the training network scores the rollout. Every method runs on every process.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._args = trainer, trainer.args
        #: Whether TRL's next scoring pass is that of the old policy.
        self.expects_scoring = False
        # Whether the updates of the current rollout read whole policies.
        self._wanted = False
        # The policies of a rollout, and the log-probabilities that TRL got with them.
        self._captured: tuple[list[PackedPolicy], Tensor] | None = None
        # 1 where a token was not in its kept set, (b, T) of each chunk.
        self._added: list[Tensor] = []

    def start(self) -> None:
        """Begins a rollout; drops one that an exception has interrupted."""
        trainer, args = self._trainer, self._args
        wanted = args.reads_policies or trainer.diagnostics.due(rollout=True)
        self._captured, self._wanted = None, trainer.model.training and wanted and not args.always_on_policy
        # TRL's first scoring pass is the policy's; the reference's, with PEFT of the same model, follows.
        self.expects_scoring = self._wanted and args.scores_rollouts

    def score(
        self, score: Scoring, model: Any, ids: Tensor, mask: Tensor, length: int, *rest: Any, **named: Any
    ) -> tuple[Any, ...]:
        """Scores a rollout by TRL's method `score`, and captures its policies in the same pass.

        The method takes all other arguments, and calls the model for some sequences at a time: `ids` and `mask` are
        (B, P + T), of prompts and completions, and `length` is T, the tokens of a completion.
        """
        self.expects_scoring = False
        policies: list[PackedPolicy] = []
        self._added = []

        # TRL calls this in place of the model, because TRL splits a batch and its images, in one of six ways, only
        # within its method, which needs nothing of a model but the log-probabilities that it returns.
        def capture(*, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
            targets = targets_of(inputs["input_ids"], labels)[:, -length:]
            scored = targets != -100
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
                self._added.append(scatter(added.float(), scored))
            # Packed at once: padded, a token takes 12 bytes for each of K slots.
            policies.extend(spread(PackedPolicy.of(captured), scored).unbind())
            return seam.FusedCausalLMOutput(log_probs=scatter(captured.log_prob, scored))

        scores = score(capture, ids, mask, length, *rest, **named)
        self._captured = policies, scores[0]
        return scores

    def read(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout of TRL in which the sampler's log-probabilities, if there are any, are what they are called."""
        return rolled_out

    def added_to(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the old policy.

        Raises:
            RuntimeError: If TRL took its old log-probabilities from elsewhere than `score`.
        """
        policies, log_probs = self._captured or ([], None)
        self._captured = None
        if self._wanted and (log_probs is None or rolled_out.get("old_per_token_logps") is not log_probs):
            raise RuntimeError("GRPOTrainer did not score the old policy where TrollTrainer expects it")
        accelerator = self._trainer.accelerator
        if "sampling_per_token_logps" in rolled_out and "old_per_token_logps" in rolled_out:
            old, sampling = (rolled_out[f"{name}_per_token_logps"] for name in ("old", "sampling"))
            seam.add_metrics(self._trainer, mismatch(accelerator, old, sampling, seam.loss_mask(rolled_out)))
        if not self._wanted:
            return rolled_out
        if self._args.truncation is not None:
            counts = masked_total(torch.cat(self._added), seam.loss_mask(rolled_out).bool())
            added, tokens = accelerator.reduce(counts, reduction="sum").tolist()
            seam.add_metrics(self._trainer, {"sampling/added_fraction": added / max(tokens, 1)})
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
