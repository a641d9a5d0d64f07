"""The share of the weights that an optimiser cannot move, foreseen."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from troll.huggingface.precision import unresolved_share


class Weights(nn.Module):
    """Normally distributed, as those of a language model."""

    def __init__(self, dtype: torch.dtype, size: int = 20_000, spread: float = 0.03) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter((spread * torch.randn(size, generator=generator)).to(dtype))


def share_that_stays(model: Weights, learning_rate: float) -> float:
    """Of an AdamW whose gradients never change sign, so that every step is as long as the learning rate."""
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(20):
        model.weight.grad = torch.where(before.sign() == 0, 1, before.sign())
        optimizer.step()
    return float((model.weight == before).float().mean())


@pytest.mark.parametrize(
    ("dtype", "learning_rate"),
    [*((torch.bfloat16, x) for x in (1e-6, 1e-5, 1e-4, 1e-3)), (torch.float16, 1e-5), (torch.float32, 1e-6)],
)
def test_the_share_that_an_optimiser_cannot_move_is_foreseen(dtype, learning_rate):
    model = Weights(dtype)
    foreseen = unresolved_share(model, learning_rate)
    # By where in its binade a weight is, the bound is half a bit lower or higher.
    assert foreseen == pytest.approx(share_that_stays(model, learning_rate), abs=0.1)
    if dtype == torch.bfloat16:
        expected = math.erfc(2**8.5 * learning_rate / 0.03 / math.sqrt(2))  # of N(0, 0.03)
        assert foreseen == pytest.approx(expected, abs=0.04)


def test_weights_that_are_not_trained_do_not_count():
    model = nn.ModuleDict({"base": Weights(torch.bfloat16), "adapter": Weights(torch.float32, size=100)})
    model["base"].requires_grad_(False)
    assert unresolved_share(model, 1e-6) == 0
    model["base"].requires_grad_(True)
    assert unresolved_share(model, 1e-6) > 0.95
    assert unresolved_share(nn.Identity(), 1e-6) == 0


def test_sharded_weights_are_read_where_they_lie(tmp_path):
    whole = Weights(torch.bfloat16)
    expected = unresolved_share(whole, 1e-5)
    assert 0.8 < expected < 0.99

    gathered_later: Any = Weights(torch.bfloat16)  # as DeepSpeed leaves a parameter between uses
    gathered_later.weight.ds_tensor, gathered_later.weight.data = gathered_later.weight.data, torch.empty(0)
    assert unresolved_share(gathered_later, 1e-5) == expected

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = Weights(torch.bfloat16)
        sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh, [Shard(0)]))
        assert unresolved_share(sharded, 1e-5) == expected
    finally:
        torch.distributed.destroy_process_group()
