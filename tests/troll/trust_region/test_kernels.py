"""Who computes: torch or Triton."""

import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import troll
from troll.trust_region import kernels
from troll.trust_region.reading import head


@pytest.mark.parametrize(
    ("forced", "dtype", "outcomes", "triton"),
    [
        ("", torch.float32, 65, False),  # on a CPU
        ("torch", torch.float32, 65, False),
        ("triton", torch.float32, 65, True),
        ("triton", torch.bfloat16, kernels.MAX_OUTCOMES, True),
        ("triton", torch.float32, kernels.MAX_OUTCOMES + 1, False),
        ("triton", torch.float64, 65, False),
    ],
)
def test_use_triton_follows_variable(monkeypatch, forced, dtype, outcomes, triton):
    pytest.importorskip("triton")
    monkeypatch.setenv(kernels.KERNELS_VARIABLE, forced)
    assert kernels.use_triton(torch.empty(1, dtype=dtype), outcomes) is triton


def test_use_triton_refuses_missing_triton(monkeypatch):
    monkeypatch.setenv(kernels.KERNELS_VARIABLE, "triton")
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    with pytest.raises(ImportError, match="pip install"):
        kernels.use_triton(torch.empty(1), 65)


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False)])
def test_switched_on_unless_zero(monkeypatch, value, on):
    monkeypatch.delenv(head.KEEP_TILES_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(head.KEEP_TILES_VARIABLE, value)
    assert kernels.switched_on(head.KEEP_TILES_VARIABLE) is on


def test_switched_on_refuses_other_values(monkeypatch):
    monkeypatch.setenv(head.KEEP_TILES_VARIABLE, "no")
    weight = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match="TROLL_KEEP_TILES must be 0 or 1, got 'no'"):
        troll.log_probs_at(troll.LMHead(torch.ones(1, 2), weight), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["logits", "head"])
def test_at_most_five_calls_lead_to_a_kernel(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Of the package's functions, the public one counted, as many are being called when a kernel is launched."""
    pytest.importorskip("triton")
    from troll.trust_region import step_triton
    from troll.trust_region.policy import top_triton
    from troll.trust_region.reading import tiles_triton

    package = str(Path(kernels.__file__).parent)
    calls: list[list[str]] = []

    def launching_on(device: torch.device) -> AbstractContextManager[Any]:
        calls.append([frame.name for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(package)])
        return nullcontext()

    for module in (step_triton, top_triton, tiles_triton):
        monkeypatch.setattr(module, "launching_on", launching_on)
    monkeypatch.setenv(kernels.KERNELS_VARIABLE, "triton")
    hidden, weight = torch.randn(2, 4, dtype=torch.bfloat16), torch.randn(200, 4, dtype=torch.bfloat16)
    hidden.requires_grad_()
    source = troll.LMHead(hidden, weight) if kind == "head" else troll.Logits(hidden @ weight.t())
    old = troll.capture(source, torch.tensor([1, 2]), top_k=2)
    troll.trust_region_step(source, old).log_ratio.sum().backward()
    assert {names[-1] for names in calls} >= {"select", "slots", "read", "forward", "backward", "_write"}
    assert max(map(len, calls)) <= 5, calls
