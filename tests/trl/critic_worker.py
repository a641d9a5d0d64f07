"""What either of two processes does for test_critic: see `tests.trl.worker`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.trl.sharding import whole
from troll.trl.advantages.critic import Critic
from troll.trl.config import CriticSettings

PROMPT, COMPLETION = 4, 6

#: What a critic reads of a configuration.
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "whole": None,
    "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1},
}


@dataclass
class Batch:
    """Prompts padded on the left, completions on the right, (B, P + T); targets and mask, (B, T)."""

    input_ids: Tensor
    attention_mask: Tensor
    returns: Tensor
    old_values: Tensor
    mask: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(**{name: value[rows] for name, value in vars(self).items()})

    def train(self, critic: Critic) -> None:
        critic.train_on(self.input_ids, self.attention_mask, self.returns, self.old_values, self.mask)


def batch(seed: int = 0, size: int = 8) -> Batch:
    """Completions of different lengths, some with a token of a tool."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 40, (size, PROMPT + COMPLETION), generator=generator)
    prompt_lengths = torch.randint(1, PROMPT + 1, (size, 1), generator=generator)
    lengths = torch.randint(1, COMPLETION + 1, (size, 1), generator=generator)
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt_lengths
    mask = torch.arange(COMPLETION) < lengths
    attention_mask = torch.cat([prompt_mask, mask], dim=1).long()
    mask = mask & ((torch.arange(COMPLETION) != 2) | (lengths != 4))
    returns, old_values = torch.randn(2, size, COMPLETION, generator=generator)
    return Batch(input_ids * attention_mask, attention_mask, returns, 0.1 * old_values, mask)


def make_critic(
    accelerator: Accelerator, model: Any, adapter: str = "whole", gradient_checkpointing: bool = False, **settings: Any
) -> Critic:
    """A critic, and for LoRA one whose random weights are the same each time."""
    torch.manual_seed(0)
    config = ADAPTERS[adapter]
    args = SimpleNamespace(
        critic_settings=CriticSettings(**{**SETTINGS, **settings}), gradient_checkpointing=gradient_checkpointing
    )
    peft_config = None if config is None else LoraConfig(**config)
    return Critic(accelerator, model, args, peft_config=peft_config)  # type: ignore[arg-type]


def update(critic: Critic, data: Batch, micro_batches: int) -> None:
    """One optimiser step on the parts of a batch, of which every process sees its share."""
    accelerator = critic.accelerator
    rows = len(data.mask) // micro_batches
    own = rows // accelerator.num_processes
    for i in range(micro_batches):
        start = i * rows + accelerator.process_index * own
        accelerator.gradient_state._set_sync_gradients(i == micro_batches - 1)
        data[slice(start, start + own)].train(critic)
        critic.step()


def trained(critic: Critic) -> dict[str, Tensor]:
    """Copies of the trained parameters, by name."""
    model = critic.accelerator.unwrap_model(critic.model)
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}


def run(accelerator: Accelerator, model: str, adapter: str, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint, a third; and the third again from the checkpoint."""
    critic = make_critic(accelerator, model, adapter)
    sharded = all(isinstance(parameter, DTensor) for parameter in critic.model.parameters())
    for seed in range(2):
        update(critic, batch(seed), micro_batches=2)
    metrics = critic.metrics()
    folder.mkdir(exist_ok=True)
    critic.save(folder)
    update(critic, batch(2), micro_batches=2)
    resumed = make_critic(accelerator, model, adapter)
    resumed.load(folder)
    update(resumed, batch(2), micro_batches=2)
    data = batch(3)
    values = critic.values(data.input_ids, data.attention_mask, COMPLETION, batch_size=3)
    return {
        "metrics": metrics,
        "weights": trained(critic),
        "resumed": trained(resumed),
        "values": values,
        "sharded": sharded,
    }


def work(mode: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """Updates of two critics."""
    PartialState(cpu=True, backend="gloo")  # as TRL's configuration does, before the accelerator
    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    return {adapter: run(accelerator, str(models("llama")), adapter, folder / adapter) for adapter in ADAPTERS}
