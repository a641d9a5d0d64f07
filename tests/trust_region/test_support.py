"""The largest logits, ties included."""

from __future__ import annotations

import pytest
import torch

from troll.trust_region.support import BLOCK, top_ids


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("size", [64 * 40, 64 * 40 + 17])
@pytest.mark.parametrize("levels", [None, 2, 50])
def test_the_top_by_blocks_is_that_of_a_stable_sort(k, size, levels):
    assert size // BLOCK > 2 * k, "else no blocks are used"
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(6, size, generator=generator)
    if levels:
        z = torch.randint(levels, (6, size), generator=generator).float()
    z[:, -1] = 100.0  # the remainder counts
    z[3, k:] = -torch.inf
    expected = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(top_ids(z, k), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_of_both_signs_tie(dtype):
    z = torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0, torch.inf, -torch.inf], dtype=dtype)
    assert top_ids(z, 7).tolist() == [5, 0, 1, 3, 4, 2, 6]
