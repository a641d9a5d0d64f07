"""What the benchmarks count and report, and the arithmetic of the simulated step, by hand."""

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import troll
from benchmarks import (
    count,
    counting,
    coverage,
    measure,
    simulate,
    step,
    step_model,
    tabular,
    transfer,
    truncation,
)
from benchmarks.step_model import FUSED, MOVED, SHAPES, TORCH, TRITON, Assumptions, Moved, Route, Shape
from tests.examples.smollm2 import load_example, write_gguf
from troll.trust_region.reading import head as head_module

#: 60 parameters of the body and 80 of the head, at 1,000 FLOP/s, of which half is reached anywhere.
BODY: dict[str, Any] = {"layers": 1, "width": 2, "heads": 2, "kv_heads": 1, "head_width": 3, "feed_forward": 4}
EXPERTS: dict[str, Any] = {"experts": 1, "active_experts": 1, "vocabulary": 40, "tied": False}
SMALL = Shape(name="small", **BODY, **EXPERTS, tensor_parallel=2, pipeline_parallel=3)
HARDWARE: dict[str, Any] = {"peak_flops": 1000, "memory_bandwidth": 100, "mfu": 0.5, "head_mfu": 0.5}
HARDWARE |= {"generation_mfu": 0.1, "kernel_efficiency": 0.5, "latency": 0, "node_link": 100}
ROLLOUT: dict[str, Any] = {"prompt_tokens": 2, "response_tokens": 4, "sequences_per_gpu": 5, "kept": 3, "top_k": 4}
QUEUE: dict[str, Any] = {"record_bytes": 40, "put_record": 1, "put_byte": 0.1, "get_record": 2, "get_byte": 0.2}
A = Assumptions(**HARDWARE, **ROLLOUT, **QUEUE, read_record=3, read_byte=0.3)


#: Billions of parameters, and of active ones, as the model cards say.
PUBLISHED = (0.6, 0.6), (1.72, 1.7), (4.02, 4.0), (8.19, 7.6), (32.8, 32), (30.5, 3.0), (35, 3), (235.1, 21.6)


@pytest.mark.parametrize(("shape", "published"), list(zip(SHAPES, PUBLISHED, strict=True)))
def test_shapes_have_the_published_parameters(shape: Shape, published: tuple[float, float]) -> None:
    # Linear attention has more parameters than the full attention that it is counted as.
    parameters, active = (1e9 * count for count in published)
    near = 0.04 if shape.name.startswith("Qwen3.5") else 0.01
    assert shape.parameters == pytest.approx(parameters, rel=near)
    assert shape.body(shape.active_experts) + shape.head == pytest.approx(
        active, rel=0.2 if shape.experts > 1 else 0.03
    )


def test_step_model_adds_up_the_parts_of_a_step() -> None:
    # attention 2·2·3·(2 + 1) = 36, feed-forward 3·2·4 = 24; scores and values of 3 positions on average 4·6·3 = 72.
    assert SMALL.body(1) == 60
    body, head = 1.5 * (2 * 60 + 72), 2 * 80
    assert step_model.clip_seconds(SMALL, A, fused=True) == pytest.approx(
        {"generation": (body + head) / 100, "old pass": (body + head) / 500, "updates": 4 * (body + head) / 500}
    )
    # With its logits kept, the backward has two products of the head.
    assert step_model.clip_seconds(SMALL, A, fused=False)["updates"] == pytest.approx((4 * body + 3 * head) / 500)
    # 3 slots of 8 bytes, 12 for the position, 40 for each sequence of 4 tokens.
    assert step_model.policy_bytes(A) == 3 * 8 + 12 + 10
    # 40 logits of 3 + 4 bytes, and 5 + 6 for each of two slices of the vocabulary.
    assert step_model.moved_seconds(SMALL, Moved(3, 4, 5, 6), A) == pytest.approx((40 * 7 + 2 * 11) / 50)


def test_exchanges_do_not_grow_with_the_vocabulary() -> None:
    at_100 = dataclasses.replace(A, nvlink=100)
    # A half of (3·4 + 2)·2 numbers, and of twice 4 + 2·2, for each of two processes.
    taken = step_model.exchange_seconds(SMALL, at_100)
    assert taken == pytest.approx(2 * 4 * (28 + 16) / 2 / 100)
    waiting = step_model.exchange_seconds(SMALL, dataclasses.replace(at_100, latency=8, micro_batch=4))
    assert waiting - taken == pytest.approx(2 * 2 * 2)
    assert step_model.exchange_seconds(dataclasses.replace(SMALL, vocabulary=4000), at_100) == taken
    assert step_model.exchange_seconds(dataclasses.replace(SMALL, tensor_parallel=1), at_100) == 0


def test_queue_gives_each_record_to_every_reader() -> None:
    # 16 GPUs of 5 sequences, whose records have 4 · 46 bytes; 6 readers, twice; 10 units on the two nodes.
    record, gets = 4 * 46, 12
    taken = step_model.queue_seconds(Route(readers=6, units=10, passes=2), SMALL, 16, A)
    assert taken == pytest.approx(
        {
            "unit": 80 * (1 + 0.1 * record + gets * (2 + 0.2 * record)) / 10,
            "link": 80 * record * (1 + gets) / (2 * 100),
            # A rank reads what all 6 of its replica are trained on.
            "reader": 2 * 5 * 6 * (3 + 0.3 * record),
        }
    )
    # Of one unit only one link is used.
    one = step_model.queue_seconds(Route(readers=6, units=1, passes=2), SMALL, 16, A)
    assert one["unit"] == pytest.approx(10 * taken["unit"]) and one["link"] == pytest.approx(2 * taken["link"])
    assert set(step_model.queue_seconds(Route(readers=0, units=8), SMALL, 16, A).values()) == {0.0}


def test_simulate_makes_all_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulate.main("cpu", 1)
    shares = [row for row in rows if row["table"].startswith("what TROLL moves")]
    assert [row["model"] for row in shares] == [shape.name for shape in SHAPES]
    for row in shares:
        share = [float(row[way].rstrip("%")) for way in (TORCH, FUSED, TRITON)]
        assert share == sorted(share, reverse=True)
    assert "assumed" in capsys.readouterr().out
    for shape, gpus in simulate.QUEUED:  # every remedy is at least as fast as the one before
        routes = simulate.routes(shape, gpus, Assumptions()).values()
        taken = [sum(step_model.queue_seconds(route, shape, gpus, Assumptions()).values()) for route in routes]
        assert taken == sorted(taken, reverse=True) and taken[-1] == 0 < taken[-2]


def test_line_separates_the_cost_of_a_record_and_a_byte() -> None:
    seconds = {size: 3e-5 + 2e-10 * size for size in transfer.SIZES}
    assert transfer.line(seconds) == pytest.approx((3e-5, 2e-10))


#: Narrower than count's own, for the interpreter takes as long as the vocabulary is wide.
NARROW = (8192, 12_288)


def check_moved(way: str, path: str, widths: tuple[int, int] = count.VOCABULARY) -> None:
    """That what is counted is what `step_model` says is moved, near enough: what supports share counts once."""
    torch.manual_seed(0)
    few, many, narrow, wide = *count.TOKENS, *widths
    counted = {
        (tokens, vocabulary): {
            name: counting.count(call).moved for name, call in count.of_source(path)(tokens, vocabulary).items()
        }
        for tokens in (few, many)
        for vocabulary in (narrow, wide)
    }
    found: dict[str, tuple[float, float]] = {}
    for name in counted[few, narrow]:
        a_token = {v: (counted[many, v][name] - counted[few, v][name]) / (many - few) for v in (narrow, wide)}
        a_logit = (a_token[wide] - a_token[narrow]) / (wide - narrow)
        found[name] = a_logit, a_token[wide] - a_logit * wide
    capture = found[count.CAPTURE]
    update = [sum(x) for x in zip(found[count.FORWARD], found[count.BACKWARD], strict=True)]
    said = MOVED[way]
    assert (said.capture, said.update) == pytest.approx((capture[0], update[0]), abs=0.1)
    assert (said.capture_token, said.update_token) == pytest.approx((capture[1], update[1]), rel=0.1)


def test_torch_path_moves_what_the_step_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROLL_KERNELS", "torch")
    check_moved(TORCH, "logits bf16, rows=")


HOST = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("call", "launches", "waits", "moved"),
    [
        (lambda: HOST + 1, 1, 0, 96),
        (lambda: HOST.view(4, 3)[1:].t(), 0, 0, 0),
        # Compare; copy; read, mask and write.
        (lambda: HOST.masked_fill(HOST > 1, 0), 3, 0, 48 + 12 + 96 + 12 + 48 + 48),
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


def test_count_shows_tensors_on_a_gpu_and_the_longest_sort() -> None:
    seen: list[object] = []
    counting.count(lambda: seen.extend((HOST.device.type, (HOST * 2).is_cuda, torch.zeros(1).device.type)))
    assert seen == ["cuda", True, "cpu"] and HOST.device.type == "cpu"
    assert counting.count(lambda: (HOST.topk(2), HOST.sort(dim=0))).sorted_row == 4


@functools.cache
def triton_figures(path: str) -> dict[str, dict[str, Any]]:
    few = (256, 512)  # a step after the reading does not depend on the vocabulary
    return {
        row["pass"]: row for row in count.rows("triton", (path,), vocabulary=few if path == count.OUTCOMES else NARROW)
    }


interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="kernels are counted in Triton's interpreter",
)


@interpreted
@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("logits bf16", name) for name in (count.CAPTURE, count.FORWARD, count.BACKWARD)),
        (count.OUTCOMES, count.STEP),
        *(
            pytest.param(path, name, marks=pytest.mark.slow)
            for path, passes in {
                "logits bf16, view": (count.CAPTURE,),
                "logits bf16, rows=": (count.FORWARD, count.BACKWARD),
                "LM head bf16": (count.CAPTURE, count.FORWARD, count.BACKWARD),
            }.items()
            for name in passes
        ),
    ],
)
def test_triton_path_holds_its_bars(path: str, name: str) -> None:
    row = triton_figures(path)[name]
    assert row["bars"] and not row["broken"], {key: row[key] for key in row["bars"]} | row["names"]
    if (path, name) == ("logits bf16", count.FORWARD):  # it reads logits once
        assert row["bytes a logit"] == pytest.approx(2, abs=0.01) == row["issued a logit"]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("way", "path"), [(TRITON, "logits bf16, rows="), (FUSED, "LM head bf16")])
def test_triton_path_moves_what_the_step_model_says(way: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROLL_KERNELS", "triton")
    monkeypatch.setattr(head_module, "KEPT", 0)  # of so few tokens, all tiles could stay
    check_moved(way, path, NARROW)


def test_seconds_skips_a_contender_that_is_not_installed() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'quack'", name="quack")

    skipped: dict[str, str] = {}
    taken = measure.seconds({"theirs": measure.foreign(missing), "ours": lambda: None}, 1, "cpu", skipped)
    assert list(taken) == ["ours"] and skipped == {"theirs": "quack is not installed"}


def test_tabular_rollouts_are_those_of_the_closed_forms():
    grown = tabular._farthest(0.01)
    assert grown * math.log(grown / 0.01) + (1 - grown) * math.log((1 - grown) / 0.99) == pytest.approx(0.05)
    assert tabular._farthest(0.99) == 1.0
    assert tabular._rollouts(0.01, lambda p: 1.2 * p) == math.ceil(math.log(50) / math.log(1.2))


def test_tabular_methods_are_equal_for_small_steps():
    # A logit that moves by 0.01 an update stays within all bounds.
    counts = {method: tabular._train(method, 0.3, 0.01, seed=0) for method in ("troll", "regression", "clip", "none")}
    assert len(set(counts.values())) == 1


def two_policies(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a new and an old policy, and sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    old = 2 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    new = old + 0.3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return new, old, torch.randint(vocabulary, (rows,), generator=generator)


def test_coverage_compares_with_the_whole_vocabulary() -> None:
    new, old, ids = two_policies(6, 1200)
    rows, _ = coverage.compare(new, old, ids)
    assert [(row["top_k"], row["mass_threshold"]) for row in rows] == coverage.SUPPORTS
    whole = torch.softmax(new, -1) * (torch.log_softmax(new, -1) - torch.log_softmax(old, -1))
    for row in rows:
        policy = troll.capture(old, ids, top_k=row["top_k"], mass_threshold=row["mass_threshold"])
        step = troll.trust_region_step(new, policy, kl_bound=0.05)
        assert torch.allclose(row["kl"], whole.sum(-1), rtol=1e-9)
        # The chain rule, by the term itself.
        assert torch.allclose(row["gap"], troll.diagnostics.tail_gap(new, old, policy).gap, rtol=1e-6, atol=1e-12)
        assert torch.equal(row["disagree_0.05"], (row["kl"] > 0.05) != (step.kl_before > 0.05))
    # More tokens see more.
    gaps = [row["gap"].mean() for row in rows if row["mass_threshold"] == 1e-5]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > gaps[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny chat model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_gguf(folder / "model.gguf")
    load_example("smollm2").convert(folder / "model.gguf", folder / "model")
    return str(folder / "model")


@pytest.mark.slow
def test_coverage_of_a_checkpoint(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "ROLLOUT", {"sums": (8, 3), "GSM8K": (8, 3), "open text": (8, 3)})
    monkeypatch.setattr(coverage, "TEMPERATURES", (0.7,))
    monkeypatch.setattr(coverage, "GSM8K", Path("missing.jsonl"))
    rows = coverage.main("cpu", 1, [checkpoint])
    assert {row["text"] for row in rows if "text" in row} == {"sums", "open text"}  # questions of GSM8K are missing
    assert {row["what"] for row in rows if "what" in row} == {"capture", "step, forward and backward", "bytes a token"}
    compared = [row for row in rows if "kl" in row]
    assert len(compared) == 2 * len(coverage.SUPPORTS)
    assert all(row["kl"] > 0 and row["gap"] > -1e-12 and 0 < row["support"] <= row["top_k"] for row in compared)


def test_step_takes_a_checkpoint_and_what_it_samples(checkpoint: str) -> None:
    tokens = step.sampled("cpu", 2, 3, model=checkpoint, text="open text")
    assert len(tokens["prompt_ids"]) == len(tokens["completion_ids"]) == 8
    assert all(1 <= len(ids) <= 3 for ids in tokens["completion_ids"])
    _, tokenizer = step.loaded("cpu", model=checkpoint)
    asked: Any = tokenizer.apply_chat_template(
        coverage.conversations("open text", 8), add_generation_prompt=True, return_dict=True
    )
    assert tokens["prompt_ids"] == asked["input_ids"]


@pytest.mark.slow
def test_truncation_makes_the_ratio_to_the_sampler_one(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "ROLLOUT", {"open text": (8, 6)})
    rows = truncation.main("cpu", 1, [checkpoint])
    assert [row["sampler"] for row in rows] == list(truncation.SAMPLERS)
    for row in rows:
        assert row["kept_ratio"] == pytest.approx(1, abs=1e-3) and row["kept_far"] == 0
        assert row["whole_ratio"] <= 1 + 1e-3 and 1 <= row["kept"] <= row["most"]
    assert min(row["whole_ratio"] for row in rows) < 0.99
