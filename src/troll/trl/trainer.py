"""GRPOTrainer with a trust region instead of a clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from troll.huggingface.adapters import refuse_merging
from troll.huggingface.forward import unwrapped
from troll.huggingface.policies import read_tokens, scatter
from troll.huggingface.positions import positions_from_mask
from troll.huggingface.token_ids import without_embedding
from troll.trl import checks, sampling, seam
from troll.trl.anchor import RolloutAnchor
from troll.trl.callback import TrollCallback
from troll.trl.config import AGGREGATION, TrollConfig
from troll.trl.diagnostics import Diagnostics
from troll.trl.estimators import ESTIMATORS, combine_rewards
from troll.trl.kl_target import KLTargetRate
from troll.trl.monitor import Monitor
from troll.trl.old_policy import OLD_POLICY, OldPolicy
from troll.trl.surrogates import SURROGATES, ScoredTokens, Terms
from troll.trl.ungraded import UngradedFilter
from troll.trust_region.constraint import Constraint
from troll.trust_region.loss import aggregate
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import trust_region_step


class TrollTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with TROLL (arXiv 2510.03817) instead of the clip.

    The policy term uses the projected log-probability of the sampled token where GRPO uses the raw one; the clip is
    off; and `regression_weight · KL(p̃ ‖ ⌊q⌋)`, where ⌊q⌋ is the projection without gradient, is added with the policy
    term's normalisation. The regression term is treated as TRL treats its own KL penalty: it acts on every scored
    token, and neither the high-entropy mask, nor the off-policy mask, nor vLLM's importance weights apply to it.

    `TrollConfig.surrogate` replaces TROLL by another method, such as TRL's clip, and `TrollConfig.advantage_estimator`
    selects the estimator of advantages; a comparison changes exactly one of them.

    Everything else, including the arguments, is as in `GRPOTrainer`. The network p̃ is saved and used for inference,
    never the projection q.

    Attributes:
        kl_bound: ε in nats, which the next update uses: at first that of `args`. A callback may set it between updates,
            to the same number on every process (`examples/hold_kl.py`); checkpoints do not keep it.

    Raises:
        TypeError: If `args` is not a `TrollConfig`, or has settings of another trainer.
        ValueError: Under tensor, context or sequence parallelism; or if the training set has fewer prompts than a
            rollout takes (with `max_steps`, before the first step). In training, before the first step, if an
            evaluation has nothing to evaluate, or the sampler's settings were changed since the trainer was made.
        FloatingPointError: In training, if logits or the loss are NaN or infinite, before the optimiser sees them.
        RuntimeError: In training, if TRL's loss does not use the trust region, before the optimiser makes a step.
        NothingJudgedError: In training, if a grader could judge nothing in three rollouts in a row.
    """

    args: TrollConfig
    model: Any

    #: The class of `args`.
    config: type[TrollConfig] = TrollConfig

    _tag_names = ["trl", "troll"]
    _name = "TROLL"
    _paper = {
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrollConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else seam.get_config_model_id(model.config)
            args = self.config(f"{name.split('/')[-1]}-TROLL")
        checks.refuse_another_config(args, self.config)
        # After the user's own, and before the parent shares out the models: see `on_init_end`.
        self.callback = TrollCallback(self)
        callbacks = [*(callbacks or []), self.callback]
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            *positional,
            **kwargs,
        )
        args = self.args = sampling.settle(self)
        for scored in (self.model, self.ref_model):  # by TRL, which gives no position ids
            if scored is not None:
                positions_from_mask(unwrapped(scored))
        seam.name_experts(self)
        checks.refuse_columns(self)
        if args.max_steps <= 0:  # `begin` would be too late: transformers would ask for max_steps first
            checks.refuse_few_prompts(self)
        if not ESTIMATORS[args.advantage_estimator].laboratory:
            checks.refuse_rewards_of_tokens(self)
        head = self.model.get_output_embeddings()
        if hasattr(head, "token_adapter"):  # of trainable_token_indices; TRL asks for a bias, which PEFT leaves out
            head.bias = None
        if args.use_vllm:
            refuse_merging(self.model, "use_vllm")
            checks.refuse_another_vocabulary(self)
            seam.load_whole_weights(self.vllm_generation)
        #: The tokens of the tokenizer that the model lacks, by id.
        self.missing_tokens = without_embedding(self.model, checks.tokenizer_of(self))
        checks.refuse_token_ids(self)
        checks.refuse_fewer_tokens("reference model", self.ref_model, self)
        self.kl_bound: float = args.kl_bound
        self.surrogate = SURROGATES[args.surrogate]
        self._own_settings = args.own_settings
        # Infinity in the configuration itself would not be valid JSON.
        if "epsilon" not in self.surrogate.fields:
            self.epsilon_low = torch.inf
        if "epsilon_high" not in self.surrogate.fields:
            self.epsilon_high = torch.inf
        if self.accelerator.is_main_process:
            checks.warn_about(args, self.model)
            checks.warn_about_saving(self.accelerator, self.model)
        if args.kl_target is None:  # else the rate is not known yet
            checks.warn_about_precision(self.accelerator, self.model, args.learning_rate)
        checks.refuse_an_empty_reference(self.accelerator, self.ref_model)
        if args.kl_in_reward:
            self.beta = 0.0  # or the parent would add the KL to the loss too
        if args.disable_dropout:  # TRL switches only layers off
            checks.disable_dropout(self.model)

        self.anchor = self._make_anchor()
        self.old_policy = OldPolicy(self)
        self.ungraded = UngradedFilter(self.accelerator, self.reward_funcs)
        self.monitor = Monitor(self.accelerator, args)
        self.diagnostics = Diagnostics(self)
        #: Sets the learning rate in a training with a `kl_target`; None for the scheduler only.
        self.kl_target_rate: KLTargetRate | None = None
        #: The (N, F) rewards of the current rollout, of all processes.
        self.rollout_rewards = torch.empty(0)
        #: The scores that the parent's loss takes from `_get_per_token_logps_and_entropies`.
        self._handed: seam.Scores | None = None
        self._use_checked = False

    def begin(self) -> None:
        """Begins a training: refuses what cannot be trained, and drops the state of an interrupted one.

        Raises:
            ValueError: See the class.
        """
        sampling.refuse_changes(self)
        checks.refuse_few_rows(self)
        seam.forget_rollout(self)
        self._use_checked = False
        for part in (self.monitor, self.diagnostics, self.ungraded):
            part.start()

    def _make_anchor(self) -> RolloutAnchor | None:
        """The engine's policy, if it is the old one."""
        return RolloutAnchor(self) if self.args.anchor == "rollout" else None

    # The rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        checks.refuse_columns(self, inputs[0])  # a stream's columns and prompts are known only now
        checks.refuse_token_ids(self, inputs)
        self._handed = None  # of an interrupted update
        self.old_policy.start()
        rolled_out = self._roll_out(inputs)
        # Before anything reads the sampler's log-probabilities: until then they are row numbers of its reports.
        if self.anchor is not None and "sampling_per_token_logps" in rolled_out:
            rolled_out = self.anchor.read(rolled_out)
        if not self.model.training:
            return rolled_out
        if self.args.kl_in_reward:
            rolled_out["ref_per_token_logps"] = seam.reference_log_probs(self, rolled_out)
        rolled_out = self.ungraded.without(rolled_out, self.of_rows)
        rolled_out = self.old_policy.added_to(rolled_out)
        rolled_out = self._advantages(rolled_out)
        if OLD_POLICY in rolled_out and self.diagnostics.due(rollout=True):
            self.diagnostics.probe(rolled_out)
        return rolled_out

    def _roll_out(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The parent's rollout: completions, rewards, scores, and advantages."""
        return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = self.ungraded.excluded(rewards)
        if self.model.training:
            self.ungraded.count_verdicts()
            self.observe_rewards(rewards)
            seam.add_metrics(self, self.ungraded.metrics(rewards))
        return rewards

    def observe_rewards(self, rewards: Tensor) -> None:
        """Keeps the (N, F) rewards of a rollout of all processes; the last call counts."""
        self.rollout_rewards = rewards
        self.ungraded.observe(rewards)

    def _advantages(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """A rollout with the advantages of `TrollConfig.advantage_estimator`; TRL's table shows them too."""
        estimator = ESTIMATORS[self.args.advantage_estimator]
        if estimator.of_sequences is None:  # TRL's own
            return rolled_out
        mask = seam.loss_mask(rolled_out)
        token_counts = self.of_samples(mask.sum(-1))
        rewards = combine_rewards(self.rollout_rewards, self.reward_weights)
        if self.args.kl_in_reward:
            token_kl = (rolled_out["old_per_token_logps"] - rolled_out["ref_per_token_logps"]) * mask
            kl = self.of_samples(token_kl.sum(-1))
            rewards = rewards - self.args.beta * kl
            seam.add_metrics(self, {"kl": float(kl.sum() / token_counts.sum().clamp(min=1))})
        assert self.num_generations is not None  # only TRL's annotation allows it
        advantages = estimator.of_sequences(rewards, self.num_generations, token_counts)
        seam.replace_logged_advantages(self, advantages)
        return rolled_out | {"advantages": self.of_rows(advantages)}

    def of_rows(self, values: Tensor) -> Tensor:
        """The values of this process's rows of a rollout, (B, ...), from those of the samples of all processes."""
        size = len(values) // self.accelerator.num_processes
        return values[self.accelerator.process_index * size :][:size]

    def of_samples(self, values: Tensor) -> Tensor:
        """The values of the samples of all processes, (N,), from those of this process's rows, (B,)."""
        gathered: Tensor = self.accelerator.gather(values)
        return gathered

    def rollouts_behind(self, *, anew: bool) -> int:
        """How many rollouts ago the network was the one that sampled the current rollout; with `anew`, the next."""
        return 0

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        score = super()._get_per_token_logps_and_entropies
        if self._handed is not None:  # the loss asks, and `_surrogate_loss` has read the new policy
            scores, self._handed = self._handed, None
            return scores
        if self.old_policy.claim_scoring():
            return self.old_policy.score(score, *args, **kwargs)
        return score(*args, **kwargs)

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        if training:
            self.ungraded.count(inputs)
        # With vLLM's importance correction, on-policy updates have old log-probabilities too.
        off_policy = training and "old_per_token_logps" in inputs and not self.args.always_on_policy
        loss = self._surrogate_loss(model, inputs) if off_policy else super()._compute_loss(model, inputs)
        if training:
            self.monitor.observe_loss(loss)
            if self.kl_target_rate is not None:
                self.monitor.add(self.kl_target_rate.sums_of(inputs))
            if self.accelerator.sync_gradients:  # DeepSpeed makes the update in the backward pass of this micro-batch
                sums = self.monitor.check(self.state.global_step)
                if self.kl_target_rate is not None:
                    self.kl_target_rate.update(sums)
        if not self.surrogate.clips:
            seam.drop_clip_metrics(self)
        return loss

    def _surrogate_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The parent's loss with the surrogate's changes: another ratio, dropped tokens, or a penalty."""
        diagnosed = OLD_POLICY in inputs and self.diagnostics.due()
        reads_policies = diagnosed or (OLD_POLICY in inputs and self.args.reads_policies)
        if self.surrogate.terms is None and not reads_policies:
            return super()._compute_loss(model, inputs)

        # Both policies, at the tokens of the completions.
        scored = inputs["completion_mask"].bool()
        at = scored.nonzero(as_tuple=True)  # finds the tokens, and waits for the device, once
        old = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()[at] if reads_policies else None
        new, scores = self._score(model, inputs, scored, at, old)
        mask, old_log_probs, advantages = seam.loss_mask(inputs), inputs["old_per_token_logps"], inputs["advantages"]
        advantages = (advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages).expand(mask.shape)
        tokens = ScoredTokens(
            new_log_probs=scores.log_probs[at],
            old_log_probs=old_log_probs[at],
            advantages=advantages[at],
            kl_bound=self.kl_bound,
            constraint=self._constraint(mask, at),
            old=old,
            new=new,
            sequence=at[0],
            counts=mask[at].bool(),
        )
        terms = self.surrogate.apply(tokens, self.args, self._own_settings)

        # The parent computes its ratio as exp(raw − old): with raw − log_ratio as the old log-probabilities it is the
        # surrogate's ratio. The parent's off-policy mask prefers the sampler's log-probabilities, so it gets the true
        # old ones in their place. Everything else (KL to the reference, metrics) is computed from the raw ones.
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
            if self.beta != 0.0 and self.args.use_bias_correction_kl:
                penalties.append(self._reference_kl_correction(changed, old_log_probs, scores.log_probs, log_ratio))
        if terms.keep is not None:
            changed["advantages"] = advantages * scatter(terms.keep.to(advantages), scored)
        self._handed = scores
        loss = super()._compute_loss(model, changed)
        if self._handed is not None:
            raise RuntimeError("GRPOTrainer did not score the new policy where TrollTrainer expects it")
        if shifted is not None:
            self._check_use(loss, shifted)
        if penalties:
            loss = loss + self._aggregate(torch.stack(penalties).sum(0), mask, inputs)
        entropy = None if self.kl_target_rate is None or scores.entropies is None else scores.entropies[at]
        self._observe(tokens, terms, mask[at], entropy)
        if diagnosed:
            self.diagnostics.observe(tokens, scored, mask)
        return loss

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

    def _score(
        self, model: Any, inputs: dict[str, Any], scored: Tensor, at: tuple[Tensor, ...], old: SparsePolicy | None
    ) -> tuple[PolicyOnSupport | None, seam.Scores]:
        """The new policy at the old policy's tokens, (N,), and the scores that the parent would compute.

        With a truncated old policy, the scores are those on its kept set, like the old log-probabilities.
        """
        if old is None:
            return None, seam.score(self, model, inputs)
        with self.accelerator.autocast():
            new, output = read_tokens(
                model,
                inputs["completion_ids"][at],
                at,
                scored.shape[1],
                old,
                temperature=self.temperature,
                entropy=True,
                head_in_float32=self.args.cast_lm_head_to_fp32,
                **seam.model_inputs(self, inputs),
            )
        entropy = new.entropy
        assert entropy is not None
        sampled = new.log_probs.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
        sampled = sampled - new.log_mass if old.truncated else sampled
        return new, seam.Scores(scatter(sampled, scored), scatter(entropy, scored), output.aux_loss)

    def _constraint(self, mask: Tensor, at: tuple[Tensor, ...]) -> Constraint | None:
        if not self.surrogate.projects or self.args.constraint == "token":
            return None
        return Constraint.sequence(mask, self.args.constraint_reduction)[at]

    def _observe(self, tokens: ScoredTokens, terms: Terms, mask: Tensor, entropy: Tensor | None) -> None:
        """Passes the trust region of a micro-batch, or without a projection the network's KL, to the monitor."""
        if tokens.old is None or tokens.new is None:
            return
        step = terms.step
        if step is None:
            with torch.no_grad():
                step = trust_region_step(tokens.new, tokens.old, torch.inf)
        self.monitor.observe(step, tokens.old, mask, entropy)

    def _reference_kl_correction(
        self, inputs: dict[str, Any], old_log_probs: Tensor, new_log_probs: Tensor, log_ratio: Tensor
    ) -> Tensor:
        # The parent weights its KL to the reference, a KL of the network p̃, by the surrogate's ratio. The weight that
        # makes it unbiased is p̃/p; this adds the difference.
        mask = seam.loss_mask(inputs)
        ratios = [new_log_probs - old_log_probs, log_ratio]
        if self.importance_sampling_level == "sequence":
            length = mask.sum(-1, keepdim=True).clamp(min=1)
            ratios = [(ratio * mask).sum(-1, keepdim=True) / length for ratio in ratios]
        log_reference_ratio = inputs["ref_per_token_logps"] - new_log_probs
        kl = torch.exp(log_reference_ratio) - log_reference_ratio - 1
        return self.beta * kl * (torch.exp(ratios[0]) - torch.exp(ratios[1]))

    def _aggregate(self, per_token: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Aggregates (B, T) values like the parent's per-token loss, including gradient accumulation."""
        if self.loss_type == "dapo":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
            return aggregate(per_token, mask, "token_mean", num_tokens=tokens)
        max_length = self.max_completion_length if self.loss_type == "dr_grpo" else None
        aggregated = aggregate(per_token, mask, AGGREGATION[self.loss_type], max_length)  # type: ignore[arg-type]
        return aggregated / self.current_gradient_accumulation_steps
