"""A vocabulary spread over 2 and 4 processes, against the same functions on the whole of it."""

import functools
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.troll.trust_region.reading.sources import plainly
from tests.troll.trust_region.reading.vocabulary_worker import CASES, HIDDEN, TRITON_CASES, Case, Result, main, run

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
ALL_CASES = CASES + (TRITON_CASES if INTERPRETED else [])

#: What other orders of summation, and matrix products of another width, leave of an output, absolute and relative. A
#: gradient in bfloat16 may be rounded the other way.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-7}

#: In float32 the entropy's gradient over 2,048 tokens is off by 8e-5 on the whole vocabulary, by 3e-5 in four slices.
OF_ENTROPY_GRADIENT = {torch.float64: 1e-12, torch.float32: 2e-4}

#: Along which dimension a gradient is spread over the processes.
SPREAD = {"logits": -1, "weight": 0, "bias": 0}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(main, (request.param, str(folder), ALL_CASES), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@functools.cache
def on_the_whole(case: Case) -> Result:
    return run(case, None)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes() if tensor.dtype != torch.bfloat16 else bits(tensor.view(torch.int16))


def brought_together(case: Case, processes: list[dict[str, Any]], name: str) -> Tensor:
    parts = [process["results"][str(case)][name] for process in processes]
    dim = SPREAD.get(name.partition(":")[2])
    return parts[0] if dim is None else torch.cat(parts, dim)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_slices_give_what_the_whole_vocabulary_gives(case, processes):
    for name, expected in on_the_whole(case).items():
        actual = brought_together(case, processes, name)
        tolerance = 0.0
        if expected.is_floating_point():
            tolerance = (OF_ENTROPY_GRADIENT if name.startswith("entropy:") else TOLERANCE)[expected.dtype]
        try:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_all_processes_get_the_same_bits(case, processes):
    first, *others = (process["results"][str(case)] for process in processes)
    for name, value in first.items():
        if name.partition(":")[2] not in SPREAD:
            assert all(bits(other[name]) == bits(value) for other in others), name


@pytest.mark.parametrize("case", [case for case in ALL_CASES if "not a" not in case.family], ids=str)
def test_equal_policies_have_ratio_one(case, processes):
    """DESIGN's bound, with the exact total; logits of at most 150 where nothing excludes a token."""
    found = brought_together(case, processes, "ratio_of_equals").abs().double()
    sampled = processes[0]["results"][str(case)]
    log_p = sampled["old_log_probs"].gather(-1, sampled["slot"].unsqueeze(-1)).squeeze(-1).double()
    excluded = log_p == -torch.inf
    assert not found[excluded].any()
    scale = torch.finfo(case.dtype).eps if case.dtype == torch.float64 else 2.0**-23
    assert (found <= 4 * scale * log_p.abs().clamp(min=totals(case)))[~excluded].all()


def totals(case: Case) -> Tensor:
    """max(1, |logsumexp|) of the old policy, (rows,), in float64."""
    logits = case.logits()[0]
    if case.from_hidden:
        head = case.head()
        logits = head["old_hidden"] @ head["weight"].t() + head["bias"]
    settings = {name: value for name, value in case.transform if name != "entropy"}
    return plainly(logits, **settings).logsumexp(-1).abs().clamp(min=1)


def test_what_is_exchanged_does_not_depend_on_the_vocabulary(processes):
    n, rows, k = len(processes), 12, 8
    capture = ("all_gather_into_tensor", rows * (3 * k + 2) + 1)
    step, backward = ("all_reduce", rows * (k + 2 * n)), ("all_reduce", rows * HIDDEN)
    with_entropy = ("all_reduce", rows * (k + 3 * n))
    # The second step is that of the old policy with itself.
    expected = {
        "logits": [capture, step, step],
        "hidden": [capture, step, step, *3 * [backward]],
        "entropy": [capture, with_entropy, capture, ("all_reduce", rows * 2 * n), step, *4 * [backward]],
    }
    for process in processes:
        for exchanged in process["exchanged"]:
            assert exchanged == expected


def test_what_does_not_fit_is_refused_on_every_process(processes):
    n = len(processes)
    widths = ", ".join(["6"] + ["4"] * (n - 1))
    expected = {
        "slices of different sizes": f"the slices of vocab_group must hold equally many tokens each, got {widths}",
        "uneven vocabulary": f"source must have the old policy's {4 * n + 1} tokens, got {4 * n}",
        "logits": f"source must have the old policy's {4 * n} tokens, got {6 * n}",
        "whole logits": f"source must have the old policy's {4 * n} tokens, got 4",
        "head": f"source must have the old policy's {4 * n} tokens, got {6 * n}",
        "token": f"token_ids must be in [0, {4 * n}), got {4 * n}",
        "another group": "vocab_group must be a group of this process",
    }
    for rank, process in enumerate(processes):
        refused = expected if rank else {name: text for name, text in expected.items() if name != "another group"}
        assert process["refusals"].keys() == refused.keys()
        for name, text in refused.items():
            assert text in process["refusals"][name]
