"""The LM head: forward and backward of TROLL's fused head, TRL's (which the clip uses), and full logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

import troll

#: Qwen3's vocabulary; tokens and width scaled down for a CPU.
VOCABULARY, WIDTH, TOKENS, REPEATS = 151_936, 256, 512, 5
TRL_CHUNK = 32768


def main() -> None:
    """Prints times relative to TRL's head, measured in turn in one process."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH)
    weight = torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5 * 3
    token_ids = torch.distributions.Categorical(logits=hidden @ weight.t()).sample()
    old = troll.SparsePolicy.from_hidden(hidden, weight, token_ids)
    hidden = hidden + 0.05 * torch.randn_like(hidden)

    def trl_head(hidden: Tensor, weight: Tensor) -> Tensor:
        return ChunkedLogProbFunction.apply(hidden, weight, None, token_ids, 1.0, TRL_CHUNK, None, 1.0, ())[0]

    def troll_head(hidden: Tensor, weight: Tensor) -> Tensor:
        step = troll.trust_region_log_probs_from_hidden(hidden, weight, token_ids, old)
        return step.log_probs - step.regression

    def full_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        step = troll.trust_region_log_probs(hidden @ weight.t(), token_ids, old)
        return step.log_probs - step.regression

    updates = {"TRL's head (clip)": trl_head, "TROLL, fused": troll_head, "TROLL, full logits": full_logits}
    captures: dict[str, Callable[[], object]] = {
        "TRL's log-probs": lambda: trl_head(hidden, weight),
        "TROLL, fused": lambda: troll.SparsePolicy.from_hidden(hidden, weight, token_ids),
        "TROLL, full logits": lambda: troll.SparsePolicy.from_logits(hidden @ weight.t(), token_ids),
    }

    def update(head: Callable[[Tensor, Tensor], Tensor]) -> None:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head(*leaves).sum().backward()

    title = f"V={VOCABULARY}, H={WIDTH}, {TOKENS} tokens, float32, {torch.get_num_threads()} threads"
    _print(f"forward and backward: {title}", _time({name: lambda h=h: update(h) for name, h in updates.items()}))  # type: ignore[misc]
    with torch.no_grad():
        _print(f"capture, without gradient: {title}", _time(captures))


def _time(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in track(range(REPEATS + 1), description="measuring"):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _print(title: str, seconds: dict[str, list[float]]) -> None:
    baseline = next(iter(seconds.values()))
    table = Table(title=title)
    for column in ("contender", "median s", "ratio: median", "min", "max"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, times in seconds.items():
        ratios = [time / base for time, base in zip(times, baseline, strict=True)]
        table.add_row(
            name, f"{statistics.median(times):.2f}", *(f"{f(ratios):.2f}" for f in (statistics.median, min, max))
        )
    Console(width=100).print(table)
