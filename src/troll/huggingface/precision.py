"""Whether the weights of a model have enough bits for the steps of an optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def unresolved_share(model: nn.Module, learning_rate: float) -> float:
    """The share in [0, 1] of the trained weights that a step of the optimiser cannot change; 0 if none is trained.

    AdamW moves a weight by about the learning rate. Around w in [2^e, 2^(e+1)), numbers with b bits are 2^(e + 1 - b)
    apart, and a step below half of that is rounded away. So a weight does not change if |w| is above 2^b to 2^(b + 1)
    times the learning rate, depending on its place in the binade; this function uses the middle, 2^(b + ½), where b is
    8 in bf16 and 11 in fp16. Weights of higher precision count as changing.

    The share is estimated from at most 1024 evenly spaced weights of each parameter, weighted by the parameter's size.
    If weights are sharded, each process uses its own shards, without communication.
    """
    total, stays = 0, torch.zeros(())
    for parameter in model.parameters():
        weights = local_weights(parameter)
        if not parameter.requires_grad or not weights.numel():
            continue
        total += weights.numel()
        if weights.dtype in (torch.bfloat16, torch.float16):
            sample = weights.flatten()[:: -(-weights.numel() // 1024)]
            largest = learning_rate * 2**1.5 / torch.finfo(weights.dtype).eps
            # Stays on the device: the number is read once, at the end.
            stays = stays.to(sample.device) + (sample.abs().float() > largest).float().mean() * weights.numel()
    return float(stays) / max(total, 1)


def local_weights(parameter: nn.Parameter) -> Tensor:
    """The part of a parameter that this process holds, of FSDP2 (a DTensor) or ZeRO-3 (`ds_tensor`) too."""
    weights: Any = getattr(parameter, "ds_tensor", parameter.detach())
    return weights.to_local() if hasattr(weights, "to_local") else weights
