"""Old policies through a real Ray object store: bytes a token, and CPU seconds to put and to get a rollout, by form.

Needs ray: run it in an environment with verl. A shared-memory store on one machine: no network, and no contention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_time, measure, packed
from troll import PackedPolicy, SparsePolicy
from troll.trust_region.policy.wire import from_records, to_records

CPUS, STORE = 2, 2 << 30


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints the table, on the CPU whatever the device, and returns its rows.

    Raises:
        SystemExit: If ray is missing.
    """
    try:
        import ray
    except ImportError as error:
        raise SystemExit("ray is not installed: run this benchmark in an environment with verl") from error

    padded = packed.rollout("cpu")
    forms = _forms(padded)
    ray.init(num_cpus=CPUS, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    try:
        rows = [_measure(form, made, padded, repeats, ray) for form, made in forms.items()]
    finally:
        ray.shutdown()
    table = Table("form", "bytes a token", "of records", "put", "get", "get and unpack", "both, a token")
    smallest = rows[-1]["bytes_per_token"]
    for row in rows:
        table.add_row(
            row["form"],
            f"{row['bytes_per_token']:.1f}",
            f"{row['bytes_per_token'] / smallest:.2f} ×",
            *(measure.duration(row[name]) for name in ("put", "get", "read")),
            f"{row['store_per_token'] * 1e6:.2f} µs",
        )
    Console(width=110).print(f"{packed.SEQUENCES} sequences of {packed.LENGTH} tokens, V = {packed.VOCABULARY}", table)
    return rows


def _forms(padded: SparsePolicy) -> dict[str, tuple[object, Callable[[Any], SparsePolicy]]]:
    """What is put, and how the padded policy is made of what is got."""
    whole = PackedPolicy.of(padded)
    return {
        "padded, int64 ids": (padded, lambda got: got),
        "padded, int32 ids": (
            (padded.token_ids.int(), padded.log_probs, padded.tail_log_prob, padded.slot.int()),
            lambda got: SparsePolicy(
                got[0].long(), got[1], got[2], got[3].long(), padded.vocab_size, padded.mass_threshold
            ),
        ),
        "packed, one object": (whole, lambda got: got.unpack()),
        "packed, one a sequence": (whole.unbind(), lambda got: type(whole).stack(got).unpack()),
        "records, one a sequence": (to_records(whole), lambda got: from_records(got).unpack()),
    }


def _measure(
    form: str, made: tuple[object, Callable[[Any], SparsePolicy]], padded: SparsePolicy, repeats: int, ray: Any
) -> dict[str, Any]:
    sent, read = made
    reference = ray.put(sent)
    assert read(ray.get(reference)).token_ids.flatten().equal(padded.token_ids.flatten())
    # The store's own count of an object's bytes is Ray's serialisation, buffers included.
    size = ray._private.worker.global_worker.get_serialization_context().serialize(sent).total_bytes
    operations: measure.Contenders = {
        "put": functools.partial(ray.put, sent),
        "get": functools.partial(ray.get, reference),
        "read": lambda: read(ray.get(reference)),
    }
    tokens = padded.shape.numel()
    row = {"form": form, "bytes": size, "bytes_per_token": size / tokens, **cpu_time.medians(operations, repeats)}
    return row | {"store_per_token": (row["put"] + row["get"]) / tokens}
