"""Reading a model's logits where TRL reads log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits

from troll.trust_region.support import as_float

#: From logits (N, V) of the scored tokens, their ids (N,) and the mask (B, T) that selected them, to what TRL shall
#: take for their log-probabilities (N,).
ReadLogits = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class LogitsReader:
    """Stands in for the model inside ``GRPOTrainer._get_per_token_logps_and_entropies``.

    TRL calls the model with ``fused_lm_head=True`` and gets log-probabilities without ever seeing logits. This calls
    the model's own forward, so that the model itself resolves its head, softcap and scale (and FSDP, PEFT and DDP see
    an ordinary call), and hands the logits of the scored tokens to `read`.

    Attributes:
        model: What TRL would have called.
        logits_to_keep: T, the completion's length.
        temperature: The logits are divided by it.
        entropy_needs_grad: Whether the loss contains the entropy.
        accepts_logits_to_keep: Whether the model's forward can leave out the prompt's logits.
        read: See :data:`ReadLogits`.
    """

    model: Callable[..., object]
    logits_to_keep: int
    temperature: float
    entropy_needs_grad: bool
    accepts_logits_to_keep: bool
    read: ReadLogits

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **model_inputs: object) -> FusedCausalLMOutput:
        """The forward pass; every per-token output is (B, T), 0 where the label is −100."""
        if self.accepts_logits_to_keep:
            model_inputs["logits_to_keep"] = self.logits_to_keep + 1
        outputs = self.model(**model_inputs, use_cache=False)
        labels = labels[:, -self.logits_to_keep :]
        scored = labels != -100
        # Position t predicts token t + 1. The last position predicts a token that does not exist.
        logits: Tensor = outputs.logits[:, -self.logits_to_keep - 1 : -1]  # type: ignore[attr-defined]
        scored = scored.to(logits.device)
        # In float32 before the division: half precision would be rounded once more than in TRL's own head.
        logits = as_float(logits[scored]) / self.temperature
        log_probs = self.read(logits, labels.to(logits.device)[scored], scored)
        entropy = None
        if torch.is_grad_enabled():  # the old policy's is never asked for
            with torch.set_grad_enabled(self.entropy_needs_grad):
                entropy = scatter(entropy_from_logits(logits), scored)
        return FusedCausalLMOutput(
            log_probs=scatter(log_probs, scored),
            entropy=entropy,
            aux_loss=getattr(outputs, "aux_loss", None),
        )


def scatter(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Puts (N, ...) values where a (B, T) mask is true, and `fill` elsewhere: (B, T, ...), differentiable."""
    empty = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return empty.masked_scatter(mask.view(*mask.shape, *(1,) * (values.dim() - 1)), values)
