"""Compiles the token kernels for one target, forward and backward: ``python -m <this> cuda``."""

from __future__ import annotations

import sys

import torch

from tests.trust_region.kernels.ahead_of_time import launches_compile_only
from troll.trust_region.kernels import token_triton


def launch_all(outcomes: int, kl_bound: float | torch.Tensor) -> None:
    new = torch.zeros(2, outcomes, requires_grad=True)
    present, slot = torch.ones(2, outcomes, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    token_triton.trust_region_step(new.detach(), new, present, slot, kl_bound)
    step = token_triton.trust_region_step(new, new, present, slot, kl_bound)
    (step.log_probs + step.regression + step.new_log_probs).sum().backward()


if __name__ == "__main__":
    with launches_compile_only(sys.argv[1]) as kernels:
        launch_all(65, 0.05)
        launch_all(513, torch.full((2,), 0.05))
    for kernel in kernels:
        print(kernel.metadata.name, *(len(kernel.asm[binary]) for binary in ("cubin", "hsaco") if binary in kernel.asm))
