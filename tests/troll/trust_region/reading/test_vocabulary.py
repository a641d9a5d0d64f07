"""A vocabulary spread over 2 and 4 processes: the sliced paths of the matrix, and what the processes exchange."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import array
from tests.troll.trust_region.matrix_cases import CASES, ROWS
from tests.troll.trust_region.matrix_paths import SLICED
from tests.troll.trust_region.reading.vocabulary_worker import SIZES, main
from tests.troll.trust_region.test_matrix import assert_is_reference

PAIRS = [(path, case) for path in SLICED for case in CASES if SLICED[path].takes(CASES[case])]

#: Along which dimension the gradient of a leaf is spread over the processes: of logits; of hidden states, which every
#: process gets whole, weight and bias.
SPREAD: dict[int, list[int | None]] = {1: [-1], 3: [None, 0, 0]}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(main, (request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes() if tensor.dtype != torch.bfloat16 else bits(tensor.view(torch.int16))


@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_sliced_path_gives_reference(path, case, processes):
    """All processes get the same bits."""
    first, *others = (process["results"][path, case] for process in processes)
    for other in others:
        assert all(bits(value) == bits(other.values[name]) for name, value in first.values.items())
        assert bits(first.old.outcomes) == bits(other.old.outcomes)
    gradients: dict[str, list[Tensor]] = {name: [] for name in first.gradients}
    for name, leaves in first.gradients.items():
        for at, dim in enumerate(SPREAD[len(leaves)]):
            parts = [leaves[at], *(other.gradients[name][at] for other in others)]
            assert dim is not None or all(bits(part) == bits(parts[0]) for part in parts)
            gradients[name].append(parts[0] if dim is None else torch.cat(parts, dim))
    assert_is_reference(SLICED[path], CASES[case], first._replace(gradients=gradients))


def test_capture_entropy_is_that_of_all_slices(processes):
    expected = [reference.entropy(row)[0] for row in CASES["flat"].old]
    for process in processes:
        np.testing.assert_allclose(array(process["entropies"]), expected, rtol=within(1e-12))


def test_exchange_does_not_grow_with_vocabulary(processes):
    n, k, hidden = len(processes), 8, {size: ("all_reduce", ROWS * size) for size in SIZES}
    capture, step = ("all_gather_into_tensor", ROWS * (3 * k + 2) + 1), ("all_reduce", ROWS * (k + 2 * n))
    with_entropy = ("all_reduce", ROWS * (k + 3 * n))
    for process in processes:
        for (name, size), calls in process["exchanged"].items():
            # A head's hidden states are as wide as its vocabulary here; one backward pass for every output.
            expected = {
                "sliced, float32": [capture, step],
                "sliced head": [capture, step, *3 * [hidden[size]]],
                "sliced head, entropy": [capture, with_entropy, *4 * [hidden[size]]],
            }
            assert calls == expected[name]


def test_slices_that_do_not_fit_are_refused_everywhere(processes):
    n = len(processes)
    expected = {
        "slices of different sizes": ["vocab_group", ", ".join(["6"] + ["4"] * (n - 1))],
        "uneven vocabulary": ["source", f"{4 * n + 1} tokens, got {4 * n}"],
        "logits": ["source", f"{4 * n} tokens, got {6 * n}"],
        "whole logits": ["source", f"{4 * n} tokens, got 4"],
        "head": ["source", f"{4 * n} tokens, got {6 * n}"],
        "token": ["token_ids", f"[0, {4 * n}), got {4 * n}"],
        "another group": ["vocab_group"],
    }
    for rank, process in enumerate(processes):
        refused = expected if rank else {name: parts for name, parts in expected.items() if name != "another group"}
        assert process["refusals"].keys() == refused.keys()
        for name, parts in refused.items():
            assert all(part in process["refusals"][name] for part in parts)
