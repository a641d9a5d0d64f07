"""GRPOTrainer whose rollouts carry the old policy's distributions, the network's or the engine's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from troll.trl.anchor import ReportedRollout, prepare_anchor, vocabulary_size
from troll.trl.config import TrollConfig
from troll.trl.estimation import AdvantageTrainer, loss_mask
from troll.trl.fused_head import PolicyOutput, add_policy_head
from troll.trl.positions import scatter
from troll.trl.scoring import PolicyScoring
from troll.trl.surrogates import SURROGATES
from troll.trust_region.policy.outcomes import sparse_entropy
from troll.trust_region.policy.packed import PackedPolicy

#: The old policy travels through TRL's buffer (shuffled, split) under this key, as a list of one packed policy each.
OLD_POLICY = "troll_old_policy"


class OldPolicyTrainer(AdvantageTrainer):
    """Adds the old policy to rollouts whose updates need more of it than the sampled tokens' log-probabilities.

    It is captured where TRL scores the completions, or, with ``anchor="rollout"``, read from what the engine reported,
    which also takes the place of the scoring pass.
    """

    def __init__(self, model: Any, reward_funcs: Any, args: TrollConfig, *positional: Any, **kwargs: Any) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.surrogate = SURROGATES[args.surrogate]
        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        add_policy_head(base_model, top_k=args.support_top_k, mass_threshold=args.mass_threshold, tail=args.tail)
        # What the next scoring pass reads besides log-probabilities.
        self._scoring: PolicyScoring | None = None
        # What the engine reported of the rollout being made, and whether it stands in for the next scoring pass.
        self._reported: ReportedRollout | None = None
        self._answers = False
        self._mean_entropy = 0.0
        if args.anchor == "rollout":
            prepare_anchor(self)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # An exception may have left something behind.
        self._scoring, self._reported, self._answers = None, None, False
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self.args.anchor == "rollout":
            return self._rollout_with_reports(inputs)
        if self._reads_policies():
            return self._rollout_with_policies(inputs)
        return super()._generate_and_score_completions(inputs)

    def _reads_policies(self) -> bool:
        """Whether an update of the rollout that is due needs more of the old policy than log-probabilities."""
        return not self.args.always_on_policy and (
            self.surrogate.reads_policies(self.args) or self._diagnostics_due(self._updates_of_rollout())
        )

    def _diagnostics_due(self, updates: int = 1) -> bool:
        """Whether one of the next updates is to be measured."""
        every, step = self.args.diagnostics_steps, self.state.global_step
        return every > 0 and (step + updates) // every > step // every

    def _updates_of_rollout(self) -> int:
        """The updates that a rollout made now takes part in: its micro-batches may begin and end within one."""
        accumulated = self.args.gradient_accumulation_steps
        return -(-(self._step % accumulated + self.args.rollout_steps) // accumulated)

    def _rollout_with_policies(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: list[tuple[list[PackedPolicy], Tensor]] = []

        def pack(outputs: list[PolicyOutput], log_probs: Tensor) -> None:
            length = log_probs.shape[1]
            scored.append(([policy for output in outputs for policy in self._pack(output, length)], log_probs))

        self._scoring = PolicyScoring({"capture_policy": True}, pack)
        output = super()._generate_and_score_completions(inputs)
        if not scored or output.get("old_per_token_logps") is not scored[0][1]:
            raise RuntimeError("GRPOTrainer did not score the old policy where TrollTrainer expects it")
        return self._with_policies(output, scored[0][0])

    def _rollout_with_reports(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A rollout whose old policy is the engine's: see `troll.trl.anchor`."""
        # The parent asks for the scores of a rollout that is used after an update of the network.
        self._answers = self.args.gradient_accumulation_steps % self.args.rollout_steps != 0
        output = super()._generate_and_score_completions(inputs)
        reported, self._reported = self._reported, None
        if reported is None or self._answers:
            raise RuntimeError("GRPOTrainer did not generate and score a rollout where TrollTrainer expects it")
        length, device = output["completion_ids"].shape[1], self.accelerator.device
        # The parent has them already, unless its own updates would all be on-policy.
        output["old_per_token_logps"] = reported.padded_log_probs(length, device)
        counts = torch.tensor([reported.unreported, reported.sampled], device=device, dtype=torch.float32)
        unreported, sampled = self.accelerator.reduce(counts, reduction="sum").tolist()
        self._metrics["train"]["sampling/unreported_fraction"].append(unreported / max(sampled, 1))
        if not self._reads_policies():
            return output
        policies = reported.policies(
            length,
            device,
            vocab_size=vocabulary_size(self.model),
            top_k=self.args.support_top_k,
            mass_threshold=self.args.mass_threshold,
        )
        return self._with_policies(output, policies)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        generated: tuple[Any, ...] = super()._generate(prompts)
        if self.args.anchor != "rollout" or not self.model.training:
            return generated
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *rest = generated
        self._reported = reported = ReportedRollout.read(completion_ids, log_probs, tool_mask)
        return prompt_ids, completion_ids, reported.tool_mask, completions, reported.log_probs, *rest

    def _with_policies(self, rolled_out: dict[str, Any], policies: list[PackedPolicy]) -> dict[str, Any]:
        if self.args.kl_bound_entropy_exponent:
            total, count = self.accelerator.reduce(
                _entropies(policies, loss_mask(rolled_out)), reduction="sum"
            ).tolist()
            # A rollout without a distribution is found, and named, in its first update.
            self._mean_entropy = total / max(count, 1) if math.isfinite(total) else 0.0
        # At the end of the dictionary, since the first entry sets the batch size.
        return rolled_out | {OLD_POLICY: policies}

    def _pack(self, output: PolicyOutput, length: int) -> list[PackedPolicy]:
        """One policy for each completion, of `length` tokens; those that were not scored keep no slot."""
        assert output.label_mask is not None
        scored = output.label_mask[:, -length:]
        packed = PackedPolicy.of(output.captured(self.args.mass_threshold))
        per_position = {name: scatter(getattr(packed, name), scored) for name in ("counts", "tail_log_prob", "slot")}
        return dataclasses.replace(packed, **per_position).unbind()  # type: ignore[arg-type]

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # Only the first call is the policy's: a PEFT reference pass uses the same model object.
        if self._answers and self._reported is not None:
            self._answers = False
            _, _, length = args[:3]
            return self._reported.padded_log_probs(length, self.accelerator.device), None, None
        scoring, self._scoring = self._scoring, None
        if scoring is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        scoring.model = model
        scores = super()._get_per_token_logps_and_entropies(scoring, *args, **kwargs)
        scoring.finish(scoring.outputs, scores[0])
        return scores


def _entropies(policies: list[PackedPolicy], mask: Tensor) -> Tensor:
    """The sum of the entropies of the tokens that the (B, T) mask counts, and how many there are, (2,)."""
    total = torch.stack(
        [sparse_entropy(policy.unpack())[counts].sum() for policy, counts in zip(policies, mask.bool(), strict=True)]
    ).sum()
    return torch.stack([total, mask.sum().to(total)])
