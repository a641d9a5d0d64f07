"""Who computes: torch or Triton."""

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
    monkeypatch.setenv(kernels.VARIABLE, forced)
    assert kernels.use_triton(torch.empty(1, dtype=dtype), outcomes) is triton


def test_use_triton_refuses_missing_triton(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    with pytest.raises(ImportError, match="pip install"):
        kernels.use_triton(torch.empty(1), 65)


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False)])
def test_switched_on_unless_zero(monkeypatch, value, on):
    monkeypatch.delenv(head.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(head.VARIABLE, value)
    assert kernels.switched_on(head.VARIABLE) is on


def test_switched_on_refuses_other_values(monkeypatch):
    monkeypatch.setenv(head.VARIABLE, "no")
    weight = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match="TROLL_KEEP_TILES must be 0 or 1, got 'no'"):
        troll.log_probs_at(troll.LMHead(torch.ones(1, 2), weight), torch.zeros(1, 1, dtype=torch.int64))
