"""Launches, waits for the device, the longest sort, and bytes a logit, for each way to a policy; no GPU is needed.

Each figure is next to its limit on a GPU with Triton (docs/performance.md); the torch code, which runs on a CPU, has
no limits. `counting` defines launches and waits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor

import troll
from benchmarks import measure
from benchmarks.counting import Passes, figures
from troll.trust_region import kernels
from troll.trust_region.reading import head, logits

#: Numbers of tokens and of logits. A further one of either costs the same at any number, so that a few suffice; and
#: these fit one tile. With more than 2 · 64 · TOP_K logits, selection looks at blocks first.
TOKENS, VOCABULARY = (2, 4), (16_384, 32_768)
#: The width of the hidden states. It does not matter, since a matrix product counts as one launch.
WIDTH = 8
TOP_K = 64

#: The limits with Triton: launches of a capture with one row tile, and of a step after the reading, with its backward
#: pass; sorted numbers of a row; waits; bytes a logit of a step from bf16 logits, forward or backward; and those of a
#: capture from bf16 logits, which an LM head has to write first.
MOST_LAUNCHES, MOST_SORTED, MOST_WAITS, MOST_BYTES = 12, 4096, 0, 4.0
MOST_CAPTURE_BYTES, WRITTEN = 2.4, 2.0

CAPTURE, FORWARD, BACKWARD = "capture", "reading, forward", "reading, backward"
STEP = "step after the reading, forward and backward"

#: The size of a tile on a GPU.
TILES = {
    "torch": "2^24 logits; 2^27 of an LM head, of at most 32,768 tokens and entries",
    "triton": "any logits; 2^27 of an LM head, of at most 32,768 tokens and entries",
}

LOGITS = "logits bf16", "logits bf16, view", "logits bf16, rows=", "logits bf16, donate=True", "logits fp32"
HEADS = "LM head bf16", "LM head fp32"
OUTCOMES = "K + 1 outcomes"


def source(name: str, tokens: int, vocabulary: int) -> tuple[troll.Logits | troll.LMHead, list[Tensor]]:
    """A source with this many positions, and the tensors that get gradients."""
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    if name in HEADS:
        hidden, weight = (torch.randn(x, WIDTH, dtype=dtype).requires_grad_() for x in (tokens, vocabulary))
        return troll.LMHead(hidden, weight), [hidden, weight]
    view, rows = "view" in name, "rows" in name
    shape = (2, tokens // 2 + 1, vocabulary) if view else (tokens + rows, vocabulary)
    leaf = torch.randn(shape, dtype=dtype).requires_grad_()
    read = leaf[:, :-1] if view else leaf
    # If a leaf were donated, the backward pass would write to it.
    read = read.view_as(read) if "donate" in name else read
    at = torch.arange(1, tokens + 1) if rows else None
    return troll.Logits(read, rows=at, donate="donate" in name), [read]


def of_source(name: str) -> Passes:
    """Capturing from a source, and reading it."""

    def passes(tokens: int, vocabulary: int) -> dict[str, Callable[[], object]]:
        read, leaves = source(name, tokens, vocabulary)
        sampled = torch.randint(vocabulary, read.shape)
        upstream = [torch.ones(*read.shape, TOP_K), torch.ones(read.shape)]
        made: dict[str, Any] = {}

        def capture() -> None:
            made["old"] = troll.capture(read, sampled, top_k=TOP_K)

        def forward() -> None:
            made["new"] = troll.log_probs_at(read, made["old"].token_ids)

        def backward() -> None:
            torch.autograd.grad([made["new"].logits, made["new"].tail_logit], leaves, upstream)

        return {CAPTURE: capture, FORWARD: forward, BACKWARD: backward}

    return passes


def after_reading(tokens: int, vocabulary: int) -> dict[str, Callable[[], object]]:
    """The step of a policy that has been read."""
    old = troll.capture(2 * torch.randn(tokens, vocabulary), torch.randint(vocabulary, (tokens,)), top_k=TOP_K)
    new_logits, tail_logit = 4 * torch.randn_like(old.log_probs), torch.zeros_like(old.tail_log_prob)
    leaves = new_logits.requires_grad_(), tail_logit.requires_grad_()
    upstream = [torch.ones(tokens), torch.ones(tokens)]
    made: dict[str, Any] = {}

    def forward() -> None:
        new = troll.PolicyOnSupport(old.token_ids, new_logits, tail_logit, old.vocab_size)
        made["step"] = troll.trust_region_step(new, old)

    def backward() -> None:
        torch.autograd.grad([made["step"].log_ratio, made["step"].regression], leaves, upstream)

    def both() -> None:
        forward()
        backward()

    return {"step after the reading, forward": forward, "step after the reading, backward": backward, STEP: both}


@contextmanager
def half_tiles(tokens: int, vocabulary: int) -> Iterator[None]:
    """Two row tiles where there would be one."""
    with (
        mock.patch.object(logits, "TILE_LOGITS", tokens * vocabulary // 2),
        mock.patch.dict(head.WHOLE_ROWS, gpu=tokens * vocabulary // 2),
        mock.patch.object(head, "TOKEN_TILE", tokens // 2),
    ):
        yield


def rows(
    kernels_of: str,
    paths: Sequence[str] = (*LOGITS, *HEADS, OUTCOMES),
    tokens: tuple[int, int] = TOKENS,
    vocabulary: tuple[int, int] = VOCABULARY,
) -> list[dict[str, Any]]:
    """Figures of "torch" or "triton" kernels, with their bars."""
    made = {name: after_reading if name == OUTCOMES else of_source(name) for name in paths}
    found = []
    # With many tokens the backward pass computes most tiles again.
    with mock.patch.dict(os.environ, {kernels.KERNELS_VARIABLE: kernels_of}), mock.patch.object(head, "KEPT", 0):
        for path, passes in made.items():
            for name, figure in figures(passes, half_tiles, tokens, vocabulary).items():
                bars = bars_of(path, name) if kernels_of == "triton" else {}
                broken = [key for key, bar in bars.items() if figure[key] > bar]
                found.append(
                    {"kernels": kernels_of, "path": path, "pass": name, **figure, "bars": bars, "broken": broken}
                )
    return found


def bars_of(path: str, name: str) -> dict[str, float]:
    """The bars of a pass, by figure."""
    bars: dict[str, float] = {"waits": MOST_WAITS}
    if name in (CAPTURE, STEP):
        bars["launches"] = MOST_LAUNCHES
    if name == CAPTURE:
        bars["longest sort"] = MOST_SORTED
        if "bf16" in path:
            bars["bytes a logit"] = MOST_CAPTURE_BYTES + (WRITTEN if path in HEADS else 0)
    if path.startswith("logits bf16") and name != CAPTURE:
        bars["bytes a logit"] = MOST_BYTES
    return bars


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Counts in a separate process, where kernels are interpreted. Device and repeats are not used."""
    found = []
    for kernels_of in ("torch", "triton"):
        if kernels_of == "triton" and importlib.util.find_spec("triton") is None:
            Console().print("skipped: Triton's kernels (triton is not installed)")
            continue
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.count", kernels_of]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if output.returncode:
            raise RuntimeError(f"counting failed:\n{output.stderr}")
        part = json.loads(output.stdout)
        show(f"counted, {kernels_of}: one tile of {TILES[kernels_of]}", part)
        found += part
    return found


def show(title: str, found: list[dict[str, Any]]) -> None:
    """Prints figures next to their bars."""
    columns = ("launches", "of a further tile", "waits", "longest sort", "bytes a logit", "issued a logit")
    table = measure.numbers("from", "pass", *columns, names=2, title=title)
    for row in found:
        table.add_row(row["path"], row["pass"], *(_cell(row, column) for column in columns))
    Console(width=150).print(table)


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = f"{row[column]:.2f}" if isinstance(row[column], float) else str(row[column])
    if column not in row["bars"]:
        return value
    return f"{value} (≤ {row['bars'][column]:g}: {'no' if column in row['broken'] else 'yes'})"


if __name__ == "__main__":
    print(json.dumps(rows(sys.argv[1])))
