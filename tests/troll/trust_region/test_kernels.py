"""Who computes: torch or Triton."""

import pytest
import torch

from troll.trust_region import kernels


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
def test_the_variable_decides_where_triton_can(monkeypatch, forced, dtype, outcomes, triton):
    pytest.importorskip("triton")
    monkeypatch.setenv(kernels.VARIABLE, forced)
    assert kernels.use_triton(torch.empty(1, dtype=dtype), outcomes) is triton


def test_triton_that_is_not_installed_cannot_be_forced(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    with pytest.raises(ImportError, match="pip install"):
        kernels.use_triton(torch.empty(1), 65)
