"""Old policies through verl's transfer queue: the CPU seconds of a record for its storage unit and for a reader.

It needs verl's environment. There is one storage unit, on the loopback of one machine: no network card, and no
contention. A record is one int32 tensor for each sequence. Each cost is fitted as `seconds = a record + bytes · a byte`
over `SIZES`.
"""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

#: The bytes of a record: 4096 response tokens with 6 and with 64 slots each, and a shorter one.
SIZES = (16 << 10, 240 << 10, 2 << 20)
RECORDS = 32
#: Calls of a round last about as long: the system counts CPU time in hundredths of a second.
BYTES_A_ROUND, MOST_CALLS = 1 << 29, 60
OPERATIONS = ("put", "get")
PROCESSES = ("storage unit", "client")
PARTITION, FIELD = "benchmark", "old_policies"


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints the tables, always on the CPU, and returns a row for each operation and process.

    Raises:
        SystemExit: If the transfer queue is missing.
    """
    try:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf
    except ImportError as error:
        raise SystemExit(f"{error.name} is not installed: run this benchmark in an environment with verl") from error

    torch.set_num_threads(1)
    logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)  # warns of few cores at every call
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=1 << 28, log_to_driver=False)
    try:
        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        taken = {size: _of_size(size, repeats, transfer_queue) for size in SIZES}
        transfer_queue.close()
    finally:
        ray.shutdown()
    rows: list[dict[str, Any]] = []
    for operation in OPERATIONS:
        for process in PROCESSES:
            seconds = {size: taken[size][operation, process] for size in SIZES}
            a_record, a_byte = line(seconds)
            rows.append(
                {"operation": operation, "process": process, "seconds": seconds, "a_record": a_record, "a_byte": a_byte}
            )
    table = Table("", *(f"{size >> 10} kB" for size in SIZES), "a record", "a byte", title="CPU time of a record")
    for row in rows:
        cells = (f"{seconds * 1e6:.0f} µs" for seconds in (*row["seconds"].values(), row["a_record"]))
        table.add_row(f"{row['operation']}, {row['process']}", *cells, f"{row['a_byte'] * 1e9:.2f} ns")
    Console(width=110).print(table)
    return rows


def line(seconds: dict[int, float]) -> tuple[float, float]:
    """Seconds of a record and of a byte, by least squares of the relative errors: sizes differ by a factor of 100."""
    times = np.array(list(seconds.values()))
    a_byte, a_record = np.polyfit(list(seconds), times, 1, w=1 / times)
    return float(a_record), float(a_byte)


def _of_size(size: int, repeats: int, transfer_queue: Any) -> dict[tuple[str, str], float]:
    """CPU seconds a record, by operation and process: medians."""
    import psutil
    from tensordict import TensorDict

    keys = [f"{size}_{number}" for number in range(RECORDS)]
    records = [torch.randint(1 << 30, (size // 4,), dtype=torch.int32) for _ in keys]
    fields = TensorDict({FIELD: torch.nested.as_nested_tensor(records, layout=torch.jagged)}, batch_size=RECORDS)
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields),
        "get": lambda: transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=[FIELD]),
    }
    transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=[{}] * RECORDS)
    assert torch.equal(calls["get"]()[FIELD].values(), fields[FIELD].values())
    this = psutil.Process()
    # A Ray worker is called after the actor that it runs, and is a descendant of the process that started Ray.
    (unit,) = (each for each in this.children(recursive=True) if "SimpleStorageUnit" in each.cmdline()[0])
    number = min(MOST_CALLS, max(4, BYTES_A_ROUND // (RECORDS * size)))
    taken: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 1):
        for operation, call in calls.items():
            gc.collect()
            before = [sum(each.cpu_times()[:2]) for each in (unit, this)]
            for _ in range(number):
                call()
            after = [sum(each.cpu_times()[:2]) for each in (unit, this)]
            for process, start, end in zip(PROCESSES, before, after, strict=True):
                if repeat:
                    taken.setdefault((operation, process), []).append((end - start) / (number * RECORDS))
    transfer_queue.kv_clear(keys=keys, partition_id=PARTITION)
    return {key: statistics.median(times) for key, times in taken.items()}
