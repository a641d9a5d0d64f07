"""Scored tokens from full logits, in float64."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import troll
from troll.trl.surrogates import ScoredTokens


def scored_tokens(
    new_logits: Tensor,
    old_logits: Tensor,
    sampled: Tensor,
    *,
    advantages: Tensor | None = None,
    kl_bound: float = 0.05,
    top_k: int | None = None,
    sequence: Tensor | None = None,
    counts: Tensor | None = None,
) -> ScoredTokens:
    """Of (N, V) logits and (N,) tokens; all outcomes are kept unless `top_k` says otherwise, and one sequence."""
    old = troll.capture(old_logits, sampled, top_k=top_k or old_logits.shape[-1], mass_threshold=0.0)
    return ScoredTokens(
        new_log_probs=new_logits.log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1),
        old_log_probs=old.log_prob,
        advantages=torch.ones(len(sampled)) if advantages is None else advantages,
        kl_bound=kl_bound,
        constraint=None,
        old=old,
        new=troll.log_probs_at(new_logits, old.token_ids),
        sequence=torch.zeros_like(sampled) if sequence is None else sequence,
        counts=torch.ones_like(sampled, dtype=torch.bool) if counts is None else counts,
    )


def settings(**values: Any) -> Any:
    """What a surrogate reads of a configuration."""
    return SimpleNamespace(**{"pull": "projection", "regression_weight": 1.0, **values})


def pair(tokens: int = 6, vocab: int = 9, distance: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """New logits that take a gradient, old ones, and sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    old = 2 * torch.randn(tokens, vocab, dtype=torch.float64, generator=generator)
    new = old + distance * torch.randn(tokens, vocab, dtype=torch.float64, generator=generator)
    return new.requires_grad_(), old, torch.arange(tokens) % vocab
