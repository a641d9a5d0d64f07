"""Tables for docs/scaling.md: what TROLL adds to a step of GRPO on 1 to 1,024 GPUs. Arithmetic; it runs in a second.

The arithmetic and its assumptions are `benchmarks.step_model`'s. ``predict`` holds it to what can be measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import step_model
from benchmarks.step_model import SHAPES, Assumptions, Shape

GPUS = (1, 8, 64, 256, 1024)
#: Bytes/s of links of 25, 100 and 400 Gbit/s.
LINKS = {"25": 3.125e9, "100": 12.5e9, "400": 50e9}
TRAVELLING = ("packed", "padded, int64 ids", "full logits, bf16")
#: Of memory bandwidth, if TROLL's operations are much slower than assumed.
POOR_EFFICIENCY = 0.1
TENSOR_PARALLEL = (2, 4, 8)
#: Rollouts that wait or are being trained on.
IN_FLIGHT = (1, 2, 4, 8)

GIGABYTE = 1e9

Rows = list[dict[str, Any]]


def main(device: str, repeats: int) -> Rows:
    """Prints the tables, whatever the device, and returns their rows."""
    a = Assumptions()
    return [
        *_assumptions(a),
        *_policies(a),
        *_transfers(a),
        *_hosts(a),
        *_compute(a),
        *_exchanges(a),
        *_steps(a),
        *_in_flight(a),
    ]


def _show(title: str, rows: Rows) -> Rows:
    """Prints rows as a table, columns by their keys, and marks them with its title."""
    table = Table(*rows[0], title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=190).print(table)
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
    shapes: Rows = [
        {
            "model": shape.name,
            "parameters, 1e9": shape.parameters / 1e9,
            "active in layers, 1e9": shape.body(shape.active_experts) / 1e9,
            "LM head, 1e9": shape.head / 1e9,
            "vocabulary": str(shape.vocabulary),
            "tensor x pipeline": f"{shape.tensor_parallel} x {shape.pipeline_parallel}",
        }
        for shape in SHAPES
    ]
    return _show("assumptions", names) + _show("models", shapes)


def _policies(a: Assumptions) -> Rows:
    rows: Rows = []
    for form, size in step_model.policy_bytes(SHAPES[0], a).items():
        row = {"form": form, "bytes a token": size}
        row |= {f"GB, {gpus} GPUs": size * a.tokens_per_gpu * gpus / GIGABYTE for gpus in GPUS}
        rows.append(row)
    return _show(f"old policies of a step, {a.tokens_per_gpu:,.0f} tokens a GPU, V = {SHAPES[0].vocabulary}", rows)


def _transfers(a: Assumptions) -> Rows:
    rows: Rows = []
    sizes = step_model.policy_bytes(SHAPES[0], a)
    for gpus in GPUS[2:]:
        for form in TRAVELLING:
            row: dict[str, Any] = {"GPUs": str(gpus), "form": form}
            for name, link in LINKS.items():
                row[f"driver, {name}G"] = step_model.driver_seconds(sizes[form], gpus, link, 1, a)
            for name, link in LINKS.items():
                row[f"queue, {name}G"] = step_model.queue_seconds(sizes[form], gpus, link, 1, a)
            rows.append(row)
    title = "seconds of a step on the wire, one copy in and one out: through one driver, and through storage units"
    return _show(title, rows)


def _hosts(a: Assumptions) -> Rows:
    rows: Rows = []
    for form, a_token in (("packed", a.store_seconds_packed), ("padded, int64 ids", a.store_seconds_padded)):
        row: dict[str, Any] = {"form": form}
        row |= {f"driver, {gpus} GPUs": step_model.host_seconds(a_token, gpus, 1, a)["driver"] for gpus in GPUS}
        row |= {
            f"a rank of {shape.readers}": step_model.host_seconds(a_token, 1, shape.readers, a)["rank"]
            for shape in SHAPES
        }
        rows.append(row)
    return _show("CPU seconds of a core of this machine, to put and to get a step's old policies", rows)


def _compute(a: Assumptions) -> Rows:
    rows: Rows = []
    poor = dataclasses.replace(a, kernel_efficiency=POOR_EFFICIENCY)
    for shape in SHAPES:
        clip = step_model.clip_seconds(shape, a)
        heads = sum(seconds for part, seconds in clip.items() if part.endswith("head"))
        training = sum(seconds for part, seconds in clip.items() if part != "generation")
        for fused in (True, False):
            for assumed in (a, poor):
                added = step_model.added_seconds(shape, assumed, fused=fused)
                total = sum(added.values())
                rows.append(
                    {
                        "model": shape.name,
                        "path": "fused head" if fused else "logits, eager",
                        "bandwidth": f"{assumed.kernel_efficiency:.0%}",
                        "capture, µs": added["capture"] * 1e6,
                        "updates, µs": added["updates"] * 1e6,
                        "both heads, µs": heads * 1e6,
                        "of the heads": f"{total / heads:.1%}",
                        "of training": f"{total / training:.2%}",
                        "of the step": f"{total / sum(clip.values()):.2%}",
                    }
                )
    return _show("GPU-time a response token: what TROLL adds, by roofline, beside the clip's", rows)


def _exchanges(a: Assumptions) -> Rows:
    rows: Rows = []
    for shape in SHAPES:
        a_token = sum(step_model.clip_seconds(shape, a).values())
        for processes in TENSOR_PARALLEL:
            row: dict[str, Any] = {
                "model": shape.name,
                "processes": str(processes),
                "capture, bytes": step_model.WORD * step_model.capture_words(int(a.top_k), processes),
                "update, bytes": step_model.WORD * step_model.update_words(int(a.top_k), processes),
            }
            for name, link in (("NVLink", a.nvlink), ("400G", LINKS["400"])):
                taken = step_model.exchange_seconds(shape, a, processes, link)
                exchanged = taken["capture"] + taken["updates"]
                row[f"{name}, µs"] = exchanged * 1e6
                row[f"{name}, of the step"] = f"{exchanged * processes * shape.pipeline_parallel / a_token:.2%}"
                row[f"{name}, logits gathered, µs"] = taken["gathered"] * 1e6
            rows.append(row)
    return _show("a vocabulary spread over processes: what a token exchanges", rows)


def _steps(a: Assumptions) -> Rows:
    rows: Rows = []
    for shape in SHAPES:
        for gpus in GPUS:
            if step_model.fits(shape, gpus, a, lora=True):
                rows.append(_step(shape, gpus, a))
    return _show("steps where the model fits: TROLL's compute, and old policies on the wire, of a step's time", rows)


def _step(shape: Shape, gpus: int, a: Assumptions) -> dict[str, Any]:
    lora = not step_model.fits(shape, gpus, a, lora=False)
    a_token = sum(step_model.clip_seconds(shape, a, lora=lora).values())
    row: dict[str, Any] = {
        "model": shape.name,
        "GPUs": str(gpus),
        "trains": "LoRA" if lora else "all",
        "step, s": a_token * a.tokens_per_gpu,
    }
    for path, fused in (("fused", True), ("logits", False)):
        row[path] = f"{sum(step_model.added_seconds(shape, a, fused=fused).values()) / a_token:.2%}"
    for form in ("packed", "padded"):
        size = step_model.policy_bytes(shape, a)["packed" if form == "packed" else "padded, int64 ids"]
        routes = _routes(size, gpus, shape, a)
        row |= {f"{form}, {route}": f"{seconds / row['step, s']:.2%}" for route, seconds in routes.items()}
    return row


def _routes(size: float, gpus: int, shape: Shape, a: Assumptions) -> dict[str, float]:
    """Seconds on the wire, which a single node does not have: a driver sends to each node, the queue to each reader."""
    if gpus <= a.gpus_per_node:
        return dict.fromkeys(("driver", f"{a.storage_units:g} units", "unit a node"), 0.0)
    everywhere = dataclasses.replace(a, storage_units=gpus / a.gpus_per_node)
    return {
        "driver": step_model.driver_seconds(size, gpus, a.node_link, step_model.driver_copies(shape, a), a),
        f"{a.storage_units:g} units": step_model.queue_seconds(size, gpus, a.node_link, shape.readers, a),
        "unit a node": step_model.queue_seconds(size, gpus, a.node_link, shape.readers, everywhere),
    }


def _in_flight(a: Assumptions) -> Rows:
    sizes = step_model.policy_bytes(SHAPES[0], a)
    rows: Rows = [
        {
            "rollouts in flight": str(rollouts),
            **{
                f"{form}, GB a node": rollouts * size * a.tokens_per_gpu * a.gpus_per_node / GIGABYTE
                for form, size in sizes.items()
                if form in ("packed", "padded, int32 ids", "padded, int64 ids")
            },
        }
        for rollouts in IN_FLIGHT
    ]
    return _show("host memory for old policies of rollouts in flight", rows)
