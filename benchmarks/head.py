"""The LM head, forward and backward: TROLL's fused head, TRL's (which the clip uses), and full logits.

Both sides give log-probabilities and the entropy, as GRPO asks for them; the loss is made of the former.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import troll
from benchmarks import measure

#: TRL's tile; ours is as wide.
TRL_CHUNK = 32768
BASELINE = "TRL's head (clip)"

#: Vocabulary and width of real heads. On a CPU a quarter of the width, and fewer tokens.
MODELS = {
    "Qwen3-0.6B": {"vocabulary": 151_936, "width": 1024},
    "Qwen3-4B": {"vocabulary": 151_936, "width": 2560},
    "Llama-3.1-8B": {"vocabulary": 128_256, "width": 4096},
}
TOKENS = {"cpu": 192, "cuda": 8192}


def cases(device: str) -> dict[str, dict[str, Any]]:
    """Shapes by name."""
    scale = 4 if device == "cpu" else 1
    return {
        name: {"tokens": TOKENS[device], "vocabulary": shape["vocabulary"], "width": shape["width"] // scale}
        for name, shape in MODELS.items()
    }


def problem(tokens: int, vocabulary: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's weight, and sampled tokens; bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device, dtype=dtype)
    # Logits of standard deviation 4, a distribution of a few likely tokens.
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype) * (4 * width**-0.5)
    # By the Gumbel trick, in slices.
    token_ids = torch.cat(
        [
            (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)
            for logits in ((rows @ weight.t()).float() for rows in hidden.split(256))
        ]
    )
    return hidden, weight, token_ids


def moved(hidden: Tensor) -> Tensor:
    """Hidden states of a new policy, which leaves the bound at about a third of the tokens."""
    return hidden + 0.1 * torch.randn_like(hidden)


def projected_fraction(tokens: int, vocabulary: int, width: int, *, device: str) -> float:
    """How many tokens the contenders have to project."""
    hidden, weight, token_ids = problem(tokens, vocabulary, width, device)
    old = troll.SparsePolicy.from_hidden(hidden, weight, token_ids)
    with torch.no_grad():
        step = troll.trust_region_log_probs_from_hidden(moved(hidden), weight, token_ids, old)
    return step.projected.float().mean().item()


def trl_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor, *outputs: str) -> Tensor:
    """TRL's fused head, which gives the log-probabilities first."""
    from trl.kernels import ChunkedLogProbFunction  # seconds, which the memory of other contenders need not wait for

    log_probs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, token_ids, 1.0, TRL_CHUNK, None, 1.0, outputs)
    return log_probs


def contenders(tokens: int, vocabulary: int, width: int, top_k: int = 64, *, device: str) -> measure.Contenders:
    """One forward and backward each, on an old policy that differs a little from the new one."""
    hidden, weight, token_ids = problem(tokens, vocabulary, width, device)
    old = troll.SparsePolicy.from_hidden(hidden, weight, token_ids, top_k=top_k)
    hidden = moved(hidden)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def trl_head() -> Tensor:
        return trl_log_probs(*leaves, token_ids, "entropy")

    def fused() -> Tensor:
        step = troll.trust_region_log_probs_from_hidden(*leaves, token_ids, old, entropy=True)
        return step.log_probs - step.regression

    def full_logits() -> Tensor:
        logits = leaves[0] @ leaves[1].t()
        with torch.no_grad():
            log_probs = torch.log_softmax(logits.float(), -1)
            torch.special.entr(log_probs.exp()).sum(-1)
            del log_probs
        step = troll.trust_region_log_probs(logits, token_ids, old)
        return step.log_probs - step.regression

    def update(head: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            head().sum().backward()

        return run

    return {BASELINE: update(trl_head), "TROLL, fused": update(fused), "TROLL, full logits": update(full_logits)}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Times and peak memory for the shapes of real heads."""
    results = []
    for name, case in cases(device).items():
        made = contenders(**case, device=device)
        taken = measure.seconds(made, repeats, device)
        peaks = measure.peak_memory(contenders, case, list(made), device)
        del made
        title = f"head, forward and backward: {name}, " + ", ".join(f"{key} {value}" for key, value in case.items())
        projected = projected_fraction(**case, device=device)
        rows = measure.show(f"{title}, {projected:.0%} projected", taken, peaks)
        results += [{"case": name, **case, **row, "projected": projected} for row in rows]
    return results
