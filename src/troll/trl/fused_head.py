"""TRL's fused LM head, made to read a policy where it reads log-probabilities."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from troll.trust_region.head import Head, OnSupport, OwnSupport, log_probs_on_support_from_hidden
from troll.trust_region.kernels.tile import Transform
from troll.trust_region.policy import SparsePolicy, Tail

#: What TRL's fused forward hands the scored hidden states to.
CHUNKED_LOG_PROB_FUNCTION = "_ChunkedLogProbFunction"


@dataclass
class PolicyOutput(FusedCausalLMOutput):
    """TRL's output, and what the head says of a support, of the N tokens that `label_mask` selects.

    In the output, since the hooks of FSDP look there for what takes part in the backward.
    """

    on_support: OnSupport | None = None
    vocab_size: int | None = None


def add_policy_head(model: Any, *, top_k: int, mass_threshold: float, tail: Tail) -> None:
    """Lets a model with TRL's fused LM head read policies in its forward pass, where its weights are gathered.

    ``model(..., labels=labels, fused_lm_head=True)`` returns a :class:`PolicyOutput` if it is also given

    - ``capture_policy=True``: the policy on its own support, without gradient or entropy. Its log-probabilities are
      raw, whatever the tail.
    - ``old_token_ids``, (B, T, K) and −1 in unused slots, for the last T labels: the policy on these tokens,
      differentiable. With ``tail="floor"`` its own support stands beside them, as `OwnSupport` says.

    Only ids go in, and the projection stays outside: FSDP casts floating-point arguments to the parameters' dtype.

    Args:
        model: As `trl.trainer.utils.add_fused_lm_head` left it. The base model, under PEFT.
        top_k: K of a capture.
        mass_threshold: δ.
        tail: As in `SparsePolicy`.

    Raises:
        RuntimeError: If TRL's fused head is not what this builds on.
    """
    fused_forward = _fused_forward(model)

    # The signature stays the model's: `generate` validates its arguments against it.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, old_token_ids: Tensor | None = None, capture_policy: bool = False, **kwargs: Any
    ) -> Any:
        if old_token_ids is None and not capture_policy:
            return fused_forward(self, *args, **kwargs)
        scored = kwargs["labels"][:, 1:] != -100
        support = None
        if old_token_ids is not None:  # aligned at the end, since prompt-learning PEFT prepends labels
            support = old_token_ids[scored[:, -old_token_ids.shape[1] :]]
        function = _PolicyFunction(scored, support, top_k, mass_threshold, tail)
        output = _with_global(fused_forward, CHUNKED_LOG_PROB_FUNCTION, function)(self, *args, **kwargs)
        return PolicyOutput(**output, on_support=function.on_support, vocab_size=function.vocab_size)

    model.forward = types.MethodType(forward, model)


@dataclass
class _PolicyFunction:
    """Stands in for TRL's autograd function in one forward pass, and keeps what was read beside its results."""

    scored: Tensor
    """(B, L): the positions whose next token has a label."""
    support: Tensor | None
    """(N, K); None captures."""
    top_k: int
    mass_threshold: float
    tail: Tail
    on_support: OnSupport | None = None
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
        transform = Transform(temperature, logit_scale, softcap)
        head = Head(weight, bias, transform, gathered=maybe_gather_lm_head_ctx)  # type: ignore[arg-type]
        scored = self.scored.to(hidden.device).flatten()
        # With Triton, TRL passes the scored positions; without, all of them.
        has_all = len(hidden) == len(scored)
        if has_all:
            hidden, targets = hidden[scored], targets[scored]
        self.on_support = self._read(hidden, head, targets, "entropy" in outputs)
        self.vocab_size = head.vocab_size
        # The trust region makes sure that each token has its slot.
        slot = (self.on_support.token_ids == targets.unsqueeze(-1)).to(torch.uint8).argmax(-1, keepdim=True)
        per_token = [self.on_support.log_probs.gather(-1, slot).squeeze(-1), self.on_support.entropy]
        if has_all:
            per_token = [None if x is None else scatter(x, scored) for x in per_token]
        return (*per_token, None, None, None)

    def _read(self, hidden: Tensor, head: Head, targets: Tensor, entropy: bool) -> OnSupport:
        if self.support is None:
            # Its tail stays exact for now, because TRL wants raw log-probabilities.
            policy = SparsePolicy.from_head(
                hidden, head, targets, top_k=self.top_k, mass_threshold=self.mass_threshold, tail="bucket"
            )
            return OnSupport(policy.token_ids, policy.log_probs, policy.tail_log_prob, None)
        own_support = OwnSupport(targets, self.mass_threshold) if self.tail == "floor" else None
        support = self.support.to(hidden.device)
        return log_probs_on_support_from_hidden(hidden, head, support, own_support=own_support, entropy=entropy)


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


def scatter(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Puts (N, ...) values where a mask is true, and `fill` elsewhere; differentiable even if it is true nowhere."""
    empty = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return empty.masked_scatter(mask.view(*mask.shape, *(1,) * (values.dim() - 1)), values)
