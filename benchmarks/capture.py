"""Capturing the old policy, without gradient: against other log-probability passes, and softmax with top-K."""

from __future__ import annotations

from typing import Any

import torch

import troll
from benchmarks import head, measure


def contenders(tokens: int, vocabulary: int, width: int, top_k: int = 64, *, device: str) -> measure.Contenders:
    """Passes without gradient. Ours and the last one also give the K largest log-probabilities of each token."""
    hidden, weight, token_ids = head.problem(tokens, vocabulary, width, device)

    @torch.no_grad()
    def trl_pass() -> object:
        return head.trl_log_probs(hidden, weight, token_ids)

    @torch.no_grad()
    def liger_pass() -> object:
        return head.liger_log_probs(hidden, weight, token_ids)

    @torch.no_grad()
    def softmax_and_top_k() -> object:
        log_probs = torch.log_softmax((hidden @ weight.t()).float(), -1)
        return log_probs.gather(-1, token_ids.unsqueeze(-1)), log_probs.topk(top_k)

    return {
        "TRL's log-probs": measure.foreign(trl_pass),
        "Liger's log-probs": measure.foreign(liger_pass),
        head.FUSED: lambda: troll.capture(troll.LMHead(hidden, weight), token_ids, top_k=top_k),
        "log_softmax + topk": measure.foreign(softmax_and_top_k),  # may run out of memory
    }


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Times and peak memory for the shapes of real heads."""
    return measure.compare("capture, no gradient", head.cases(device), contenders, repeats, device)
