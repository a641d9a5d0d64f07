"""Sizes from the table, and what trying others on a GPU may not change."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from tests.troll.trust_region.reading.tiles import DEVICE, FIRST, made, random_values, some_ids
from troll.trust_region.reading import launch_triton
from troll.trust_region.reading.tiles import Support, TailSums, Upstream


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tries all sizes as on a GPU, without a clock; the list says which kernels' were tried."""
    names: list[str] = []
    make = launch_triton._tuner.__wrapped__

    def tuner(kernel, bytes_each, restore):
        made_tuner = make(kernel, bytes_each, restore)
        names.append(kernel.fn.__name__)

        def measure(launch, quantiles):
            launch()
            return [float(len(names))] * len(quantiles)

        made_tuner.do_bench = measure
        return made_tuner

    monkeypatch.setattr(launch_triton, "_tuner", tuner)
    monkeypatch.setattr(launch_triton, "_tunes", lambda device_type: True)
    monkeypatch.setattr(launch_triton, "MIN_TUNED_ROWS", 2)
    return names


def test_sizes_of_table_are_powers_of_two():
    assert launch_triton.sizes_of("gradient_kernel", 10**6, torch.bfloat16) == {"COLUMNS": 2048, "num_warps": 4}
    assert launch_triton.sizes_of("gradient_kernel", 1000, torch.float32) == {"COLUMNS": 1024, "num_warps": 4}
    assert launch_triton.sizes_of("gradient_kernel", 3, torch.float32)["COLUMNS"] == 128
    for name, sizes in launch_triton.TABLE.items():
        for bytes_each in sizes:
            for columns, warps in launch_triton.candidates(name, bytes_each):
                assert columns == triton.next_power_of_2(columns) and columns >= 64
                assert warps == triton.next_power_of_2(warps) and 1 <= warps <= 32


@pytest.mark.parametrize(("value", "device", "tunes"), [("0", "cuda", False), ("1", "cpu", False), ("1", "cuda", True)])
def test_tuning_follows_its_variable(monkeypatch, value, device, tunes):
    monkeypatch.setenv(launch_triton.AUTOTUNE_VARIABLE, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert launch_triton._tunes(device) is tunes
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not launch_triton._tunes(device)


def folded(rows: int, entropy: bool) -> tuple[torch.Tensor | None, ...]:
    support = Support.from_ids(some_ids(rows, 5, FIRST, FIRST + 300))
    logits = torch.full((rows, 5), -torch.inf, device=DEVICE)
    outside = TailSums.empty(logits, entropy)
    for seed in range(2):
        made(random_values(rows, 300, seed=seed)).tile.read(support, logits, outside)
    return logits, *outside


@pytest.mark.parametrize("entropy", [False, True])
def test_tuning_adds_sums_once(entropy, request):
    expected = folded(2, entropy)
    names = request.getfixturevalue("tuned")
    for got, want in zip(folded(2, entropy), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert set(names) == {"read_kernel"}


def test_gradient_is_tuned_only_where_logits_stay(tuned):
    part, out = made(random_values(4, 300)), made(torch.zeros(4, 300))
    support, row = Support.from_ids(some_ids(4, 5, FIRST, FIRST + 300)), torch.zeros(4, device=DEVICE)
    upstream = Upstream(row, row + 1, torch.ones(4, 5, device=DEVICE), None, None)
    part.tile.write_gradient(support, upstream, out.source)
    assert tuned == ["gradient_kernel"]
    part.tile.gradient(support, upstream)
    assert tuned == ["gradient_kernel"]
    torch.testing.assert_close(part.values(), out.values(), rtol=1e-6, atol=0)


def test_few_rows_are_not_tuned(tuned):
    folded(1, entropy=False)
    assert not tuned
