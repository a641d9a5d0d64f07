"""The arithmetic of ``simulate`` against measurements: sizes that were not used to find the constants.

Times are fitted at small shapes and predicted at larger ones, in the same rounds. They are CPU time of one thread,
which other programs on the machine disturb less than the clock on the wall. Bytes are predicted from the definitions
and counted. Nothing here says anything of a GPU.
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import troll
from benchmarks import capture, cpu_time, head, measure, packed, step_model
from troll.trust_region.policy.wire import to_records

Rows = list[dict[str, Any]]

FUSED = "TROLL, fused"
PASSES: dict[str, tuple[measure.Maker, str]] = {
    "clip, head": (head.contenders, head.BASELINE),
    "TROLL, head": (head.contenders, FUSED),
    "clip, old pass": (capture.contenders, "TRL's log-probs"),
    "TROLL, old pass": (capture.contenders, FUSED),
}
#: Two widths and two vocabularies at which each pass is fitted, and what is then predicted.
FITTED = (
    {"tokens": 128, "vocabulary": 16_384, "width": 128},
    {"tokens": 128, "vocabulary": 16_384, "width": 512},
    {"tokens": 128, "vocabulary": 32_768, "width": 128},
)
PREDICTED = ({"tokens": 256, "vocabulary": 32_768, "width": 256}, {"tokens": 128, "vocabulary": 65_536, "width": 1024})

#: Tokens and outcomes.
PROJECTIONS_FITTED, PROJECTIONS_PREDICTED = ((1024, 17), (4096, 17), (4096, 65)), ((8192, 33), (4096, 129))

#: Tokens, vocabulary: of an elementwise pass that gives the bandwidth, and of what is predicted from counted bytes.
LOGITS_FITTED, LOGITS_PREDICTED = (128, 16_384), ((32, 151_936), (192, 32_768))

#: Median and spread of Zipf's exponents; the first as in ``packed``.
DISTRIBUTIONS = ((packed.EXPONENT, packed.SPREAD), (5.0, 0.3), (8.0, 1.0))
POSITIONS, ZIPF_VOCABULARY, TOP_K = 1024, 16_384, 64

PROCESSES = (2, 4)
#: Of what is counted in those processes.
COUNTED = {"tokens": 96, "vocabulary": 1024, "width": 48}


def main(device: str, repeats: int) -> Rows:
    """Prints predicted beside measured, on the CPU whatever the device, and returns the rows."""
    return [*_packed_bytes(), *_exchanged(), *_projection(repeats), *_from_logits(repeats), *_heads(repeats)]


def _show(title: str, rows: Rows, unit: Callable[[float], str]) -> Rows:
    table = Table(title=title, title_justify="left")
    for column in ("what", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        row["error"] = row["predicted"] / row["measured"] - 1
        table.add_row(row["what"], unit(row["predicted"]), unit(row["measured"]), f"{row['error']:+.1%}")
    Console(width=120).print(table)
    return [{"table": title, **row} for row in rows]


def expected_kept(exponent: float, spread: float, vocabulary: int, top_k: int, mass_threshold: float) -> float:
    """Mean slots of a token under Zipf's law with log-normal exponents, from the definition alone, in float64."""
    middles = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    exponents = exponent * torch.exp(spread * torch.special.ndtri(middles))
    log_rank = torch.arange(1, vocabulary + 1, dtype=torch.float64).log()
    kept = []
    for part in exponents.split(100):
        mass = torch.softmax(-part.unsqueeze(-1) * log_rank, -1)
        # From the smallest up: 1 − Σ would be all rounding. Ranks before which more than the threshold is left.
        remaining = mass.flip(-1).cumsum(-1).flip(-1)
        kept.append((remaining > mass_threshold).sum(-1).clamp(max=top_k))
    return torch.cat(kept).double().mean().item()


def _packed_bytes() -> Rows:
    rows: Rows = []
    for exponent, spread in DISTRIBUTIONS:
        torch.manual_seed(0)
        log_rank = torch.arange(1, ZIPF_VOCABULARY + 1).float().log()
        exponents = exponent * (spread * torch.randn(POSITIONS, 1)).exp()
        parts = []
        for part in exponents.split(256):
            logits = -part * log_rank
            sampled = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(-1)
            parts.append(troll.capture(logits, sampled, top_k=TOP_K))
        policy = troll.SparsePolicy.cat(parts)
        a = step_model.Assumptions(
            kept=expected_kept(exponent, spread, ZIPF_VOCABULARY, TOP_K, policy.mass_threshold),
            response_tokens=POSITIONS / 8,
        )
        size = sum(record.nbytes for record in to_records(troll.PackedPolicy.of(policy), [POSITIONS // 8] * 8))
        rows.append(
            {
                "what": f"Zipf, exponents of median {exponent:g}, spread {spread:g}",
                "predicted": step_model.policy_bytes(step_model.SHAPES[0], a)["packed"],
                "measured": size / POSITIONS,
            }
        )
    return _show(f"packed records of {POSITIONS} tokens, bytes a token", rows, lambda x: f"{x:.2f}")


def _exchanged() -> Rows:
    rows: Rows = []
    for processes in PROCESSES:
        measured = _count(processes)
        predicted = {
            "capture": step_model.capture_words(TOP_K, processes),
            "update from logits": step_model.update_words(TOP_K, processes),
            "update from hidden states": step_model.update_words(TOP_K, processes) + COUNTED["width"],
        }
        rows += [
            {
                "what": f"{processes} processes, {name}",
                "predicted": float(step_model.WORD * words),
                "measured": measured[name] / COUNTED["tokens"],
            }
            for name, words in predicted.items()
        ]
    title = f"bytes a token of what the exchanges hold, {COUNTED['tokens']} tokens, H = {COUNTED['width']}"
    return _show(title, rows, lambda x: f"{x:.1f}")


def _count(processes: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_counting, args=(processes, folder), nprocs=processes)
        counted = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
    assert all(each == counted[0] for each in counted)
    return counted[0]


def _counting(rank: int, processes: int, folder: str) -> None:
    """One process of a group: every exchange, counted where the library hands it to torch."""
    warnings.filterwarnings("ignore")  # as in the parent
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    counted = 0

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(held: Tensor, *args: object, **kwargs: object) -> object:
            nonlocal counted
            counted += held.nbytes
            return function(held, *args, **kwargs)

        return call

    for name in ("all_gather_into_tensor", "all_reduce"):
        setattr(torch.distributed, name, counting(getattr(torch.distributed, name)))
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    hidden = torch.randn(COUNTED["tokens"], COUNTED["width"])
    weight = torch.randn(COUNTED["vocabulary"], COUNTED["width"])
    token_ids = torch.randint(COUNTED["vocabulary"], (COUNTED["tokens"],))
    rows = weight.chunk(processes)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    results = {}
    old = troll.capture(troll.Logits(hidden @ rows.t(), vocab_group=group), token_ids, top_k=TOP_K)
    results["capture"], counted = counted, 0
    troll.trust_region_step(troll.Logits(hidden @ rows.t(), vocab_group=group), old).log_ratio.sum().backward()
    results["update from logits"], counted = counted, 0
    troll.trust_region_step(troll.LMHead(hidden, rows, vocab_group=group), old).log_ratio.sum().backward()
    results["update from hidden states"] = counted
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _projection(repeats: int) -> Rows:
    """A call, and in it each token and each of its outcomes, cost the same wherever they are."""
    shapes = (*PROJECTIONS_FITTED, *PROJECTIONS_PREDICTED)
    taken = cpu_time.medians({str(shape): _project(*shape) for shape in shapes}, repeats)
    fitted = torch.tensor([[1, tokens, tokens * outcomes] for tokens, outcomes in PROJECTIONS_FITTED]).double()
    times = torch.tensor([taken[str(shape)] for shape in PROJECTIONS_FITTED]).double()
    a_call, a_token, an_outcome = torch.linalg.solve(fitted, times).tolist()
    rows: Rows = [
        {
            "what": f"{tokens} tokens x {outcomes} outcomes",
            "predicted": a_call + tokens * (a_token + outcomes * an_outcome),
            "measured": taken[str((tokens, outcomes))],
        }
        for tokens, outcomes in PROJECTIONS_PREDICTED
    ]
    return _show(f"projection, forward: from {PROJECTIONS_FITTED}", rows, measure.duration)


def _project(tokens: int, outcomes: int) -> Callable[[], object]:
    torch.manual_seed(0)
    old = torch.log_softmax(4 * torch.randn(tokens, outcomes), -1)
    new = torch.log_softmax(old + 2 * torch.randn_like(old), -1)
    return lambda: troll.project(new, old, 0.05)


def _from_logits(repeats: int) -> Rows:
    """Bytes that ``step_model`` counts, at the bandwidth of one elementwise pass over other logits."""
    tokens, vocabulary = LOGITS_FITTED
    logits = torch.randn(tokens, vocabulary)
    out = torch.empty_like(logits)
    contenders: dict[str, Callable[[], object]] = {"exp": lambda: torch.exp(logits, out=out)}
    rows: Rows = []
    for shape in LOGITS_PREDICTED:
        made = _logits_contenders(*shape)
        contenders |= {f"{name}, {shape[0]} x {shape[1]}": call for name, call in made.items()}
    taken = cpu_time.medians(contenders, repeats)
    a_byte = taken["exp"] / (2 * logits.nbytes)
    for tokens, vocabulary in LOGITS_PREDICTED:
        candidates = step_model.CANDIDATE_BYTES * (step_model.BLOCK * TOP_K + vocabulary / step_model.BLOCK)
        moved = {
            "capture": step_model.CAPTURE_BYTES_FLOAT32 * vocabulary + candidates,
            "update": step_model.UPDATE_BYTES_FLOAT32 * vocabulary,
        }
        for name, size in moved.items():
            what = f"{name}, {tokens} x {vocabulary}"
            rows.append({"what": what, "predicted": tokens * size * a_byte, "measured": taken[what]})
    title = (
        f"from logits: counted bytes at the {1e-9 / a_byte:.1f} GB/s of exp on {LOGITS_FITTED[0]} x {LOGITS_FITTED[1]}"
    )
    return _show(title, rows, measure.duration)


def _logits_contenders(tokens: int, vocabulary: int) -> measure.Contenders:
    torch.manual_seed(0)
    logits = 4 * torch.randn(tokens, vocabulary)
    token_ids = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(-1)
    old = troll.capture(logits, token_ids)
    leaf = logits.clone().requires_grad_()

    def update() -> None:
        leaf.grad = None
        new = troll.log_probs_at(leaf, old.token_ids)
        (new.logits.masked_fill(~old.used, 0).sum() + new.tail_logit.sum()).backward()

    return {"capture": lambda: troll.capture(logits, token_ids), "update": update}


def _heads(repeats: int) -> Rows:
    """Seconds = N (αVH + βV + γ) for each pass of the clip and of TROLL."""
    shapes = [*FITTED, *PREDICTED]
    contenders = {
        f"{name}, {_text(shape)}": maker(**shape, device="cpu")[contender]
        for shape in shapes
        for name, (maker, contender) in PASSES.items()
    }
    taken = cpu_time.medians(contenders, repeats)
    rows: Rows = []
    for shape in PREDICTED:
        predicted = {name: _fit(name, taken)(shape) for name in PASSES}
        rows += [
            {
                "what": f"{name}, {_text(shape)}",
                "predicted": seconds,
                "measured": taken[f"{name}, {_text(shape)}"],
            }
            for name, seconds in predicted.items()
        ]
    rows = _show("LM head: from " + "; ".join(map(_text, FITTED)), rows, measure.duration)
    return rows + _head_ratios(rows)


def _head_ratios(rows: Rows) -> Rows:
    ratios: Rows = []
    for clip, ours in zip(rows[::2], rows[1::2], strict=True):
        ratios.append({"what": ours["what"] + ", ratio to the clip's"})
        ratios[-1] |= {key: ours[key] / clip[key] for key in ("predicted", "measured")}
    return _show("TROLL's time over the clip's", ratios, lambda x: f"{x:.2f}")


def _fit(name: str, taken: dict[str, float]) -> Callable[[dict[str, int]], float]:
    costs = torch.linalg.solve(
        torch.tensor([_counts(shape) for shape in FITTED]).double(),
        torch.tensor([taken[f"{name}, {_text(shape)}"] for shape in FITTED]).double(),
    )
    return lambda shape: (torch.tensor(_counts(shape)).double() @ costs).item()


def _counts(shape: dict[str, int]) -> tuple[int, int, int]:
    """What a pass does: products, logits, and tokens, of each of which the K largest are looked for once."""
    logits = shape["tokens"] * shape["vocabulary"]
    return logits * shape["width"], logits, shape["tokens"]


def _text(shape: dict[str, int]) -> str:
    return f"N = {shape['tokens']}, V = {shape['vocabulary']}, H = {shape['width']}"
