"""What the tests of the projection share."""

from __future__ import annotations

import torch
from torch import Tensor

SOLVERS = ("newton", "bracket")


def random_logits(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
