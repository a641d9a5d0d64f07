"""A micro-batch of an update from top to bottom: both policies, the surrogate, TRL's loss, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from troll.huggingface.policies import read_tokens, scatter
from troll.trl import seam
from troll.trl.old_policy import OLD_POLICY
from troll.trl.surrogates import ScoredTokens
from troll.trl.surrogates.trl_loss import AGGREGATION, LOSS_TYPES
from troll.trust_region.constraint import Constraint
from troll.trust_region.loss import aggregate
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import trust_region_step


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
        new, scores = self.read_new_policy(model, inputs, scored, at, old)
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

    def read_new_policy(
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
