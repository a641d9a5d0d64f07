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

from troll import Constraint, Logits, capture, trust_region_step
from troll.trust_region.coverage import SUPPORT_STATISTICS, support_statistics
from troll.trust_region.metrics import trust_region_metrics, trust_region_statistics
from troll.verl.loss import ProjectedTokens, projected
from troll.verl.old_policies import ResponseTokens, as_field, from_field
from troll.verl.settings import TrollPolicyLossConfig


class Hook:
    """What both hooks share: an engine says with `begin` where a micro-batch's response tokens are."""

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

    def source(self, logits: Tensor) -> Logits:
        """This process's logits, (n', V), at its n response tokens."""
        return Logits(logits, rows=self.tokens.rows, vocab_group=self.vocab_group)

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
        """The sampled tokens' log p; `field` is left to be returned with the batch."""
        settings = self.settings
        sampled = self.labels[self.tokens.rows]
        policy = capture(self.source(logits), sampled, top_k=settings.top_k, mass_threshold=settings.mass_threshold)
        whole = dataclasses.replace(
            policy,
            token_ids=self.tokens.whole(policy.token_ids),
            log_probs=self.tokens.whole(policy.log_probs),
            tail_log_prob=self.tokens.whole(policy.tail_log_prob),
            slot=self.tokens.whole(policy.slot),
        )
        self.field = as_field(whole, data)
        return {"log_probs": policy.log_prob}

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
        """The sampled tokens' log p̃ and log q/p, and the regression towards q."""
        settings, tokens, source = self.settings, self.tokens, self.source(logits)
        packed = from_field(data, anchor=settings.anchor, vocab_size=source.vocabulary.size)
        old = packed.unpack() if tokens.group is None else packed.unpack()[tokens.numbers]
        step = trust_region_step(
            source,
            old,
            settings.kl_bound,
            tail=settings.tail,  # type: ignore[arg-type]
            constraint=self._constraint(data["response_mask"]),
        )
        mask = data["response_mask"].values().bool()[tokens.numbers]
        sums, maxima = trust_region_statistics(step, mask)
        sums |= support_statistics(old, mask)
        sums["bytes"] = sums["tokens"].new_tensor(packed.nbytes * len(tokens.rows) / max(tokens.total, 1))
        self._sums = {name: value + self._sums.get(name, 0) for name, value in sums.items()}
        self._maxima = {name: value.maximum(self._maxima.get(name, value)) for name, value in maxima.items()}
        return {
            "log_probs": step.log_probs,
            "trust_region_log_ratio": step.log_ratio,
            "trust_region_regression": step.regression,
        }

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
        log_ratio, regression = (
            no_padding_2_padding(model_output.pop(f"trust_region_{name}"), data) for name in ("log_ratio", "regression")
        )
        with projected(ProjectedTokens(log_ratio, regression)):
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
