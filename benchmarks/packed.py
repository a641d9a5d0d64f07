"""The packed old policy against the padded one: bytes a token.

The logits are made up: Zipf's law, `−s log rank`, with an exponent s for each position whose spread is chosen so that
some positions are nearly certain, some wide open, and 5 to 10 of 64 tokens carry 99.999 % of the mass on average. The
packed form takes 8 bytes for each of them and 12 for the position, so the ratio follows from that average only.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import troll
from benchmarks import measure

VOCABULARY, SEQUENCES, LENGTH = 151_936, 64, 256
#: The number of different sequences that are captured; the buffer repeats them.
CAPTURED = {"cpu": 4, "cuda": 64, "small": 1}
#: The median of the exponents, and the standard deviation of their logarithms.
EXPONENT, SPREAD = 11.0, 0.6
#: The upper ends of the bins of kept tokens, inclusive.
BINS = (1, 2, 4, 8, 16, 32, 63, 64)


def rollout(device: str) -> troll.PackedPolicy:
    """The old policy of a rollout, (SEQUENCES, LENGTH)."""
    torch.manual_seed(0)
    log_rank = torch.arange(1, VOCABULARY + 1, device=device).float().log()
    different = CAPTURED[measure.shapes(device)]
    return troll.PackedPolicy.cat([_capture(log_rank) for _ in range(different)] * (SEQUENCES // different))


def _capture(log_rank: Tensor) -> troll.PackedPolicy:
    """One sequence, (1, LENGTH): its tokens are sampled from its policy, as in a rollout."""
    exponents = EXPONENT * (SPREAD * torch.randn(LENGTH, 1, device=log_rank.device)).exp()
    logits = -exponents * log_rank[torch.randperm(VOCABULARY, device=log_rank.device)]
    token_ids = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(-1)
    return troll.PackedPolicy.of(troll.capture(logits, token_ids)[None])


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints kept tokens and bytes per token."""
    packed = rollout(device)
    Console().print(
        f"packed: {SEQUENCES} sequences of {LENGTH} tokens, V = {VOCABULARY}, Zipf exponents of median {EXPONENT}"
    )
    return [*_kept(packed.counts), *_bytes(packed.unpack(), packed)]


def _kept(counts: Tensor) -> list[dict[str, Any]]:
    shares = {}
    for low, high in zip((0, *BINS), BINS, strict=False):
        name = str(high) if high == low + 1 else f"{low + 1}–{high}"
        shares[name] = ((counts > low) & (counts <= high)).double().mean().item()
    title = f"kept tokens: mean {counts.double().mean():.1f}, median {counts.median().item()}"
    table = measure.numbers(*shares, names=0, title=title)
    table.add_row(*(f"{share:.1%}" for share in shares.values()))
    Console(width=110).print(table)
    return [{"kept": name, "share": share} for name, share in shares.items()]


def _bytes(padded: troll.SparsePolicy, packed: troll.PackedPolicy) -> list[dict[str, Any]]:
    integers = padded.token_ids.nbytes + padded.slot.nbytes
    floats = padded.log_probs.nbytes + padded.tail_log_prob.nbytes
    forms = {
        "padded, int64 ids": integers + floats,
        "padded, int32 ids": integers // 2 + floats,
        "packed": packed.nbytes,
    }
    table = Table("form", "bytes per token", "of packed")
    rows = []
    for name, size in forms.items():
        rows.append({"form": name, "bytes_per_token": size / padded.shape.numel(), "ratio": size / packed.nbytes})
        table.add_row(name, f"{size / padded.shape.numel():.1f}", f"{size / packed.nbytes:.2f} ×")
    Console(width=110).print(table)
    return rows
