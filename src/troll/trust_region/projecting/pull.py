"""The pull: the term of the loss that moves the network itself, where the projection only bounds its ratio."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from troll.trust_region.policy.values import divergence
from troll.trust_region.projecting.projection import Ball

Pull = Literal["projection", "proximal"]
PULLS: tuple[Pull, ...] = get_args(Pull)


def check_pull(pull: str) -> None:
    """Raises ValueError unless a pull is known."""
    if pull not in PULLS:
        raise ValueError(f"pull must be one of {', '.join(PULLS)}, got {pull!r}")


def to_projection(ball: Ball, log_new: Tensor, present: Tensor) -> Tensor:
    """KL(p̃ ‖ ⌊q⌋) of N tokens, (N,), differentiable: 0 where nothing is projected.

    Args:
        ball: The projection of the tokens.
        log_new: log p̃, floored, (N, M); −inf on absent outcomes.
        present: (N, M) bool.
    """
    # 0 where nothing is projected, and still differentiable: nothing of the ratio remains, NaN and inf included.
    pull = torch.where(torch.ones_like(ball.broken), 0.0, ball.log_ratio)
    if ball.log_q is None:
        return pull
    log_q, present = ball.log_q.detach(), present[ball.rows]
    difference = torch.where(present, log_new[ball.rows] - log_q, 0.0)
    return pull.index_copy(0, ball.rows, divergence(difference, log_q.masked_fill(~present, -torch.inf)))


def to_old(log_new: Tensor, log_old: Tensor, present: Tensor) -> Tensor:
    """KL(p ‖ p̃), (...), differentiable in p̃: its gradient in the logits is `p̃ − p`, and acts at every token.

    Args:
        log_new: log p̃, floored, (..., M); −inf on absent outcomes.
        log_old: log p, in the same form.
        present: (..., M) bool.
    """
    return divergence(torch.where(present, log_old - log_new, 0.0), log_new)
