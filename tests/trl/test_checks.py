"""Refusals and warnings before training starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.trl.tiny import make_dataset, no_warnings_about
from troll.trl.checks import unresolved_share, warn_about_precision

ONE_PROCESS = SimpleNamespace(distributed_type=DistributedType.NO, mixed_precision="bf16")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 1e-4, 1e-3])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_never_move_are_warned_about_with_what_helps(dtype):
    args: Any = SimpleNamespace(learning_rate=1e-6)
    accelerator: Any = ONE_PROCESS
    message = r'9\d% of the trained weights .*learning_rate=1e-06.* dtype="float32".*bf16=True; or train LoRA'
    with pytest.warns(UserWarning, match=message):
        warn_about_precision(accelerator, args, Weights(dtype))


def test_weights_that_move_are_not_warned_about():
    slow: Any = SimpleNamespace(learning_rate=1e-6)
    fast: Any = SimpleNamespace(learning_rate=1e-2)
    accelerator: Any = ONE_PROCESS
    # FSDP and DeepSpeed keep float32 weights of their own in mixed precision.
    mixed: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, mixed_precision="bf16")
    with no_warnings_about("trained weights"):
        warn_about_precision(accelerator, slow, Weights(torch.float32))
        warn_about_precision(accelerator, fast, Weights(torch.bfloat16))
        warn_about_precision(mixed, slow, Weights(torch.bfloat16))
    pure: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, mixed_precision="no")
    with pytest.warns(UserWarning, match="trained weights"):
        warn_about_precision(pure, slow, Weights(torch.bfloat16))


TAKEN = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]


def with_column(name: str, size: int = 16) -> Dataset:
    return make_dataset(size).add_column(name, ["x"] * size)


@pytest.mark.parametrize("name", TAKEN)
def test_a_column_that_reward_functions_cannot_get_is_refused_before_training(make, name):
    message = rf"cannot have a column named '{name}': .*rename_column\('{name}', ...\).*remove_columns"
    with pytest.raises(ValueError, match=message):
        make(train_dataset=with_column(name))
    with pytest.raises(ValueError, match=message):
        make(eval_dataset=with_column(name))
    with pytest.raises(ValueError, match=message):
        make(eval_dataset={"other": make_dataset(), "one": with_column(name)})
    with pytest.raises(ValueError, match=message):  # given later
        make().evaluate(with_column(name))


def test_a_stream_with_such_a_column_is_refused_before_generation(make, monkeypatch):
    def rows() -> Iterator[dict[str, str]]:
        yield from with_column("completions")

    trainer = make(train_dataset=IterableDataset.from_generator(rows))
    monkeypatch.setattr(trainer, "_generate", lambda prompts: pytest.fail("generated"))
    with pytest.raises(ValueError, match="cannot have a column named 'completions'"):
        trainer.train()


def test_other_columns_reach_the_reward_functions(make):
    seen: list[str] = []

    def reward(completions: list[str], completion_id: list[str], **columns: Any) -> list[float]:
        seen.extend(completion_id)
        return [float(len(text)) for text in completions]

    # TRL drops `completion` without a word: data sets for other trainers have it.
    dataset = with_column("completion").add_column("completion_id", [str(row) for row in range(16)])
    dataset = dataset.add_column("environments", ["x"] * 16)
    make(train_dataset=dataset, reward_funcs=reward, max_steps=1).train()
    assert len(seen) == 8


def test_a_removed_column_reaches_no_reward_function(make):
    trainer = make(train_dataset=with_column("completions"), remove_unused_columns=True, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
