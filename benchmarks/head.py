"""The LM head, forward and backward: TROLL's against TRL's, which the clip uses, other fused heads, and full logits.

All give log-probabilities and, if they can, the entropy, as GRPO needs them; the loss uses only the former.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import troll
from benchmarks import measure

#: The width of TRL's tile, and of ours.
TRL_CHUNK = 32768
#: Names of contenders. The first one that is installed is the baseline.
BASELINE, LIGER, FULL = "TRL's head (clip)", "Liger's scaled cross-entropy", "full logits (clip)"
FUSED, OWN_FULL = "TROLL, fused", "TROLL, full logits"
#: Contenders that must run; all others are skipped if they cannot.
OWN = FUSED, OWN_FULL

#: The vocabulary and the width of real heads. A CPU gets a quarter of the width, and fewer tokens.
MODELS = {
    "Qwen3-0.6B": {"vocabulary": 151_936, "width": 1024},
    "Qwen3-4B": {"vocabulary": 151_936, "width": 2560},
    "Llama-3.1-8B": {"vocabulary": 128_256, "width": 4096},
}
#: A model for a CPU, at its full width there too.
SMALL_MODEL = {"SmolLM2-135M": {"vocabulary": 49_152, "width": 576}}
TOKENS = {"cpu": 192, "cuda": 8192}
SMALL = {"small": {"tokens": 16, "vocabulary": 2048, "width": 32}}
#: The shape of Liger's published times.
LIGER_SHAPE = {"tokens": 4096, "vocabulary": 131_072, "width": 4096}


def cases(device: str) -> dict[str, dict[str, Any]]:
    """Shapes by name."""
    if measure.small:
        return SMALL
    scale = 4 if device == "cpu" else 1
    models = {
        name: {"tokens": TOKENS[device], "vocabulary": shape["vocabulary"], "width": shape["width"] // scale}
        for name, shape in MODELS.items()
    }
    models |= {name: {"tokens": TOKENS[device], **shape} for name, shape in SMALL_MODEL.items()}
    return models | ({"Liger's": LIGER_SHAPE} if device == "cuda" else {})


def problem(tokens: int, vocabulary: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's weight, and sampled tokens; bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device, dtype=dtype)
    # Logits of standard deviation 4, a distribution of a few likely tokens.
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype) * (4 * width**-0.5)
    # Sampled by the Gumbel trick, in slices.
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
    """The fraction of tokens that the contenders have to project."""
    hidden, weight, token_ids = problem(tokens, vocabulary, width, device)
    old = troll.capture(troll.LMHead(hidden, weight), token_ids)
    with torch.no_grad():
        step = troll.trust_region_step(troll.LMHead(moved(hidden), weight), old)
    return step.projected.float().mean().item()


def trl_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor, *outputs: str) -> Tensor:
    """TRL's fused head, which gives the log-probabilities first."""
    from trl.kernels import ChunkedLogProbFunction  # takes seconds, which other contenders need not wait

    log_probs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, token_ids, 1.0, TRL_CHUNK, None, 1.0, outputs)
    return log_probs


def liger_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Liger's fused scaled cross-entropy: on Hopper CuTe kernels, where nvidia-cutlass-dsl is installed."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    losses, _ = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, token_ids, return_entropy=True)
    return -losses


def apple_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Apple's cut cross-entropy, with the filter of small gradients that it has by default; it gives no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, token_ids, reduction="none")


def quack_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """QuACK's chunked linear cross-entropy, which gives the sum only, and no entropy."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return -chunked_linear_cross_entropy(hidden, weight, token_ids, reduction="sum")


def full_log_probs(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """The log-probabilities as a trainer without a fused head computes them."""
    log_probs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    with torch.no_grad():
        torch.special.entr(log_probs.exp()).sum(-1)
    return log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def contenders(tokens: int, vocabulary: int, width: int, top_k: int = 64, *, device: str) -> measure.Contenders:
    """One forward and backward pass of each, with an old policy that differs a little from the new one."""
    hidden, weight, token_ids = problem(tokens, vocabulary, width, device)
    old = troll.capture(troll.LMHead(hidden, weight), token_ids, top_k=top_k)
    leaves = moved(hidden).requires_grad_(), weight.requires_grad_()

    def troll_objective(source: troll.LMHead | troll.Logits) -> Tensor:
        step = troll.trust_region_step(source, old, entropy=True)
        return step.log_ratio - step.regression

    heads: dict[str, Callable[[], Tensor]] = {
        BASELINE: lambda: trl_log_probs(*leaves, token_ids, "entropy"),
        LIGER: lambda: liger_log_probs(*leaves, token_ids),
        "Apple's cut cross-entropy": lambda: apple_log_probs(*leaves, token_ids),
        "QuACK's cross-entropy": lambda: quack_log_probs(*leaves, token_ids),
        FULL: lambda: full_log_probs(*leaves, token_ids),
        FUSED: lambda: troll_objective(troll.LMHead(*leaves)),
        OWN_FULL: lambda: troll_objective(troll.Logits(leaves[0] @ leaves[1].t(), donate=True)),
    }

    def update(head: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            head().sum().backward()

        return run

    return {name: update(head) if name in OWN else measure.foreign(update(head)) for name, head in heads.items()}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Times and peak memory for the shapes of real heads."""
    shapes = cases(device)
    projected = {name: projected_fraction(**case, device=device) for name, case in shapes.items()}
    rows = measure.compare("head, forward and backward", shapes, contenders, repeats, device)
    Console().print("projected:", ", ".join(f"{name} {share:.0%}" for name, share in projected.items()))
    return [row | {"projected": projected[row["case"]]} for row in rows]
