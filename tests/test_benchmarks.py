"""What the benchmarks count and report, and the arithmetic of the simulated step, by hand."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import count, counting, gpu, measure, simulate, step_model, tabular
from benchmarks.predict import expected_kept
from benchmarks.step_model import SHAPES, Assumptions, Shape

#: 60 parameters of the body and 80 of the head, at 1,000 FLOP/s, of which half is reached anywhere.
SMALL = Shape(
    name="small",
    layers=1,
    width=2,
    heads=2,
    kv_heads=1,
    head_width=3,
    feed_forward=4,
    experts=1,
    active_experts=1,
    vocabulary=40,
    tensor_parallel=2,
    pipeline_parallel=3,
)
A = Assumptions(
    peak_flops=1000,
    memory_bandwidth=100,
    mfu=0.5,
    head_mfu=0.5,
    generation_mfu=0.1,
    kernel_efficiency=0.5,
    latency=0,
    prompt_tokens=2,
    response_tokens=4,
    sequences_per_gpu=5,
    kept=3,
    record_bytes=40,
    top_k=4,
    storage_units=8,
)


@pytest.mark.parametrize(
    ("shape", "parameters", "active"),
    list(zip(SHAPES, (8.03e9, 70.6e9, 235.1e9), (7.5e9, 69.6e9, 21.6e9), strict=True)),
)
def test_shapes_have_the_published_number_of_parameters(shape: Shape, parameters: float, active: float) -> None:
    # As the model cards say: 8.03, 70.6, and 235 billion, 22 of them active, embeddings included.
    assert shape.parameters == pytest.approx(parameters, rel=2e-3)
    assert shape.body(shape.active_experts) + shape.head == pytest.approx(active, rel=2e-2)


def test_parts_of_a_step() -> None:
    # attention 2·2·3·(2 + 1) = 36, feed-forward 3·2·4 = 24; scores and values of 3 positions on average 4·6·3 = 72.
    assert SMALL.body(1) == 60
    seconds = step_model.clip_seconds(SMALL, A)
    body, head = 1.5 * (2 * 60 + 72), 2 * 80
    assert seconds == pytest.approx(
        {
            "generation": (body + head) / 100,
            "old pass, body": body / 500,
            "old pass, head": head / 500,
            "updates, body": 4 * body / 500,
            "updates, head": 4 * head / 500,
        }
    )
    assert step_model.clip_seconds(SMALL, A, lora=True)["updates, body"] == pytest.approx(3 * body / 500)


def test_bytes_of_a_token() -> None:
    # packed: 3 slots of 8 bytes, 12 for the position, 40 for each sequence of 4 tokens.
    assert step_model.policy_bytes(SMALL, A) == {
        "log-prob alone (clip)": 4,
        "packed": 3 * 8 + 12 + 10,
        "padded, int32 ids": 4 * 8 + 8,
        "padded, int64 ids": 4 * 12 + 12,
        "full logits, bf16": 80,
    }


def test_transfers() -> None:
    # 16 GPUs of 20 tokens of 10 bytes: in once and out once, or thrice, through one link of 100 bytes/s; or over the
    # links of two nodes, in once and out for six readers.
    assert step_model.driver_seconds(10, 16, 100, 1, A) == 64
    assert step_model.driver_seconds(10, 16, 100, 3, A) == 128
    assert step_model.queue_seconds(10, 16, 100, SMALL.readers, A) == 7 * 3200 / 200
    # Of 16 nodes 8 have a storage unit.
    assert step_model.queue_seconds(10, 128, 100, 1, A) == 2 * 25_600 / 800


@pytest.mark.parametrize(("gpus_per_node", "copies"), [(8, 1), (6, 1), (4, 2), (1, 6)])
def test_a_driver_sends_a_token_once_to_each_node_of_its_replica(gpus_per_node: int, copies: int) -> None:
    assert step_model.driver_copies(SMALL, dataclasses.replace(A, gpus_per_node=gpus_per_node)) == copies


def test_one_process_serialises_everything_or_each_its_own() -> None:
    assert step_model.host_seconds(0.1, 16, 6, A) == pytest.approx({"driver": 0.1 * 20 * 16, "rank": 0.1 * 20 * 6})


def test_what_troll_adds_is_its_bytes_over_the_bandwidth() -> None:
    moved = step_model.added_bytes(SMALL, A, fused=False)
    candidates = 2 * 64 * 4 + 40 / 64
    assert moved["capture"] == step_model.CAPTURE_BYTES * 40 + step_model.CANDIDATE_BYTES * candidates
    assert step_model.added_seconds(SMALL, A, fused=False)["capture"] == pytest.approx(moved["capture"] / 50)
    assert step_model.added_bytes(SMALL, A, fused=True)["updates"] < moved["updates"]


def test_exchanges_do_not_grow_with_the_vocabulary() -> None:
    taken = step_model.exchange_seconds(SMALL, A, 2, 100)
    # (3·4 + 2) numbers from the other process; 4 + 2·2 numbers there and back.
    assert taken["capture"] == pytest.approx(14 * 4 / 100)
    assert taken["updates"] == pytest.approx(8 * 4 / 100)
    waiting = step_model.exchange_seconds(SMALL, dataclasses.replace(A, latency=8, micro_batch=4), 2, 100)
    assert waiting["capture"] - taken["capture"] == pytest.approx(2)
    larger = step_model.exchange_seconds(dataclasses.replace(SMALL, vocabulary=4000), A, 2, 100)
    assert larger["capture"] == taken["capture"] and larger["gathered"] == pytest.approx(100 * taken["gathered"])


def test_expected_slots_of_a_known_distribution() -> None:
    # Zipf's law of exponent 1 over 4 tokens: 12/25, 6/25, 4/25, 3/25; a threshold of 0.2 leaves out the last alone.
    assert expected_kept(1.0, 0.0, 4, 4, 0.2) == 3
    assert expected_kept(1.0, 0.0, 4, 2, 0.2) == 2


def test_all_tables_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulate.main("cpu", 1)
    steps = [row for row in rows if row["table"].startswith("steps")]
    assert {row["model"] for row in steps} == {shape.name for shape in SHAPES}
    # A single node has no wire.
    assert [row["packed, driver"] for row in steps if row["GPUs"] in ("1", "8")] == ["0.00%"] * 3
    assert "assumed" in capsys.readouterr().out


HOST = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("call", "launches", "waits", "moved"),
    [
        (lambda: HOST + 1, 1, 0, 96),
        (lambda: HOST.view(4, 3)[1:].t(), 0, 0, 0),
        (
            lambda: HOST.masked_fill(HOST > 1, 0),
            3,
            0,
            48 + 12 + 96 + 12 + 48 + 48,
        ),  # compare; copy; read, mask and write
        (lambda: HOST.bfloat16(), 1, 0, 48 + 24),
        (lambda: HOST.gather(1, torch.zeros(3, 1, dtype=torch.int64, device=HOST.device)), 2, 0, 24 + 24 + 12 + 12),
        (lambda: HOST.sum().item(), 1, 1, 52),
        (lambda: HOST[HOST > 5], 2, 1, None),
        (lambda: HOST.tolist(), 0, 1, 0),
        (lambda: torch.zeros(3).to(HOST.device), 1, 1, 12),  # made on the host
        (lambda: torch.zeros(3, device=HOST.device), 1, 0, 12),
        (lambda: torch.tensor([1.0], device=HOST.device), 0, 1, 0),
    ],
)
def test_counts_of_calls(call: Callable[[], object], launches: int, waits: int, moved: int | None) -> None:
    counted = counting.count(call)
    assert (counted.launches, counted.waits) == (launches, waits), counted
    assert moved is None or counted.moved == moved, counted


def test_tensors_say_that_they_are_on_a_gpu_while_they_are_counted() -> None:
    seen: list[object] = []
    counting.count(lambda: seen.extend((HOST.device.type, (HOST * 2).is_cuda, torch.zeros(1).device.type)))
    assert seen == ["cuda", True, "cpu"] and HOST.device.type == "cpu"


def test_the_longest_row_that_is_sorted() -> None:
    assert counting.count(lambda: (HOST.topk(2), HOST.sort(dim=0))).sorted_row == 4


@functools.cache
def triton_figures(path: str) -> dict[str, dict[str, Any]]:
    return {row["pass"]: row for row in count.rows("triton", (path,), vocabulary=(8192, 12_288))}


interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="kernels are counted in Triton's interpreter",
)


@interpreted
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("logits bf16", count.CAPTURE),
        ("logits bf16", count.FORWARD),
        ("logits bf16", count.BACKWARD),
        ("logits bf16, view", count.CAPTURE),
        ("logits bf16, rows=", count.FORWARD),
        ("logits bf16, rows=", count.BACKWARD),
        ("LM head bf16", count.CAPTURE),
        ("LM head bf16", count.FORWARD),
        ("LM head bf16", count.BACKWARD),
        (count.OUTCOMES, count.STEP),
    ],
)
def test_triton_path_holds_its_bars(path: str, name: str) -> None:
    row = triton_figures(path)[name]
    assert row["bars"] and not row["broken"], {key: row[key] for key in row["bars"]} | row["names"]


@interpreted
def test_triton_path_reads_logits_once() -> None:
    row = triton_figures("logits bf16")[count.FORWARD]
    assert row["bytes a logit"] == pytest.approx(2, abs=0.01) == row["issued a logit"]


def test_a_contender_that_is_not_installed_is_skipped_by_name() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'quack'", name="quack")

    skipped: dict[str, str] = {}
    taken = measure.seconds({"theirs": measure.foreign(missing), "ours": lambda: None}, 1, "cpu", skipped)
    assert list(taken) == ["ours"] and skipped == {"theirs": "quack is not installed"}


def test_gpu_report_names_what_failed_what_is_missing_and_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(device: str, repeats: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
        gpu._call(["sleep", "60"], seconds)
        return []

    def missing(*_: object) -> list[dict[str, Any]]:
        raise gpu.Skipped("trl not installed")

    def broken(*_: object) -> list[dict[str, Any]]:
        gpu._call([sys.executable, "-c", "raise SystemExit(3)"], 60)
        return []

    parts = (
        gpu.Part("projection", 100, gpu.benchmark("projection")),
        gpu.Part("long", 0.1, sleep),
        gpu.Part("missing", 1, missing),
        gpu.Part("broken", 1, broken),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(measure, "small", True)
    assert not gpu.main("cpu", 1, tmp_path, 20)
    (page,), (data,) = tmp_path.glob("*.md"), tmp_path.glob("*.json")
    found = json.loads(data.read_text())["parts"]
    outcomes = [part["outcome"] for part in found]
    assert outcomes == ["done", "did not fit in 0 s", "skipped: trl not installed", "failed: RuntimeError: exit code 3"]
    assert {row["contender"] for row in found[0]["rows"]} >= {"bracket", "newton"}
    assert "| 64 | 9 | newton |" in page.read_text() and "## missing: skipped: trl not installed" in page.read_text()


@pytest.mark.slow
def test_everything_for_a_gpu_runs_small_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--small", "--repeats", "1", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks", "gpu", *options], check=True)
    (data,) = tmp_path.glob("*.json")
    parts = json.loads(data.read_text())["parts"]
    assert [part["part"] for part in parts] == [part.name for part in gpu.PARTS]
    assert all(part["outcome"].startswith(("done", "skipped")) for part in parts)


def test_the_least_number_of_rollouts_is_that_of_the_closed_forms():
    grown = tabular._farthest(0.01)
    assert grown * math.log(grown / 0.01) + (1 - grown) * math.log((1 - grown) / 0.99) == pytest.approx(0.05)
    assert tabular._farthest(0.99) == 1.0
    assert tabular._rollouts(0.01, lambda p: 1.2 * p) == math.ceil(math.log(50) / math.log(1.2))


def test_small_steps_make_all_tabular_methods_equal():
    # A logit that moves by 0.01 an update stays within all bounds.
    counts = {method: tabular._train(method, 0.3, 0.01, seed=0) for method in ("troll", "regression", "clip", "none")}
    assert len(set(counts.values())) == 1
