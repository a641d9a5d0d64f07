"""GRPOTrainer with a trust region instead of a clip."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from troll.trl.config import AGGREGATION, TrollConfig
from troll.trl.fused_head import PolicyOutput, add_policy_head, scatter
from troll.trl.scoring import PolicyScoring
from troll.trust_region.objective import (
    TrustRegionStep,
    aggregate,
    trust_region_metrics,
    trust_region_statistics,
    trust_region_step,
)
from troll.trust_region.packed import PackedPolicy
from troll.trust_region.policy import SparsePolicy

#: The old policy travels through TRL's buffer (shuffled, split) under this key, as a list of one packed policy each.
OLD_POLICY = "troll_old_policy"

#: More than this fraction of tokens projected, over so many optimiser steps, is worth a warning.
WATCHED_FRACTION, WATCHED_STEPS = 0.1, 100


class TrollTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with TROLL (arXiv 2510.03817) in place of the clip.

    The policy term uses the projected log-probability of the sampled token where GRPO uses the raw one; the clip is
    off; and ``regression_weight · KL(p̃ ‖ ⌊q⌋)`` is added with the policy term's normalisation. The regression term is
    treated as TRL treats its own KL penalty: it acts on every scored token, and neither the high-entropy mask, nor the
    off-policy mask, nor vLLM's importance weights apply to it.

    Everything else, arguments included, is `GRPOTrainer`'s. What is saved and used for inference is the network p̃.

    Raises:
        TypeError: If `args` is not a `TrollConfig`.
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
        # Infinity in the configuration itself would not be valid JSON.
        self.epsilon_low = self.epsilon_high = torch.inf

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        add_policy_head(base_model, top_k=args.support_top_k, mass_threshold=args.mass_threshold, tail=args.tail)
        if self.accelerator.is_main_process:
            _warn_about(args, self.model)
        if args.disable_dropout:  # TRL silences layers; many models keep numbers that a function reads
            for module, name in list(_dropout_rates(base_model)):
                setattr(module, name, 0.0)
        # What the next scoring pass reads besides log-probabilities.
        self._scoring: PolicyScoring | None = None
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._watched = {"projected": 0.0, "tokens": 0.0}
        self._watched_since: int | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """The parent's; with FSDP2, the model's outputs keep their dtype."""
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate has every output rounded to the parameters' dtype, log-probabilities among them.
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    # The old policy: captured where TRL scores the completions

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.args.always_on_policy or not self.model.training:
            return super()._generate_and_score_completions(inputs)

        scored: list[tuple[list[PackedPolicy], Tensor]] = []

        def pack(outputs: list[PolicyOutput], log_probs: Tensor) -> None:
            length = log_probs.shape[1]
            scored.append(([policy for output in outputs for policy in self._pack(output, length)], log_probs))

        self._scoring = PolicyScoring({"capture_policy": True}, pack)
        output = super()._generate_and_score_completions(inputs)
        if not scored or output.get("old_per_token_logps") is not scored[0][1]:
            raise RuntimeError("GRPOTrainer did not score the old policy where TrollTrainer expects it")
        # At the end of the dictionary, since the first entry sets the batch size.
        return output | {OLD_POLICY: scored[0][0]}

    def _pack(self, captured: PolicyOutput, length: int) -> list[PackedPolicy]:
        """One policy for each completion, of `length` tokens; those that were not scored keep no slot."""
        assert captured.on_support is not None
        assert captured.vocab_size is not None
        assert captured.label_mask is not None
        token_ids, log_probs, tail_log_prob, _ = captured.on_support
        policy = SparsePolicy(
            token_ids, log_probs, tail_log_prob, captured.vocab_size, self.args.tail, self.args.mass_threshold
        )
        if policy.tail == "floor":
            policy = policy.floored()
        scored = captured.label_mask[:, -length:]
        padded = dataclasses.replace(
            policy,
            token_ids=scatter(policy.token_ids, scored, fill=-1),
            log_probs=scatter(policy.log_probs, scored, fill=-torch.inf),
            tail_log_prob=scatter(policy.tail_log_prob, scored),
        )
        return padded.pack().unbind()

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # Only the first call is the policy's: a PEFT reference pass uses the same model object.
        scoring, self._scoring = self._scoring, None
        if scoring is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        scoring.model = model
        scores = super()._get_per_token_logps_and_entropies(scoring, *args, **kwargs)
        scoring.finish(scoring.outputs, scores[0])
        return scores

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if OLD_POLICY in inputs and self.model.training:
            loss = self._trust_region_loss(model, inputs)
        else:
            loss = super()._compute_loss(model, inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # constant without a clip
        return loss

    def _trust_region_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        old_log_probs = inputs["old_per_token_logps"]
        # TRL hands the same dictionary out again in the next iteration, so it is never written to.
        inputs = {"sampling_per_token_logps": old_log_probs, **inputs}
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        padded = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()
        extra: list[Tensor] = []

        def project(outputs: list[PolicyOutput], new_log_probs: Tensor) -> None:
            (output,) = outputs  # the parent scores a micro-batch whole
            assert output.label_mask is not None
            assert output.on_support is not None
            scored = output.label_mask[:, -mask.shape[1] :]
            tokens = scored.nonzero(as_tuple=True)  # one wait for the device instead of three
            old, token_ids = padded[tokens], inputs["completion_ids"][tokens]
            new = old.new_policy_from_support(output.on_support)
            step = trust_region_step(new, token_ids, old, self.args.kl_bound, self.args.solver)
            self._observe(step, old, mask[tokens])
            # The parent takes its ratio from the raw log-probabilities, and everything else (KL to the reference,
            # off-policy mask, metrics) too. Shifting the old ones makes that ratio q/p and changes nothing else.
            log_ratio = scatter(step.log_probs - old.log_prob(token_ids), scored)
            inputs["old_per_token_logps"] = old_log_probs + (new_log_probs - old_log_probs - log_ratio)
            extra.append(self.args.regression_weight * scatter(step.regression, scored))
            if self.beta != 0.0 and self.args.use_bias_correction_kl:
                extra.append(self._reference_kl_correction(inputs, old_log_probs, new_log_probs, log_ratio, mask))

        self._scoring = PolicyScoring({"old_token_ids": padded.token_ids}, project)
        loss = super()._compute_loss(model, inputs)
        if not extra:
            raise RuntimeError("GRPOTrainer did not score the new policy where TrollTrainer expects it")
        return loss + self._aggregate(sum(extra[1:], extra[0]), mask, inputs)

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

    # What the trust region did

    def _observe(self, step: TrustRegionStep, old: SparsePolicy, mask: Tensor) -> None:
        """Adds one micro-batch of (N,) tokens to the statistics of the logging window."""
        sums, maxima = trust_region_statistics(step, mask)
        # Tool tokens are masked by multiplication in the parent, which NaN survives: they are counted too.
        sums["nonfinite"] = (~step.kl_before.isfinite()).sum().to(sums["tokens"])
        nonfinite = int(self.accelerator.reduce(sums["nonfinite"], reduction="sum"))
        if nonfinite:
            raise FloatingPointError(
                f"step {self.state.global_step + 1}: the logits of {nonfinite} tokens are NaN or infinite, and the "
                "update was not made. Resume from the last checkpoint with a lower learning_rate or max_grad_norm; in "
                "fp16, use bf16"
            )
        if self._watched_since is None:
            self._watched_since = self.state.global_step
        sums["support_size"] = torch.where(mask.bool(), old.used.sum(-1), 0).sum().to(sums["tokens"])
        sums["tail_mass"] = torch.where(mask.bool(), old.tail_log_prob.exp(), 0.0).sum()
        self._sums = {name: value + self._sums.get(name, 0) for name, value in sums.items()}
        self._maxima = {name: value.maximum(self._maxima.get(name, value)) for name, value in maxima.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the parent's metrics and ``trust_region/*``, over all tokens since the last call and all processes."""
        if self.model.training and self._sums:
            total = self.accelerator.reduce(torch.stack(list(self._sums.values())), reduction="sum")
            largest = self.accelerator.gather(torch.stack(list(self._maxima.values())).unsqueeze(0)).amax(0)
            sums = dict(zip(self._sums, total.cpu(), strict=True))
            maxima = dict(zip(self._maxima, largest.cpu(), strict=True))
            metrics = trust_region_metrics(sums, maxima)
            metrics |= {name: sums[name] / sums["tokens"].clamp(min=1) for name in ("support_size", "tail_mass")}
            for name, value in metrics.items():
                self._metrics["train"][f"trust_region/{name}"].append(value.item())
            self._watch(sums["projected"].item(), sums["tokens"].item())
            self._sums, self._maxima = {}, {}
        super().log(logs, start_time)

    def _watch(self, projected: float, tokens: float) -> None:
        self._watched["projected"] += projected
        self._watched["tokens"] += tokens
        if self._watched_since is None or self.state.global_step - self._watched_since < WATCHED_STEPS:
            return
        fraction = self._watched["projected"] / max(self._watched["tokens"], 1)
        if fraction > WATCHED_FRACTION:
            warnings.warn(
                f"{fraction:.0%} of the tokens were projected in the last {WATCHED_STEPS} steps or more, so the bound "
                "rather than the advantages decides the update: lower learning_rate or the updates per rollout",
                stacklevel=2,
            )
        self._watched, self._watched_since = {"projected": 0.0, "tokens": 0.0}, None


def _dropout_rates(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Every non-zero dropout rate of a model, as a module and the name of its attribute."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd))
            if is_rate and isinstance(value, float) and value > 0:
                yield module, name


def _warn_about(args: TrollConfig, model: torch.nn.Module) -> None:
    if args.always_on_policy:
        warnings.warn(
            "every update is on-policy, where TROLL is the identity: old and new policy are equal. Give each rollout "
            "several updates: raise steps_per_generation above gradient_accumulation_steps "
            f"(now {args.steps_per_generation} and {args.gradient_accumulation_steps}), or num_iterations above 1",
            stacklevel=3,
        )
    lora_dropout = max((getattr(config, "lora_dropout", 0.0) for config in _peft_configs(model)), default=0.0)
    if args.disable_dropout and lora_dropout:
        warnings.warn(
            f"lora_dropout={lora_dropout} is set to 0: dropout changes the policy between scoring and update, and the "
            "trust region would project that noise (disable_dropout=False keeps it)",
            stacklevel=3,
        )
    if not args.disable_dropout and any(_dropout_rates(model)):
        warnings.warn(
            "the model has dropout and disable_dropout=False: the policy differs between scoring and update by that "
            "noise, which the trust region projects",
            stacklevel=3,
        )
    updates, rest = divmod(args.rollout_steps, args.gradient_accumulation_steps)
    if (
        args.save_strategy == "steps"
        and updates > 1
        and not rest
        and args.save_steps >= 1
        and args.save_steps % updates
    ):
        warnings.warn(
            f"save_steps={args.save_steps} is not a multiple of the {updates} updates of a rollout: a run resumed from "
            "the middle of a rollout starts a new one and does not repeat the interrupted run exactly",
            stacklevel=3,
        )


def _peft_configs(model: torch.nn.Module) -> list[Any]:
    configs: Any = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []
