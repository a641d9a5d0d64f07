"""The load-balancing loss of a mixture's routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def load_balancing_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The loss of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6), over all routers; a scalar.

    Every mixture of transformers has this function, and gives it numbers that its configuration has under different
    names.

    Args:
        model: The language model.
        router_logits: Its routers' logits, (B · L, experts) each. None or empty for a model without experts, which some
            configurations of mixtures describe; its loss is 0.
        attention_mask: (B, L or more), the last L are those of the tokens; None if all count.

    Raises:
        ValueError: If the routers do not score experts one by one.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not router_logits:
        return torch.zeros((), device=next(model.parameters()).device)
    if any(logits.dim() != 2 for logits in router_logits):
        raise ValueError(
            f"the routers of {type(model).__name__} do not score experts one by one, as their load-balancing loss "
            "needs: set router_aux_loss_coef to 0"
        )
    tokens, experts = router_logits[0].shape
    if attention_mask is not None:
        attention_mask = attention_mask[:, -(tokens // len(attention_mask)) :]
    loss: Any = load_balancing_loss_func(router_logits, experts, _experts_per_token(model), attention_mask)
    return loss


def _experts_per_token(model: Any) -> int:
    number = getattr(model, "num_experts_per_tok", None)
    return int(model.config.get_text_config().num_experts_per_tok if number is None else number)
