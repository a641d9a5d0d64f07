"""GRPOTrainer with a trust region instead of a clip."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length
from trl import GRPOTrainer

from troll.huggingface.adapters import refuse_merging
from troll.huggingface.forward import unwrapped
from troll.huggingface.policies import read_tokens, scatter
from troll.huggingface.positions import positions_from_mask
from troll.huggingface.token_ids import without_embedding
from troll.trl import checks, sampling, seam
from troll.trl.advantages.rollouts import Advantages
from troll.trl.advantages.token_rewards import Judged
from troll.trl.anchor import RolloutAnchor
from troll.trl.callback import TrollCallback
from troll.trl.checkpoints import marked, resolved
from troll.trl.config import AGGREGATION, TrollConfig
from troll.trl.conversations import Conversations
from troll.trl.diagnostics import Diagnostics
from troll.trl.eval_metrics import EvalMetrics, sampling_temperature
from troll.trl.generation import generate_in_chunks
from troll.trl.monitor import Monitor
from troll.trl.old_policy import OLD_POLICY, OldPolicy
from troll.trl.resampling import Resampling
from troll.trl.rollout_weights import RolloutWeights
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
        TypeError: If `args` is not a `TrollConfig`.
        ValueError: Under tensor, context or sequence parallelism.
        FloatingPointError: In training, if logits or the loss are NaN or infinite, before the optimiser sees them.
        RuntimeError: In training, if TRL's loss does not use the trust region, before the optimiser makes a step.
        NothingJudgedError: In training, if a grader could judge nothing in three rollouts in a row.
    """

    args: TrollConfig
    model: Any

    _tag_names = ["trl", "troll"]
    _name = "TROLL"
    _paper = {
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
    }

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: TrollConfig | None = None, *positional: Any, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else seam.get_config_model_id(model.config)
            args = TrollConfig(f"{name.split('/')[-1]}-TROLL")
        if not isinstance(args, TrollConfig):
            raise TypeError(f"args must be a TrollConfig, got {type(args).__name__}: change the name of the class")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        args = self.args = sampling.settle(self)
        for scored in (self.model, self.ref_model):  # by TRL, which gives no position ids
            if scored is not None:
                positions_from_mask(unwrapped(scored))
        seam.name_experts(self)
        checks.refuse_columns(self)
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
        checks.warn_about_precision(self.accelerator, args, self.model)
        checks.refuse_an_empty_reference(self.accelerator, self.ref_model)
        if args.kl_in_reward:
            self.beta = 0.0  # or the parent would add the KL to the loss too
        if args.disable_dropout:  # TRL switches only layers off
            checks.disable_dropout(self.model)

        self.rollout_weights = RolloutWeights(self) if args.rollout_delay else None
        # With delayed weights, scoring with the weights that sampled the tokens gives the anchor; no engine reports it.
        self.anchor = RolloutAnchor(self) if args.anchor == "rollout" and not self.rollout_weights else None
        self.old_policy = OldPolicy(self)
        self.conversations = Conversations(self.accelerator)
        self.ungraded = UngradedFilter(self.accelerator, self.reward_funcs)
        self.advantages = Advantages(self, model)
        if self.advantages.critic is not None:
            checks.refuse_fewer_tokens("critic", self.advantages.critic.model, self)
        self.resampling = Resampling(self) if args.resampling_rounds else None
        self.monitor = Monitor(self.accelerator, args)
        self.diagnostics = Diagnostics(self)
        self.eval_metrics = EvalMetrics(self.reward_funcs, self.reward_func_names)
        if args.generation_chunk_size and not args.use_vllm:
            generate_in_chunks(self.model, args.generation_chunk_size)
        self.callback = TrollCallback(self)
        self.add_callback(self.callback)
        self._use_checked = False

    def create_accelerator_and_postprocess(self) -> None:
        """Overrides the parent: refuses other than data parallelism, and keeps the dtype of the outputs under FSDP2."""
        super().create_accelerator_and_postprocess()
        checks.refuse_model_parallelism(
            tensor=self.get_tp_size(), context=self.get_cp_size(), sequence=self.get_sp_size()
        )
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate would round every output to the parameters' dtype, log-probabilities among them.
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    # The rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        checks.refuse_columns(self, inputs[0])  # a stream's columns and prompts are known only now
        checks.refuse_token_ids(self, inputs)
        training = self.model.training
        self.old_policy.start()
        with ExitStack() as stack:
            if self.rollout_func is not None:
                stack.enter_context(self.conversations.rollout(self, inputs[0]))
            if training and self.rollout_weights is not None:
                stack.enter_context(self.rollout_weights.rollout())
            if training and self.resampling is not None:
                inputs = stack.enter_context(self.resampling.rollout(inputs))
            rolled_out = super()._generate_and_score_completions(inputs)
        rolled_out = self.conversations.with_sample_advantages(rolled_out)
        # Before anything reads the sampler's log-probabilities: until then they are row numbers of its reports.
        if self.anchor is not None and "sampling_per_token_logps" in rolled_out:
            rolled_out = self.anchor.read(rolled_out)
        if not training:
            return rolled_out
        if self.args.kl_in_reward:
            rolled_out["ref_per_token_logps"] = seam.reference_log_probs(self, rolled_out)
        rolled_out = self.ungraded.without(rolled_out, self.conversations.of_rows)
        rolled_out = self.old_policy.added_to(rolled_out)
        rolled_out = self.advantages.put_into(rolled_out)
        if OLD_POLICY in rolled_out and self.diagnostics.due(rollout=True):
            self.diagnostics.probe(rolled_out)
        return rolled_out

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        last = completion_ids_list[: len(prompts)]  # earlier conversations follow
        rewards = self.ungraded.excluded(super()._calculate_rewards(inputs, prompts, completions, last))
        if self.model.training:
            self.ungraded.count_verdicts()
            self.observe_rewards(rewards, Judged(inputs, completions, last))
            seam.add_metrics(self, self.ungraded.metrics(rewards))
        else:
            self.eval_metrics.observe(rewards)
        return rewards

    def observe_rewards(self, rewards: Tensor, judged: Judged) -> None:
        """Keeps the (N, F) rewards of all processes, and this process's completions; the last call counts."""
        self.ungraded.observe(rewards)
        self.advantages.observe(rewards, judged)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        score = super()._get_per_token_logps_and_entropies
        if self.old_policy.claim_scoring():
            return self.old_policy.score(score, *args, **kwargs)
        return score(*args, **kwargs)

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        if training:
            self.ungraded.count(inputs)
            self.advantages.train_critic(inputs)
        # With vLLM's importance correction, on-policy updates have old log-probabilities too.
        off_policy = training and "old_per_token_logps" in inputs and not self.args.always_on_policy
        loss = self._surrogate_loss(model, inputs) if off_policy else super()._compute_loss(model, inputs)
        if training:
            self.monitor.observe_loss(loss)
            if self.accelerator.sync_gradients:  # DeepSpeed makes the update in the backward pass of this micro-batch
                self.monitor.check(self.state.global_step)
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
        handed = iter([scores])
        loss = super()._compute_loss(seam.standing_in(lambda **_: next(handed)), changed)
        if next(handed, None) is not None:
            raise RuntimeError("GRPOTrainer did not score the new policy where TrollTrainer expects it")
        if shifted is not None:
            self._check_use(loss, shifted)
        if penalties:
            loss = loss + self._aggregate(torch.stack(penalties).sum(0), mask, inputs)
        self._observe(tokens, terms, mask[at])
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

    def _observe(self, tokens: ScoredTokens, terms: Terms, mask: Tensor) -> None:
        """Passes the trust region of a micro-batch, or without a projection the network's KL, to the monitor."""
        if tokens.old is None or tokens.new is None:
            return
        step = terms.step
        if step is None:
            with torch.no_grad():
                step = trust_region_step(tokens.new, tokens.old, torch.inf)
        self.monitor.observe(step, tokens.old, mask)

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

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Overrides the parent: adds the metrics of `troll eval` (docs/evaluate.md) if a reward is named `success`.

        Their names start with the prefix, which names the data set if there are several: `eval_pass@1`,
        `eval_aime24_pass@1`.
        """
        checks.refuse_no_batch(self, dataloader.dataset)
        own = seam.evaluation_metrics(self)
        self.eval_metrics.start()
        own.clear()
        with sampling_temperature(self, self.args.eval_temperature):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        problems = len(dataloader.dataset) if has_length(dataloader.dataset) else None
        found = self.eval_metrics.metrics(self.num_generations_eval, problems)
        for name in found.keys() & own.keys():
            del own[name]
        if metric_key_prefix != "eval":  # TRL logs its metrics of every data set under the same names
            numbers = {name: [value for value in values if not math.isnan(value)] for name, values in own.items()}
            found |= {name: sum(values) / len(values) for name, values in numbers.items() if values}
            own.clear()
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **kwargs: Any) -> Any:
        """Overrides the parent: True resumes from the newest complete checkpoint in `output_dir`.

        Raises:
            ValueError: If there is none, the processes see different ones, or the given checkpoint is incomplete; if
                the training set has fewer prompts than a rollout takes, or an evaluation nothing to evaluate; or if the
                sampler's settings were changed since the trainer was made.
        """
        sampling.refuse_changes(self)
        checks.refuse_few_rows(self)
        self._use_checked = False
        seam.forget_rollout(self)
        self.callback.resumed = resolved(Path(str(self.args.output_dir)), resume_from_checkpoint)
        output = super().train(self.callback.resumed[0], *positional, **kwargs)
        checks.refuse_no_step(self)
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = seam.checkpoint_folder(self, trial)
        with marked(self, checkpoint):
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self.callback.save(checkpoint)
