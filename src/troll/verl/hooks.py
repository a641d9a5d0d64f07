"""What an engine of verl calls with the logits of a micro-batch: to capture old policies, or to project.

verl's engines hand their logits to the loss function where top-K distillation asks for it. Both hooks therefore stand
in the loss function's place, and are called twice for a micro-batch: with ``student_logits``, for per-token outputs,
and with ``model_output``, for the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.workers.utils.padding import no_padding_2_padding

from troll.trust_region.constraint import Constraint
from troll.trust_region.diagnostics import SUPPORT_STATISTICS, support_statistics
from troll.trust_region.objective import trust_region_metrics, trust_region_statistics, trust_region_step
from troll.trust_region.policy import SparsePolicy
from troll.verl.loss import ProjectedTokens, projected
from troll.verl.old_policies import ResponseTokens, as_field, from_field
from troll.verl.settings import TrollPolicyLossConfig


class Hook:
    """What both hooks share: an engine says with :meth:`begin` where a micro-batch's response tokens are."""

    settings: TrollPolicyLossConfig
    labels: Tensor
    tokens: ResponseTokens
    vocab_group: ProcessGroup | None

    def begin(self, labels: Tensor, tokens: ResponseTokens, vocab_group: ProcessGroup | None = None) -> None:
        """Before the engine calls with logits.

        Args:
            labels: The next tokens at this process's positions, (n',).
            tokens: Which of the positions count.
            vocab_group: The processes over which the vocabulary is spread.
        """
        self.labels, self.tokens, self.vocab_group = labels, tokens, vocab_group

    def __call__(
        self,
        *,
        model_output: dict[str, Any] | None = None,
        data: TensorDict,
        dp_group: ProcessGroup | None = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """Called twice by verl; see the module."""
        if student_logits is not None:
            outputs = self.read(student_logits.flatten(0, -2), data)
            positions = student_logits.shape[:-1]
            return {
                name: self.tokens.on_all_positions(values, positions.numel()).view(positions)
                for name, values in outputs.items()
            }
        assert model_output is not None
        return self.loss(model_output, data, dp_group)

    def read(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """Per-token outputs at this process's n response tokens, each (n,), from its (n', V) logits."""
        raise NotImplementedError

    def loss(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch and its metrics."""
        raise NotImplementedError


class Capture(Hook):
    """Takes the old policies of a rollout out of the pass that computes its old log-probabilities.

    Args:
        settings: The trust region's.
    """

    def __init__(self, settings: TrollPolicyLossConfig) -> None:
        self.settings = settings

    def read(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """The sampled tokens' log p; :attr:`field` is left to be returned with the batch."""
        settings = self.settings
        sampled = self.labels[self.tokens.rows]
        policy = SparsePolicy.from_logits(
            logits,
            sampled,
            top_k=settings.top_k,
            mass_threshold=settings.mass_threshold,
            rows=self.tokens.rows,
            vocab_group=self.vocab_group,
        )
        log_probs = policy.log_prob(sampled)
        policy = dataclasses.replace(
            policy,
            token_ids=self.tokens.whole(policy.token_ids),
            log_probs=self.tokens.whole(policy.log_probs),
            tail_log_prob=self.tokens.whole(policy.tail_log_prob),
        )
        if settings.tail == "floor":
            policy = dataclasses.replace(policy, tail="floor").floored()
        self.field = as_field(policy, data)
        return {"log_probs": log_probs}

    def loss(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """None: what verl's engines report of a pass without a loss function."""
        return torch.tensor(1.0), {}


class Update(Hook):
    """Projects the new policy of every micro-batch, and measures what that did.

    Args:
        settings: The trust region's.
        loss_function: verl's, which calls the policy loss.
        processes: Those that hold the batch's tokens between them; None for this one alone.
    """

    def __init__(
        self,
        settings: TrollPolicyLossConfig,
        loss_function: Callable[..., tuple[Tensor, dict[str, Any]]],
        processes: ProcessGroup | None,
    ) -> None:
        self.settings, self._loss_function, self._processes = settings, loss_function, processes
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def read(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """The sampled tokens' log p̃ and log q, and the regression towards q."""
        settings, tokens = self.settings, self.tokens
        packed = from_field(data, anchor=settings.anchor, vocab_size=self._vocab_size(logits))
        everything = self._on_vocabulary(packed.unpack(), self._vocab_size(logits))
        self._old_log_probs = everything.log_prob(data["responses"].values())
        old = everything if tokens.group is None else everything[tokens.numbers]
        sampled = self.labels[tokens.rows]
        new = old.new_policy(logits, sampled, rows=tokens.rows, vocab_group=self.vocab_group)
        step = trust_region_step(
            new, sampled, old, settings.kl_bound, constraint=self._constraint(data["response_mask"])
        )
        mask = data["response_mask"].values().bool()[tokens.numbers]
        sums, maxima = trust_region_statistics(step, mask)
        sums |= support_statistics(old, mask)
        sums["bytes"] = sums["tokens"].new_tensor(packed.nbytes * len(tokens.rows) / max(tokens.total, 1))
        self._sums = {name: value + self._sums.get(name, 0) for name, value in sums.items()}
        self._maxima = {name: value.maximum(self._maxima.get(name, value)) for name, value in maxima.items()}
        return {
            "log_probs": new.log_prob(sampled),
            "trust_region_log_probs": step.log_probs,
            "trust_region_regression": step.regression,
        }

    def _vocab_size(self, logits: Tensor) -> int:
        """V of the LM head, padded ones included."""
        processes = 1 if self.vocab_group is None else torch.distributed.get_world_size(self.vocab_group)
        return logits.shape[-1] * processes

    def _on_vocabulary(self, old: SparsePolicy, width: int) -> SparsePolicy:
        """Over the LM head's vocabulary: padded with tokens that an inference engine knows nothing of."""
        if self.settings.anchor == "rollout" and old.vocab_size < width:
            tail = old.tail_log_prob
            if old.tail == "floor":  # of which every token outside has an equal share
                used = old.used.sum(-1)
                tail = tail + torch.log((width - used) / (old.vocab_size - used).clamp(min=1))
            old = dataclasses.replace(old, vocab_size=width, tail_log_prob=tail)
        if old.vocab_size != width:
            raise ValueError(
                f"the batch's old policies are over {old.vocab_size} tokens and the network's logits over {width}: "
                "they are of another model"
            )
        return old

    def _constraint(self, response_mask: Tensor) -> Constraint | None:
        """Which of this process's n tokens share a multiplier, by the (B, T) nested mask of those that count."""
        scope, tokens = self.settings.constraint, self.tokens
        if scope == "token":
            return None
        if scope == "sequence":
            is_token = torch.ones_like(response_mask).to_padded_tensor(0).bool()
            at = tuple(index[tokens.numbers] for index in is_token.nonzero(as_tuple=True))
            constraint = Constraint.sequence(response_mask.to_padded_tensor(0).bool())[at]
            return dataclasses.replace(constraint, process_group=tokens.group)
        return Constraint.batch(response_mask.values().bool()[tokens.numbers], process_group=self._processes)

    def loss(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of verl, whose policy term reads the projection."""
        log_probs, regression = (
            no_padding_2_padding(model_output.pop(f"trust_region_{name}"), data) for name in ("log_probs", "regression")
        )
        old = torch.nested.nested_tensor_from_jagged(self._old_log_probs, data["responses"].offsets())
        old_log_probs = old.to_padded_tensor(0.0, output_size=log_probs.shape)
        with projected(ProjectedTokens(log_probs, old_log_probs, regression)):
            return self._loss_function(model_output=model_output, data=data, dp_group=dp_group)

    @property
    def observed(self) -> bool:
        """Whether this process saw logits: a pipeline's last stage alone does."""
        return bool(self._sums)

    def metrics(self) -> dict[str, float]:
        """``trust_region/*`` over all tokens of the batch and all processes; every process calls it.

        Raises:
            FloatingPointError: If logits are NaN or infinite, on every process.
        """
        sums, maxima = torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums, group=self._processes)
            torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX, group=self._processes)
        total = dict(zip(self._sums, sums.cpu(), strict=True))
        if nonfinite := int(total["nonfinite"]):
            raise FloatingPointError(
                f"the logits of {nonfinite} tokens are NaN or infinite, and the update was not made: resume from the "
                "last checkpoint with a lower actor_rollout_ref.actor.optim.lr or grad_clip"
            )
        tokens = total["tokens"].clamp(min=1)
        metrics = trust_region_metrics(total, dict(zip(self._maxima, maxima.cpu(), strict=True)))
        metrics |= {name: total[name] / tokens for name in SUPPORT_STATISTICS if name in total}
        metrics["old_policy_bytes"] = total["bytes"] / tokens
        return {f"trust_region/{name}": value.item() for name, value in metrics.items()}
