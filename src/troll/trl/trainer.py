"""GRPOTrainer with a trust region instead of a clip."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length
from trl.trainer.utils import get_config_model_id

from troll.files import write_atomically
from troll.trl.checkpoints import CheckpointTrainer
from troll.trl.checks import dropout_rates, refuse_model_parallelism, warn_about, warn_about_saving
from troll.trl.config import AGGREGATION, TrollConfig
from troll.trl.diagnosis import Diagnosis
from troll.trl.estimation import loss_mask
from troll.trl.fused_head import PolicyOutput
from troll.trl.held_out import HeldOut, sampling_temperature
from troll.trl.monitor import Monitor
from troll.trl.old_policy import OLD_POLICY, OldPolicyTrainer
from troll.trl.positions import scatter
from troll.trl.scoring import PolicyScoring
from troll.trl.surrogates import ScoredTokens, Terms
from troll.trust_region.bounds import Bound
from troll.trust_region.bounds.per_token import by_advantage, entropy_scaled
from troll.trust_region.objective import aggregate, trust_region_step
from troll.trust_region.policy.outcomes import sparse_entropy
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.projecting.constraint import Constraint

#: The file of a checkpoint that holds what ε adapts by.
BOUND_STATE = "kl_bound.json"


class TrollTrainer(CheckpointTrainer, OldPolicyTrainer):
    """[`~trl.GRPOTrainer`] with TROLL (arXiv 2510.03817) in place of the clip.

    The policy term uses the projected log-probability of the sampled token where GRPO uses the raw one; the clip is
    off; and ``regression_weight · KL(p̃ ‖ ⌊q⌋)`` is added with the policy term's normalisation. The regression term is
    treated as TRL treats its own KL penalty: it acts on every scored token, and neither the high-entropy mask, nor the
    off-policy mask, nor vLLM's importance weights apply to it.

    `TrollConfig.surrogate` puts a rival, or TRL's clip, in TROLL's place, and `TrollConfig.advantage_estimator` changes
    how rewards become advantages; a comparison changes exactly one of them.

    Everything else, arguments included, is `GRPOTrainer`'s. What is saved and used for inference is the network p̃.

    Raises:
        TypeError: If `args` is not a `TrollConfig`.
        ValueError: Under tensor, context or sequence parallelism.
        FloatingPointError: In training, if logits are NaN or infinite, before the optimiser sees them.
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
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrollConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = TrollConfig(f"{name.split('/')[-1]}-TROLL")
        if not isinstance(args, TrollConfig):
            raise TypeError(f"args must be a TrollConfig, got {type(args).__name__}: change the name of the class")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if not self.surrogate.clips:
            # Infinity in the configuration itself would not be valid JSON.
            self.epsilon_low = self.epsilon_high = torch.inf

        if self.accelerator.is_main_process:
            warn_about(args, self.model)
            warn_about_saving(self.accelerator, self.model)
        if args.disable_dropout:  # TRL silences layers; many models keep numbers that a function reads
            for module, name in list(dropout_rates(self.model)):
                setattr(module, name, 0.0)
        self.monitor = Monitor(self.accelerator, args)
        self._diagnosis = Diagnosis(self.accelerator, args, self._full_logits)
        self._held_out = HeldOut(self.reward_funcs, self.reward_func_names)
        self._bound: Bound | None = None
        self._used_bound = args.kl_bound

    def create_accelerator_and_postprocess(self) -> None:
        """The parent's, for data parallelism alone; with FSDP2, the model's outputs keep their dtype."""
        super().create_accelerator_and_postprocess()
        refuse_model_parallelism(tensor=self.get_tp_size(), context=self.get_cp_size(), sequence=self.get_sp_size())
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate has every output rounded to the parameters' dtype, log-probabilities among them.
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    @property
    def kl_bound(self) -> Bound:
        """ε now, and how it goes on."""
        if self._bound is None:  # only training knows how long it takes
            self._bound = self.args.make_bound(total_steps=max(1, self.state.max_steps))
        return self._bound

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rolled_out = super()._generate_and_score_completions(inputs)
        if OLD_POLICY in rolled_out and self._diagnostics_due(self._updates_of_rollout()):
            self._diagnosis.probe(rolled_out, loss_mask(rolled_out))
        return rolled_out

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The parent's, with the metrics of ``troll eval`` (docs/evaluate.md) where a reward is named ``success``.

        They start with the prefix, which names the data set where there are several: ``eval_pass@1``,
        ``eval_aime24_pass@1``.
        """
        self._held_out.start()
        self._metrics["eval"].clear()
        with sampling_temperature(self, self.args.eval_temperature):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        problems = len(dataloader.dataset) if has_length(dataloader.dataset) else None
        found = self._held_out.metrics(self.num_generations_eval, problems)
        own = self._metrics["eval"]
        for name in found.keys() & own.keys():
            del own[name]
        if metric_key_prefix != "eval":  # TRL logs its own of every data set under the same names
            found |= {name: value for name in own if (value := _mean(own[name])) is not None}
            own.clear()
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if not self.model.training:
            self._held_out.observe(rewards)
        return rewards

    # The update

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The parent's; at the end of an update, ε adapts to what was seen in it."""
        rests = self.critic is not None and self.critic.warming_up  # read before the critic's own update
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients and (statistics := self.monitor.end_update()) is not None:
            self._used_bound = self.kl_bound.value
            if not rests:  # a policy that does not move says nothing about ε
                self.kl_bound.update(self.state.global_step + 1, statistics)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # vLLM's importance correction brings old log-probabilities for on-policy updates too.
        if self.model.training and "old_per_token_logps" in inputs and not self.args.always_on_policy:
            loss = self._surrogate_loss(model, inputs)
        else:
            loss = super()._compute_loss(model, inputs)
        if not self.surrogate.clips:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name in metrics if name.startswith("clip_ratio/")]:
                del metrics[name]  # constant without a clip
        return loss

    def _surrogate_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The parent's loss, where the surrogate stands in for the ratio, drops tokens or adds a penalty."""
        diagnosed = OLD_POLICY in inputs and self._diagnostics_due()
        reads_policies = OLD_POLICY in inputs and (diagnosed or self.surrogate.reads_policies(self.args))
        if self.surrogate.terms is None and not reads_policies:
            return super()._compute_loss(model, inputs)

        old_log_probs = inputs["old_per_token_logps"]
        # TRL hands the same dictionary out again in the next iteration, so it is never written to.
        inputs = {"sampling_per_token_logps": old_log_probs, **inputs}
        mask = loss_mask(inputs)
        advantages = inputs["advantages"]
        advantages = (advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages).expand(mask.shape)
        padded = PackedPolicy.stack(inputs[OLD_POLICY]).unpack() if reads_policies else None
        extra: list[Tensor] = []

        def apply(outputs: list[PolicyOutput], new_log_probs: Tensor) -> None:
            (output,) = outputs  # the parent scores a micro-batch whole
            assert output.label_mask is not None
            scored = output.label_mask[:, -mask.shape[1] :]
            at = scored.nonzero(as_tuple=True)  # one wait for the device instead of three
            old = new = None
            if padded is not None:
                old, new = padded[at], output.outcomes()
            tokens = ScoredTokens(
                new_log_probs=new_log_probs[at],
                old_log_probs=old_log_probs[at],
                advantages=advantages[at],
                kl_bound=self._token_bounds(old, advantages[at]),
                constraint=self._constraint(mask, at),
                old=old,
                new=new,
            )
            terms = self.surrogate.terms(tokens, self.args) if self.surrogate.terms else Terms()
            self._observe(tokens, terms, mask[at])
            if diagnosed:
                self._diagnosis.observe(tokens, scored, mask, self.state.global_step)
            # The parent takes its ratio from the raw log-probabilities, and everything else (KL to the reference,
            # off-policy mask, metrics) too. Shifting the old ones changes that ratio and nothing else.
            if terms.log_ratio is not None:
                log_ratio = scatter(terms.log_ratio, scored)
                inputs["old_per_token_logps"] = old_log_probs + (new_log_probs - old_log_probs - log_ratio)
                if self.beta != 0.0 and self.args.use_bias_correction_kl:
                    extra.append(self._reference_kl_correction(inputs, old_log_probs, new_log_probs, log_ratio, mask))
            if terms.keep is not None:
                inputs["advantages"] = advantages * scatter(terms.keep.to(advantages), scored)
            if terms.penalty is not None:
                extra.append(scatter(terms.penalty, scored))

        request = {} if padded is None else {"old_support": (padded.token_ids, padded.slot)}
        self._scoring = PolicyScoring(request, apply)
        loss = super()._compute_loss(model, inputs)
        if self._scoring is not None:
            raise RuntimeError("GRPOTrainer did not score the new policy where TrollTrainer expects it")
        return loss + self._aggregate(sum(extra[1:], extra[0]), mask, inputs) if extra else loss

    def _token_bounds(self, old: SparsePolicy | None, advantages: Tensor) -> float | Tensor:
        """ε of each of (N,) tokens, or of all."""
        bound: float | Tensor = self.kl_bound.value
        if self.args.kl_bound_entropy_exponent and old is not None:
            exponent = self.args.kl_bound_entropy_exponent
            bound = entropy_scaled(bound, sparse_entropy(old), self._mean_entropy, exponent=exponent)
        if self.args.kl_bound_negative_ratio != 1.0:
            ratio = self.args.kl_bound_negative_ratio
            bound = by_advantage(bound, advantages, negative_kl_bound_ratio=ratio)
        return bound

    def _constraint(self, mask: Tensor, at: tuple[Tensor, ...]) -> Constraint | None:
        reduction = self.args.constraint_reduction
        if self.args.surrogate != "troll" or self.args.constraint == "token":
            return None
        if self.args.constraint == "sequence":
            return Constraint.sequence(mask, reduction)[at]
        processes = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        return Constraint.batch(mask, reduction, processes)[at]

    def _observe(self, tokens: ScoredTokens, terms: Terms, mask: Tensor) -> None:
        """Shows the monitor what the surrogate did with a micro-batch; one that does not project only measures."""
        if tokens.old is None or tokens.new is None:
            return
        step = terms.step
        if step is None:
            with torch.no_grad():
                step = trust_region_step(tokens.new, tokens.old, torch.inf, tail=self.args.tail)
        self.monitor.observe(step, tokens.old, mask, self.state.global_step)

    def _reference_kl_correction(
        self, inputs: dict[str, Any], old_log_probs: Tensor, new_log_probs: Tensor, log_ratio: Tensor, mask: Tensor
    ) -> Tensor:
        # The parent weights its KL to the reference, which is about the network p̃, with the ratio of the surrogate.
        # The weight that makes it unbiased is p̃/p; this adds the difference.
        ratios = [new_log_probs - old_log_probs, log_ratio]
        if self.importance_sampling_level == "sequence":
            length = mask.sum(-1, keepdim=True).clamp(min=1)
            ratios = [(ratio * mask).sum(-1, keepdim=True) / length for ratio in ratios]
        log_reference_ratio = inputs["ref_per_token_logps"] - new_log_probs
        kl = torch.exp(log_reference_ratio) - log_reference_ratio - 1
        return self.beta * kl * (torch.exp(ratios[0]) - torch.exp(ratios[1]))

    def _aggregate(self, per_token: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Aggregates (B, T) values as the parent does its per-token loss, gradient accumulation included."""
        if self.loss_type == "dapo":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
            return torch.where(mask.bool(), per_token, 0.0).sum() / tokens
        max_length = self.max_completion_length if self.loss_type == "dr_grpo" else None
        aggregated = aggregate(per_token, mask, AGGREGATION[self.loss_type], max_length)  # type: ignore[arg-type]
        return aggregated / self.current_gradient_accumulation_steps

    @torch.no_grad()
    def _full_logits(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        """Of the network now, at some positions of a sequence, counted from its end, (n, V)."""
        with self.accelerator.autocast():
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=positions)
        return output.logits[0].float() / self.temperature

    # What lasts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the parent's metrics and ``trust_region/*``, over all tokens since the last call and all processes."""
        if self.model.training:
            metrics = self.monitor.metrics(self.state.global_step) | self._diagnosis.metrics()
            if metrics and self.args.surrogate == "troll":
                metrics["trust_region/kl_bound"] = self._used_bound
            for name, value in metrics.items():
                self._metrics["train"][name].append(value)
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_atomically(Path(output_dir) / BOUND_STATE, json.dumps(self.kl_bound.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / BOUND_STATE
        if path.is_file():
            self._bound = None
            self.kl_bound.load_state_dict(json.loads(path.read_text()))
        elif self.args.kl_bound_schedule != "fixed":
            warnings.warn(
                f"{checkpoint} has no {BOUND_STATE}: the schedule of kl_bound starts anew",
                stacklevel=2,
            )


def _mean(values: list[float]) -> float | None:
    """Of those that are numbers."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None
