"""The kernel's sum of a divergence, term by term."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.troll.trust_region.cases import array, tensor
from troll.trust_region import probabilities_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _divergence_kernel(p_ptr, q_ptr, x_ptr, terms_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    p, q, x = tl.load(p_ptr + at), tl.load(q_ptr + at), tl.load(x_ptr + at)
    tl.store(terms_ptr + at, probabilities_triton.divergence_terms(p, q, x))


def test_divergence_terms():
    """Against the series in float64 near 0, and against expm1 in float64 elsewhere."""
    size = 4096
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-8, math.log10(40), size) * rng.choice([-1, 1], size)).astype(np.float32)
    x[:8] = 0, 1, -1, np.nextafter(np.float32(-1), np.float32(0)), 0.5, -0.5, 40, -40
    p = (10.0 ** rng.uniform(-12, 0, size)).astype(np.float32)
    wide = x.astype(np.float64)
    near = wide**2 * (1 / 2 + wide / 3 + wide**2 / 8 + wide**3 / 30)
    exact = p.astype(np.float64) * np.where(np.abs(wide) < 1e-3, near, wide * np.exp(wide) - np.expm1(wide))
    q = p.astype(np.float64) * np.exp(wide)
    arguments = [tensor(value, torch.float32).to(DEVICE) for value in (p, q, x)]
    terms = torch.empty_like(arguments[0])
    _divergence_kernel[(1,)](*arguments, terms, SIZE=size)
    assert terms.min() >= 0
    # At most two bits are lost to the few roundings of either form: 16 · 2⁻²⁴.
    np.testing.assert_allclose(array(terms.cpu()), exact, rtol=16 * 2.0**-24, atol=1e-45)
