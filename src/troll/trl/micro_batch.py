"""A micro-batch from top to bottom: its old policy is captured when TRL scores the rollout, and its loss computed.

`TrollTrainer` calls `OldPolicy` while TRL makes a rollout, and `SurrogateLoss` for each micro-batch of an update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from troll.huggingface.policies import capture_tokens, read_tokens, scatter, spread, targets_of
from troll.trl import seam
from troll.trl.surrogates import ScoredTokens
from troll.trl.surrogates.trl_loss import AGGREGATION, LOSS_TYPES
from troll.trust_region.constraint import Constraint
from troll.trust_region.loss import aggregate
from troll.trust_region.metrics import masked_total
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import trust_region_step

#: The old policy travels through TRL's buffer (shuffled, split) under this key, as a list with one packed policy for
#: each completion.
OLD_POLICY = "troll_old_policy"

#: TRL's `_get_per_token_logps_and_entropies`.
Scoring = Callable[..., tuple[Any, ...]]


class OldPolicy:
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


class SurrogateLoss:
    """TRL's loss of a micro-batch with the surrogate's changes: another ratio, dropped tokens, or a penalty."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own_settings = trainer.args.own_settings
        # The scores of the new policy, while TRL's loss is to take them.
        self._scores: seam.Scores | None = None
        # Whether TRL's loss was found to use them.
        self._use_checked = False

    def take_scores(self) -> seam.Scores | None:
        """The scores of the new policy, once, if it is TRL's loss that asks for scores; else None."""
        scores, self._scores = self._scores, None
        return scores

    def __call__(self, trl_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, a scalar.

        Args:
            trl_loss: TRL's loss, a function of the model and a micro-batch.
            model: The model, as TRL has wrapped it.
            inputs: The micro-batch of B rows, with old log-probabilities.

        Raises:
            RuntimeError: If TRL's loss does not score the new policy, or does not use its ratio.
        """
        trainer, args, surrogate = self._trainer, self._trainer.args, self._trainer.surrogate
        diagnosed = OLD_POLICY in inputs and trainer.diagnostics.due()
        reads_policies = diagnosed or (OLD_POLICY in inputs and args.reads_policies)
        if surrogate.terms is None and not reads_policies:
            return trl_loss(model, inputs)

        # Both policies, at the N tokens of the completions.
        scored = inputs["completion_mask"].bool()
        at = scored.nonzero(as_tuple=True)  # finds the tokens, and waits for the device, once
        old = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()[at] if reads_policies else None
        new, scores = self.read(model, inputs, scored, at, old)
        mask, old_log_probs, advantages = seam.loss_mask(inputs), inputs["old_per_token_logps"], inputs["advantages"]
        advantages = (advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages).expand(mask.shape)
        shared = surrogate.projects and args.constraint != "token"
        tokens = ScoredTokens(
            new_log_probs=scores.log_probs[at],
            old_log_probs=old_log_probs[at],
            advantages=advantages[at],
            kl_bound=trainer.kl_bound,
            constraint=Constraint.sequence(mask, args.constraint_reduction)[at] if shared else None,
            old=old,
            new=new,
            sequence=at[0],
            counts=mask[at].bool(),
        )

        # The surrogate: for TROLL, the projection.
        terms = surrogate.apply(tokens, args, self._own_settings)

        # TRL computes its ratio as exp(raw − old): with raw − log_ratio as the old log-probabilities it is the
        # surrogate's ratio. TRL's off-policy mask prefers the sampler's log-probabilities, so it gets the true old ones
        # in their place. Everything else (KL to the reference, metrics) is computed from the raw ones.
        changed, shifted = {"sampling_per_token_logps": old_log_probs, **inputs}, None
        if old is not None and new is not None and old.truncated and "ref_per_token_logps" in inputs:
            # The KL to the reference is still that of the whole policies: the same log p̃(S) is subtracted from both
            # terms.
            changed["ref_per_token_logps"] = inputs["ref_per_token_logps"] - scatter(new.log_mass, scored)
        penalties = [] if terms.penalty is None else [scatter(terms.penalty, scored)]
        if terms.log_ratio is not None:
            log_ratio = scatter(terms.log_ratio, scored)
            # raw − log_ratio; in this order, since it is exactly the old one where nothing was projected.
            changed["old_per_token_logps"] = shifted = old_log_probs + (scores.log_probs - old_log_probs - log_ratio)
            if trainer.beta != 0.0 and args.use_bias_correction_kl:
                penalties.append(self._reference_kl_correction(changed, old_log_probs, scores.log_probs, log_ratio))
        if terms.keep is not None:
            changed["advantages"] = advantages * scatter(terms.keep.to(advantages), scored)

        # TRL's loss. Where it would score the tokens again, the trainer gives it these scores.
        self._scores = scores
        try:
            loss = trl_loss(model, changed)
        finally:
            untaken = self.take_scores()
        if untaken is not None:
            raise RuntimeError("GRPOTrainer did not score the new policy where TrollTrainer expects it")
        if shifted is not None:
            self._check_use(loss, shifted)
        if penalties:
            loss = loss + self._aggregate(torch.stack(penalties).sum(0), mask, inputs)

        # What is measured of it: without a projection, the network's KL.
        if old is not None and new is not None:
            step = terms.step
            if step is None:
                with torch.no_grad():
                    step = trust_region_step(new, old, torch.inf)
            entropy = None if trainer.kl_target_rate is None or scores.entropies is None else scores.entropies[at]
            trainer.monitor.observe(step, old, mask[at], entropy)
        if diagnosed:
            trainer.diagnostics.observe(tokens, scored, mask)
        return loss

    # The parts, in the order in which the loss needs them

    def read(
        self, model: Any, inputs: dict[str, Any], scored: Tensor, at: tuple[Tensor, ...], old: SparsePolicy | None
    ) -> tuple[PolicyOnSupport | None, seam.Scores]:
        """The new policy at the old policy's tokens, (N,), and the scores that TRL would compute.

        With a truncated old policy, the scores are those on its kept set, like the old log-probabilities.

        Args:
            model: The model.
            inputs: A micro-batch of B rows.
            scored: (B, T) bool, true at the N tokens to score.
            at: The indices of these tokens.
            old: Their old policy, (N,); None to read only the scores, by TRL's own pass.
        """
        if old is None:
            return None, seam.score(self._trainer, model, inputs)
        with self._trainer.accelerator.autocast():
            new, output = read_tokens(
                model,
                inputs["completion_ids"][at],
                at,
                scored.shape[1],
                old,
                temperature=self._trainer.temperature,
                entropy=True,
                head_in_float32=self._trainer.args.cast_lm_head_to_fp32,
                **seam.model_inputs(self._trainer, inputs),
            )
        entropy = new.entropy
        assert entropy is not None
        sampled = new.log_probs.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
        sampled = sampled - new.log_mass if old.truncated else sampled
        return new, seam.Scores(scatter(sampled, scored), scatter(entropy, scored), output.aux_loss)

    def _reference_kl_correction(
        self, inputs: dict[str, Any], old_log_probs: Tensor, new_log_probs: Tensor, log_ratio: Tensor
    ) -> Tensor:
        # TRL weights its KL to the reference, a KL of the network p̃, by the surrogate's ratio. The weight that makes it
        # unbiased is p̃/p; this adds the difference.
        mask = seam.loss_mask(inputs)
        ratios = [new_log_probs - old_log_probs, log_ratio]
        if self._trainer.importance_sampling_level == "sequence":
            length = mask.sum(-1, keepdim=True).clamp(min=1)
            ratios = [(ratio * mask).sum(-1, keepdim=True) / length for ratio in ratios]
        log_reference_ratio = inputs["ref_per_token_logps"] - new_log_probs
        kl = torch.exp(log_reference_ratio) - log_reference_ratio - 1
        return self._trainer.beta * kl * (torch.exp(ratios[0]) - torch.exp(ratios[1]))

    def _check_use(self, loss: Tensor, shifted: Tensor) -> None:
        """Raises unless the loss takes its ratio from the shifted log-probabilities; checked once in a training."""
        if self._use_checked or not loss.requires_grad:
            return
        (gradient,) = torch.autograd.grad(loss, shifted, retain_graph=True, allow_unused=True)
        if gradient is None:
            raise RuntimeError(
                "GRPOTrainer's loss did not use the ratio of the trust region, and the update was not made: this "
                "version of TRL computes it from something else than old_per_token_logps"
            )
        self._use_checked = True

    def _aggregate(self, per_token: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Aggregates (B, T) values like TRL's per-token loss, including gradient accumulation."""
        trainer, accumulated = self._trainer, self._trainer.current_gradient_accumulation_steps
        if trainer.loss_type == "dapo":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            tokens = tokens * accumulated / trainer.args.steps_per_generation
            return aggregate(per_token, mask, "token_mean", num_tokens=tokens)
        if trainer.loss_type not in AGGREGATION:
            raise ValueError(
                f"surrogate {trainer.args.surrogate!r} sets loss_type {trainer.loss_type!r}, to which no penalty or "
                f"corrected reference KL can be added: it must be one of {', '.join(LOSS_TYPES)}"
            )
        max_length = trainer.max_completion_length if trainer.loss_type == "dr_grpo" else None
        return aggregate(per_token, mask, AGGREGATION[trainer.loss_type], max_length) / accumulated
