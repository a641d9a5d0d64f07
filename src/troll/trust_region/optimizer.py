"""What an adapter writes into an optimiser."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def set_rates(optimizer: Optimizer, rates: Sequence[float | Tensor]) -> None:
    """Sets the learning rate of each parameter group, in place where it is a tensor.

    Compiled, captured and torchao's optimisers have tensors, which a number would not replace.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
