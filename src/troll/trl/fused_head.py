"""TRL's fused LM head, made to read a policy where it reads log-probabilities."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import trl
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from troll.trl.positions import scatter
from troll.trust_region.objective import support
from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.reading.capture import capture
from troll.trust_region.reading.head import LMHead
from troll.trust_region.reading.read import read

#: What TRL's fused forward hands the scored hidden states to.
CHUNKED_LOG_PROB_FUNCTION = "_ChunkedLogProbFunction"


@dataclass
class PolicyOutput(FusedCausalLMOutput):
    """TRL's output, and the policy of the N tokens that `label_mask` selects.

    Its tensors are in the output itself, since the hooks of FSDP look there for what takes part in the backward pass.

    Attributes:
        policy: The tensors of a `SparsePolicy`, if it was captured, or of `Outcomes`, if it was read; in their order.
        vocab_size: V.
    """

    policy: tuple[Tensor, ...] | None = None
    vocab_size: int | None = None

    def captured(self, mass_threshold: float) -> SparsePolicy:
        """The policy on its own support, (N,), which was captured with this δ."""
        assert self.policy is not None
        assert self.vocab_size is not None
        token_ids, log_probs, tail_log_prob, slot = self.policy
        return SparsePolicy(token_ids, log_probs, tail_log_prob, slot, self.vocab_size, mass_threshold)

    def outcomes(self) -> Outcomes:
        """The policy on the old one's support, (N,), differentiable."""
        assert self.policy is not None
        assert self.vocab_size is not None
        token_ids, logits, tail_logit = self.policy
        return Outcomes(token_ids, logits, tail_logit, self.vocab_size)


def add_policy_head(model: Any, *, top_k: int, mass_threshold: float, tail: Tail) -> None:
    """Lets a model with TRL's fused LM head read policies in its forward pass, where its weights are gathered.

    ``model(..., labels=labels, fused_lm_head=True)`` returns a `PolicyOutput` if it is also given

    - ``capture_policy=True``: the policy on its own support, without gradient or entropy.
    - ``old_support``, the old policy's `token_ids`, (B, T, K), and `slot`, (B, T), for the last T labels: the policy on
      these tokens, differentiable. With ``tail="floor"``, those of its own support follow.

    Only integers go in, and the projection stays outside: FSDP casts floating-point arguments to the parameters' dtype.

    Args:
        model: As `trl.trainer.utils.add_fused_lm_head` left it. The base model, under PEFT.
        top_k: K of a capture.
        mass_threshold: δ of a capture.
        tail: That of the step, which decides where the new policy is read.

    Raises:
        RuntimeError: If TRL's fused head is not what this builds on.
    """
    fused_forward = _fused_forward(model)

    # The signature stays the model's: `generate` validates its arguments against it.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        old_support: tuple[Tensor, Tensor] | None = None,
        capture_policy: bool = False,
        **kwargs: Any,
    ) -> Any:
        if old_support is None and not capture_policy:
            return fused_forward(self, *args, **kwargs)
        scored = kwargs["labels"][:, 1:] != -100
        function = _PolicyFunction(scored, old_support, top_k, mass_threshold, tail)
        output = _with_global(fused_forward, CHUNKED_LOG_PROB_FUNCTION, function)(self, *args, **kwargs)
        return PolicyOutput(**output, policy=function.policy, vocab_size=function.vocab_size)

    model.forward = types.MethodType(forward, model)


@dataclass
class _PolicyFunction:
    """Stands in for TRL's autograd function in one forward pass, and keeps the policy that it reads."""

    scored: Tensor
    """(B, L): the positions whose next token has a label."""
    old_support: tuple[Tensor, Tensor] | None
    """(B, T, K) and (B, T); None captures."""
    top_k: int
    mass_threshold: float
    tail: Tail
    policy: tuple[Tensor, ...] | None = None
    vocab_size: int | None = None

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        scored = self.scored.to(hidden.device).flatten()
        # With Triton, TRL passes the scored positions; without, all of them.
        has_all = len(hidden) == len(scored)
        if has_all:
            hidden, targets = hidden[scored], targets[scored]
        gathered: Any = maybe_gather_lm_head_ctx
        head = LMHead(hidden, weight, bias, temperature, logit_scale, softcap, gathered=gathered)
        self.vocab_size = head.width
        if self.old_support is None:
            per_token = self._capture(head, targets)
        else:
            per_token = self._read(head, targets, *self.old_support, "entropy" in outputs)
        if has_all:
            per_token = tuple(None if x is None else scatter(x, scored) for x in per_token)
        return (*per_token, None, None, None)

    def _capture(self, head: LMHead, targets: Tensor) -> tuple[Tensor | None, ...]:
        """Log-probabilities of the targets, (N,), and no entropy."""
        policy = capture(head, targets, top_k=self.top_k, mass_threshold=self.mass_threshold)
        self.policy = policy.token_ids, policy.log_probs, policy.tail_log_prob, policy.slot
        return policy.log_prob, None

    def _read(
        self, head: LMHead, targets: Tensor, old_token_ids: Tensor, old_slot: Tensor, with_entropy: bool
    ) -> tuple[Tensor | None, ...]:
        """Log-probabilities of the targets and, where asked for, entropies, (N,) each."""
        at = self.scored[:, -old_slot.shape[1] :]  # aligned at the end, since prompt-learning PEFT prepends labels
        old_token_ids, slot = (x[at].to(targets.device) for x in (old_token_ids, old_slot))
        token_ids = support(head, old_token_ids, targets, self.tail, self.mass_threshold)
        new = read(head, token_ids, entropy=with_entropy)
        self.policy = token_ids, new.logits, new.tail_logit
        log_probs = new.log_probs.gather(-1, slot.unsqueeze(-1)).squeeze(-1)
        return log_probs, new.entropy


def _fused_forward(model: Any) -> types.FunctionType:
    function = getattr(model.forward, "__func__", None)
    if (
        not isinstance(function, types.FunctionType)
        or CHUNKED_LOG_PROB_FUNCTION not in function.__code__.co_names
        or CHUNKED_LOG_PROB_FUNCTION not in function.__globals__
    ):
        raise RuntimeError(
            f"TrollTrainer extends TRL's fused LM head, but in TRL {trl.__version__} {type(model).__name__}.forward "
            f"does not call {CHUNKED_LOG_PROB_FUNCTION}: something else replaced the forward, or TRL has changed"
        )
    return function


def _with_global(function: types.FunctionType, name: str, value: object) -> types.FunctionType:
    """The same function, which sees another value of one of its module's names."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
