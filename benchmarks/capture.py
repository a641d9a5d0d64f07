"""Capturing the old policy, without gradient: against TRL's log-probability pass, and the naive softmax and top-K."""

from __future__ import annotations

from typing import Any

import torch

import troll
from benchmarks import head, measure


@torch.no_grad()
def contenders(tokens: int, vocabulary: int, width: int, top_k: int = 64, *, device: str) -> measure.Contenders:
    """TRL's pass gives the sampled tokens' log-probabilities alone; all others the K largest too."""
    hidden, weight, token_ids = head.problem(tokens, vocabulary, width, device)

    @torch.no_grad()
    def trl_pass() -> object:
        return head.trl_log_probs(hidden, weight, token_ids)

    @torch.no_grad()
    def softmax_and_top_k() -> object:
        log_probs = torch.log_softmax((hidden @ weight.t()).float(), -1)
        return log_probs.gather(-1, token_ids.unsqueeze(-1)), log_probs.topk(top_k)

    return {
        "TRL's log-probs": trl_pass,
        "TROLL, fused": lambda: troll.SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=top_k),
        "log_softmax + topk": softmax_and_top_k,
    }


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Times and peak memory for the shapes of real heads."""
    results = []
    for name, case in head.cases(device).items():
        made = contenders(**case, device=device)
        taken = measure.seconds(made, repeats, device)
        peaks = measure.peak_memory(contenders, case, list(made), device)
        title = f"capture, no gradient: {name}, " + ", ".join(f"{key} {value}" for key, value in case.items())
        results += [{"case": name, **case, **row} for row in measure.show(title, taken, peaks)]
    return results
