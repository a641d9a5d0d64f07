"""Tables for docs/study/scaling.md: what TROLL adds to a step of GRPO in verl, by model and by route.

It is only arithmetic, with the assumptions of `benchmarks.step_model`, and takes a second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from benchmarks import measure, step_model
from benchmarks.step_model import (
    FUSED,
    MOVED,
    SHAPES,
    TORCH,
    TRITON,
    VERL_LOGITS,
    VERL_MOVED,
    Assumptions,
    Route,
    Shape,
)

GPUS = (8, 64, 256, 1024)
#: The models and numbers of GPUs in the queue's tables: few readers, and many.
QUEUED = ((SHAPES[3], 1024), (SHAPES[-1], 64), (SHAPES[-1], 1024))
#: Slots of a token: few, some, and the most of K = 64.
KEPT = (6, 16, 64)
#: The share of memory bandwidth if the operations on logits are much slower than assumed.
POOR_EFFICIENCY = 0.1
#: The number of storage units: verl's default, and the number for each node that verl recommends.
UNITS, UNITS_A_NODE = 8, 2

Rows = list[dict[str, Any]]


def main(device: str, repeats: int) -> Rows:
    """Prints the tables, which do not depend on the device, and returns their rows."""
    a = Assumptions()
    return [*_assumptions(a), *_shares(a), *_replaced(a), *_policies(a), *_queue(a), *_slots(a)]


def _show(title: str, rows: Rows) -> Rows:
    """Prints rows as a table, columns by their keys, and marks them with its title."""
    table = measure.numbers(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=170).print(table)
    return [{"table": title, **row} for row in rows]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _assumptions(a: Assumptions) -> Rows:
    names: Rows = [
        {"assumption": field.name, "value": f"{getattr(a, field.name):g}", "source": field.metadata["source"]}
        for field in dataclasses.fields(a)
    ]
    moved: Rows = [
        {"bytes moved": name, **{key: f"{value:g}" for key, value in dataclasses.asdict(each).items()}}
        for name, each in (MOVED | VERL_MOVED).items()
    ]
    shapes: Rows = [
        {
            "model": shape.name,
            "parameters, 1e9": shape.parameters / 1e9,
            "layers": shape.layers,
            "width": shape.width,
            "heads": f"{shape.heads}/{shape.kv_heads} x {shape.head_width}",
            "feed-forward": f"{shape.feed_forward} x {shape.active_experts}",
            "vocabulary": str(shape.vocabulary),
            "of the FLOPs, the head": f"{shape.head / (shape.body(shape.active_experts) + shape.head):.0%}",
            "tensor x pipeline": f"{shape.tensor_parallel} x {shape.pipeline_parallel}",
            "step, s": step_model.step_seconds(shape, a),
        }
        for shape in SHAPES
    ]
    return _show("assumptions", names) + _show("bytes a logit and a token", moved) + _show("models", shapes)


def _added(shape: Shape, way: str, a: Assumptions) -> float:
    """GPU-seconds of a token beyond those of a step that only computes logits."""
    return step_model.moved_seconds(shape, MOVED[way], a) + step_model.exchange_seconds(shape, a)


def _shares(a: Assumptions) -> Rows:
    """The shares of everything that TROLL moves, without subtracting what verl's log-probabilities would have moved."""
    poor = dataclasses.replace(a, kernel_efficiency=POOR_EFFICIENCY)
    rows: Rows = []
    for shape in SHAPES:
        row: dict[str, Any] = {"model": shape.name}
        for way in MOVED:
            step = sum(step_model.clip_seconds(shape, a, fused=way == FUSED).values())
            row[way] = f"{_added(shape, way, a) / step:.2%}"
            row[f"{way}, at {POOR_EFFICIENCY:.0%}"] = f"{_added(shape, way, poor) / step:.1%}"
        rows.append(row)
    return _show("what TROLL moves and exchanges for a response token, by roofline: share of the step", rows)


def _replaced(a: Assumptions) -> Rows:
    """Ratios of whole steps; a fused head in place of one that keeps its logits computes one more product."""
    rows: Rows = []
    for shape in SHAPES:
        row: dict[str, Any] = {"model": shape.name}
        for way, verl in ((TORCH, VERL_LOGITS), (TRITON, VERL_LOGITS), *((FUSED, name) for name in VERL_MOVED)):
            theirs = step_model.moved_seconds(shape, VERL_MOVED[verl], a)
            step = theirs + sum(step_model.clip_seconds(shape, a, fused=verl != VERL_LOGITS).values())
            ours = _added(shape, way, a) + sum(step_model.clip_seconds(shape, a, fused=way == FUSED).values())
            row[f"{way} / {verl}"] = f"{ours / step - 1:+.2%}"
        rows.append(row)
    return _show("the step against verl's own: TROLL's way / verl's way", rows)


def _policies(a: Assumptions) -> Rows:
    rows: Rows = []
    for kept in KEPT:
        size = step_model.policy_bytes(dataclasses.replace(a, kept=kept))
        row: dict[str, Any] = {"slots": str(kept), "bytes a token": size}
        row |= {f"GB, {gpus} GPUs": size * a.tokens_per_gpu * gpus / 1e9 for gpus in GPUS}
        rows.append(row)
    return _show(f"old policies of a step, {a.tokens_per_gpu:,.0f} tokens a GPU", rows)


def routes(shape: Shape, gpus: int, a: Assumptions) -> dict[str, Route]:
    """Routes from verl's default to nothing on the wire; the first has a reference pass and two of a critic."""
    units = max(UNITS, round(UNITS_A_NODE * gpus / a.gpus_per_node))
    return {
        "all passes read": Route(shape.readers, UNITS, passes=4),
        "only updates": Route(shape.readers, UNITS),
        f"and {UNITS_A_NODE} units a node": Route(shape.readers, units),
        "and the last stage": Route(shape.tensor_parallel, units),
        "and one rank of it": Route(1, units),
        "anchor=old: kept where captured": Route(0, units),
    }


def _queue(a: Assumptions) -> Rows:
    rows: Rows = []
    for shape, gpus in QUEUED:
        seen: set[Route] = set()
        for name, route in routes(shape, gpus, a).items():
            if route in seen:
                continue
            seen.add(route)
            taken = step_model.queue_seconds(route, shape, gpus, a)
            rows.append(
                {
                    "model": shape.name,
                    "GPUs": str(gpus),
                    "old policies": name,
                    "units": str(route.units),
                    "readers": str(route.readers),
                    **{f"{part}, s": seconds for part, seconds in taken.items()},
                    "of the step": f"{sum(taken.values()) / step_model.step_seconds(shape, a):.1%}",
                }
            )
    return _show(
        f"verl's transfer queue, {a.kept:g} slots a token: CPU of a unit, its node's link, a reader's CPU", rows
    )


def _slots(a: Assumptions) -> Rows:
    rows: Rows = []
    for shape, gpus in QUEUED:
        for kept in KEPT:
            assumed = dataclasses.replace(a, kept=kept)
            row: dict[str, Any] = {"model": shape.name, "GPUs": str(gpus), "slots": str(kept)}
            for name, route in routes(shape, gpus, assumed).items():
                taken = sum(step_model.queue_seconds(route, shape, gpus, assumed).values())
                row[name] = f"{taken / step_model.step_seconds(shape, assumed):.1%}"
            rows.append(row)
    return _show("share of the step by slots a token", rows)
