"""Hooks that read a micro-batch's LM head: for old policies, for the projection of the new policy, or for scores.

verl's engine gets a hook instead of the loss function. `read` computes per-token outputs from the head, or from logits
if the head cannot be read, and `loss` computes the loss from these outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from troll import Constraint, Logits, capture, trust_region_step
from troll.trust_region.metrics import Tally, masked_total, step_tally, support_tally
from troll.trust_region.reading.capture import captured
from troll.trust_region.reading.logits import is_whole
from troll.trust_region.reading.read import read
from troll.trust_region.reading.source import LogitsSource
from troll.verl.kl_target import sums_of
from troll.verl.loss import ProjectedTokens, projected
from troll.verl.old_policies import OldPolicyStore, ResponseTokens, fill_unreported, reported_policies
from troll.verl.seam.training import no_padding_2_padding
from troll.verl.settings import TrollPolicyLossConfig


class Hook:
    """The base class of hooks: the engine passes the positions of a micro-batch's response tokens to `begin`.

    Args:
        settings: The settings of the trust region.
        entropy: Whether the entropy over the vocabulary is an output too.
    """

    labels: Tensor
    tokens: ResponseTokens
    vocab_group: ProcessGroup | None

    def __init__(self, settings: TrollPolicyLossConfig, entropy: bool) -> None:
        self.settings, self.entropy = settings, entropy

    def begin(self, labels: Tensor, tokens: ResponseTokens, vocab_group: ProcessGroup | None = None) -> None:
        """Begins a micro-batch.

        Args:
            labels: The next tokens at this process's positions, (n',).
            tokens: The positions that predict a response token.
            vocab_group: The processes over which the vocabulary is spread; None if it is not.
        """
        self.labels, self.tokens, self.vocab_group = labels, tokens, vocab_group

    @property
    def sampled(self) -> Tensor:
        """This process's n response tokens, (n,)."""
        return self.labels[self.tokens.rows]

    def read(self, source: LogitsSource, data: TensorDict) -> dict[str, Tensor]:
        """Per-token outputs, each (n,), differentiable.

        Args:
            source: The network's distributions at this process's n response tokens.
            data: The micro-batch.
        """
        raise NotImplementedError

    def everywhere(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs at all n' positions, 0 where no response token is predicted."""
        return {name: self.tokens.on_all_positions(x, len(self.labels)) for name, x in outputs.items()}

    def __call__(
        self,
        *,
        model_output: dict[str, Any] | None = None,
        data: TensorDict,
        dp_group: ProcessGroup | None = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """Called by verl: with `student_logits`, as for top-K distillation, or with `model_output` for a loss."""
        if student_logits is None:
            assert model_output is not None
            return self.loss(model_output, data, dp_group)
        logits = student_logits.flatten(0, -2)
        # Donated, since only this hook needs them.
        source = Logits(
            logits,
            temperature=None,  # verl has divided by it
            rows=self.tokens.rows,
            vocab_group=self.vocab_group,
            donate=is_whole(logits),
        )
        outputs = self.everywhere(self.read(source, data))
        return {name: values.view(student_logits.shape[:-1]) for name, values in outputs.items()}

    def loss(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch and its metrics; here those that verl reports for a pass without a loss."""
        return torch.tensor(1.0), {}


class Score(Hook):
    """Reads the sampled tokens' log-probabilities, and nothing else: a LoRA reference pass."""

    def read(self, source: LogitsSource, data: TensorDict) -> dict[str, Tensor]:
        """See the parent."""
        outcomes = read(source, self.sampled.unsqueeze(-1), entropy=self.entropy)
        outputs = {"log_probs": outcomes.log_probs.squeeze(-1)}
        return outputs if outcomes.entropy is None else outputs | {"entropy": outcomes.entropy}


class Capture(Hook):
    """Captures the old policies of a rollout in the pass that computes its old log-probabilities.

    Attributes:
        old_policies: The old policies so far.
    """

    def __init__(self, settings: TrollPolicyLossConfig, entropy: bool) -> None:
        super().__init__(settings, entropy)
        self.old_policies = OldPolicyStore()

    def read(self, source: LogitsSource, data: TensorDict) -> dict[str, Tensor]:
        """See the parent: the sampled tokens' log p, and the entropy."""
        settings = self.settings
        policy, entropy, _ = captured(
            source,
            self.sampled,
            top_k=settings.top_k,
            mass_threshold=settings.mass_threshold,
            truncation=settings.truncation,
            entropy=True,
        )
        assert entropy is not None
        # Of a truncated policy, each process has as many slots as the largest kept set of its own tokens needs.
        slots = self.tokens.largest(policy.top_k) if policy.truncated else policy.top_k
        self.old_policies.keep(policy.widened(slots).each(self.tokens.whole), data)
        return {"log_probs": policy.log_prob, "entropy": entropy}


class Update(Hook):
    """Projects the new policy of every micro-batch, and collects metrics.

    Args:
        settings: The settings of the trust region.
        entropy: Whether the entropy over the vocabulary is an output too.
        old_policies: The old policies, unless the inference engine reports them.
        loss_function: verl's loss function, which calls the policy loss.
        processes: The processes that hold the batch's tokens between them; None for this one only.
    """

    def __init__(
        self,
        settings: TrollPolicyLossConfig,
        entropy: bool,
        old_policies: OldPolicyStore,
        loss_function: Callable[..., tuple[Tensor, dict[str, Any]]],
        processes: ProcessGroup | None,
    ) -> None:
        super().__init__(settings, entropy)
        self._old_policies = old_policies
        self._loss_function, self._processes = loss_function, processes
        self._tally = Tally()

    def read(self, source: LogitsSource, data: TensorDict) -> dict[str, Tensor]:
        """See the parent: the sampled tokens' log p̃ and log q/p, the pull, and the entropy."""
        settings, tokens = self.settings, self.tokens
        at_rollout = settings.anchor == "rollout"
        follows_kl = settings.kl_target is not None
        kept = settings.truncation
        if at_rollout:
            packed = reported_policies(data, source.vocabulary.size, truncated=kept is not None)
        else:
            packed = self._old_policies.of(data)
        old = packed.unpack() if tokens.group is None else packed.unpack()[tokens.numbers]
        mask = data["response_mask"].values().bool()[tokens.numbers]
        unreported = packed.counts == 0  # in the whole micro-batch, so that processes that share it agree
        if at_rollout and bool(unreported.any()):
            top_k, threshold = settings.top_k, settings.mass_threshold
            own = capture(source, self.sampled, top_k=top_k, mass_threshold=threshold, truncation=kept)
            old = fill_unreported(old, own)
        step = trust_region_step(
            source,
            old,
            settings.kl_bound,
            constraint=self._constraint(data["response_mask"]),
            pull=settings.pull,  # type: ignore[arg-type]
            entropy=self.entropy or follows_kl,
        )
        self._tally += step_tally(step, mask) + support_tally(old, mask)
        if follows_kl:
            self._tally += sums_of(step, mask, tokens.numbers, data, settings.rounding)
        if at_rollout:
            self._tally += Tally({"unreported_fraction": masked_total(unreported[tokens.numbers].float(), mask)})
        size = step.kl_before.new_tensor(packed.nbytes * len(tokens.rows) / max(tokens.total, 1))
        self._tally += Tally({"old_policy_bytes": torch.stack([size, mask.sum().to(size)])})
        outputs = {
            "log_probs": step.log_prob,
            "trust_region_log_ratio": step.log_ratio,
            "trust_region_regression": step.regression,
        }
        if step.kept_log_mass is not None:
            outputs["trust_region_kept_log_mass"] = step.kept_log_mass.detach()
        return outputs | {"entropy": step.entropy} if self.entropy and step.entropy is not None else outputs

    def _constraint(self, response_mask: Tensor) -> Constraint | None:
        """The constraint on this process's n tokens; the nested (B, T) mask is true where a token counts."""
        tokens = self.tokens
        if self.settings.constraint == "token":
            return None
        is_token = torch.ones_like(response_mask).to_padded_tensor(0).bool()
        at = tuple(index[tokens.numbers] for index in is_token.nonzero(as_tuple=True))
        constraint = Constraint.sequence(response_mask.to_padded_tensor(0).bool())[at]
        return dataclasses.replace(constraint, process_group=tokens.group)

    def loss(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of verl, in which the policy term reads the projection."""
        names = ["log_ratio", "regression", *(() if self.settings.truncation is None else ("kept_log_mass",))]
        tokens = {name: no_padding_2_padding(model_output.pop(f"trust_region_{name}"), data) for name in names}
        with projected(ProjectedTokens(**tokens)):
            return self._loss_function(model_output=model_output, data=data, dp_group=dp_group)

    @property
    def observed(self) -> bool:
        """Whether this process read a head: only a pipeline's last stage does."""
        return bool(self._tally.totals)

    def sums(self) -> Tally:
        """What was measured over all tokens and processes, in host memory; each one with `observed` must call it."""

        def reduced(numbers: Tensor, how: Any) -> Tensor:
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(numbers, how, group=self._processes)
            return numbers.cpu()

        operation = torch.distributed.ReduceOp
        return self._tally.reduced(lambda x: reduced(x, operation.SUM), lambda x: reduced(x, operation.MAX))
