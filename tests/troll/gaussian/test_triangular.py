"""What a lower-triangular root knows that its covariance does not."""

import torch

from troll.gaussian.triangular import lower_root


def test_lower_root_keeps_digits_of_small_diagonal() -> None:
    root = torch.tensor([[1.0, 0.0], [1.0, 1e-10]], dtype=torch.float64)
    found, _ = lower_root(root)
    assert abs(found[1, 1].item() - 1e-10) < 1e-15
