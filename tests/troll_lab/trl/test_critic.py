"""The critic: which state a value is of, its loss, its optimiser, its checkpoints, in one process and in two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.troll.trl import tiny
from tests.troll.trl.sharding import whole
from troll_lab.trl.config import CriticSettings
from troll_lab.trl.critic import CRITIC_FILE, Critic, value_loss

PROMPT, COMPLETION = 4, 6

#: What a critic reads of a configuration.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}

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
    own = CriticSettings(**SETTINGS | settings)
    args: Any = SimpleNamespace(critic_settings=own, gradient_checkpointing=gradient_checkpointing)
    config = ADAPTERS[adapter]
    return Critic(accelerator, model, args, peft_config=None if config is None else LoraConfig(**config))


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


def run(accelerator: Accelerator, model: Path, adapter: str, folder: Path) -> dict[str, Any]:
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
    weights = {"weights": trained(critic), "resumed": trained(resumed)}
    return weights | {"metrics": metrics, "values": values, "sharded": sharded}


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """Updates of two critics."""
    PartialState(cpu=True, backend="gloo")  # as TRL's configuration does, before the accelerator
    accelerator = Accelerator()
    return {adapter: run(accelerator, make.model_path("llama"), adapter, folder / adapter) for adapter in ADAPTERS}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    GradientState._reset_state()


def assert_same_weights(ours: Critic, theirs: Critic, tolerance: float = 0) -> None:
    torch.testing.assert_close(trained(ours), trained(theirs), rtol=0, atol=tolerance)


def with_opinions(critic: Critic) -> Critic:
    generator = torch.Generator().manual_seed(5)
    head = critic.accelerator.unwrap_model(critic.model).score
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    return critic


@pytest.mark.parametrize("position", [-1, 0, COMPLETION - 1])
def test_a_value_is_of_the_state_before_its_token(accelerator, model_path, position):
    """The first one reads the prompt's last token, at position −1."""
    critic = with_opinions(make_critic(accelerator, model_path("qwen3")))
    input_ids = torch.arange(3, 3 + PROMPT + COMPLETION).unsqueeze(0)
    other = input_ids.clone()
    other[0, PROMPT + position] += 20
    values, changed = (critic.values(ids, torch.ones_like(ids), COMPLETION)[0] for ids in (input_ids, other))
    assert values.dtype == torch.float32
    differs = (values - changed).abs() > 1e-6
    assert differs.tolist() == [t > position for t in range(COMPLETION)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_padding_of_the_prompt_changes_nothing(accelerator, model_path, architecture):
    """Nor does it change anything to score a few rows at a time."""
    critic = with_opinions(make_critic(accelerator, model_path(architecture)))
    input_ids = torch.arange(3, 3 + 3 * (PROMPT + COMPLETION)).view(3, -1)
    padded, mask = (torch.nn.functional.pad(each, (5, 0)) for each in (input_ids, torch.ones_like(input_ids)))
    unpadded = critic.values(input_ids, torch.ones_like(input_ids), COMPLETION)
    for size in (None, 2):
        found = critic.values(padded, mask, COMPLETION, batch_size=size)
        torch.testing.assert_close(found, unpadded, rtol=1e-4, atol=1e-5)


def test_the_clipped_loss_is_the_larger_of_two():
    # Towards the target and past the clip; away from it and past the clip; within the clip.
    values = torch.tensor([0.9, -0.9, 0.1], requires_grad=True)
    returns, old = torch.ones(3), torch.zeros(3)
    loss = value_loss(values, returns, old, 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.8**2 / 2, 1.9**2 / 2, 0.9**2 / 2]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.9, -0.9]))


def test_critic_ignores_tokens_outside_the_mask(accelerator, model_path):
    data = batch()
    expected, poisoned = (make_critic(accelerator, model_path("llama")) for _ in range(2))
    update(expected, data, micro_batches=1)
    data.returns = data.returns.masked_fill(~data.mask, math.nan)
    data.old_values = data.old_values.masked_fill(~data.mask, math.nan)
    update(poisoned, data, micro_batches=1)
    assert expected.metrics() == poisoned.metrics()
    assert_same_weights(poisoned, expected)


def test_micro_batches_make_the_update_of_the_whole_batch(accelerator, model_path):
    whole, parts = (with_opinions(make_critic(accelerator, model_path("qwen3"))) for _ in range(2))
    update(whole, batch(), micro_batches=1)
    update(parts, batch(), micro_batches=4)
    assert whole.steps == parts.steps == 1
    expected = whole.metrics()
    assert expected["grad_norm"] > 0.1
    assert parts.metrics() == pytest.approx(expected, rel=1e-4)
    # AdamW's first step is the sign of the gradient times the learning rate.
    assert_same_weights(parts, whole, 1e-4)


def test_a_new_training_drops_the_gradients_of_an_interrupted_update(accelerator, model_path):
    fresh, interrupted = (with_opinions(make_critic(accelerator, model_path("qwen3"))) for _ in range(2))
    accelerator.gradient_state._set_sync_gradients(False)
    batch(1).train(interrupted)
    interrupted.start()
    for critic in (fresh, interrupted):
        update(critic, batch(), micro_batches=2)
    assert interrupted.metrics() == fresh.metrics()
    assert_same_weights(interrupted, fresh)


def test_the_gradient_is_of_the_mean_over_tokens(accelerator, model_path):
    critic, data = make_critic(accelerator, model_path("llama"), value_clip=9.0), batch()
    update(critic, data, micro_batches=2)
    # With a head of zeros, the gradient of its bias is the mean of V − R = −R, and Adam keeps a tenth of it; the
    # gradient is clipped to the norm 0.5.
    norm = critic.metrics()["grad_norm"]
    state = critic.optimizer.state[critic.accelerator.unwrap_model(critic.model).score.bias]
    expected = -data.returns[data.mask].mean() * min(1, 0.5 / norm)
    torch.testing.assert_close(state["exp_avg"] / 0.1, expected.view(1), rtol=1e-4, atol=1e-6)


def test_lora_trains_only_the_adapter_and_the_head(accelerator, model_path, tmp_path):
    critic = make_critic(accelerator, model_path("llama"), "lora", gradient_checkpointing=True)
    model = accelerator.unwrap_model(critic.model)
    assert model.get_base_model().is_gradient_checkpointing
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for seed in range(3):
        update(critic, batch(seed), micro_batches=1)
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == set(trained(critic))
    assert all(".lora_" in name or ".score.modules_to_save." in name for name in moved)
    assert {name.split(".")[-4] for name in moved if ".lora_" in name} == {"q_proj", "down_proj"}
    critic.save(tmp_path)
    assert set(torch.load(tmp_path / CRITIC_FILE)["weights"]) == moved


def test_infinite_gradients_stop_before_the_optimiser(accelerator, model_path):
    critic, data = make_critic(accelerator, model_path("llama")), batch()
    before = trained(critic)
    data.returns[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="critic, step 1: the gradients are NaN or infinite"):
        update(critic, data, micro_batches=1)
    torch.testing.assert_close(trained(critic), before, rtol=0, atol=0)


def test_weight_decay_spares_biases_and_norms(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"))
    decayed, spared = critic.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(trained(critic))


def test_metrics_are_over_tokens(accelerator, model_path):
    critic, data = make_critic(accelerator, model_path("llama"), value_clip=0.2), batch()
    update(critic, data, micro_batches=2)
    metrics = critic.metrics()
    returns, old = data.returns[data.mask], data.old_values[data.mask]
    explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    expected = {"value_loss": value_loss(torch.zeros_like(returns), returns, old, 0.2).mean()}
    expected |= {"clip_fraction": (old.abs() > 0.2).float().mean(), "explained_variance": explained}
    expected |= {"value_mean": torch.tensor(0.0), "return_mean": returns.mean()}
    assert metrics.pop("grad_norm") > 0
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-6)
    assert critic.metrics() == {}


def test_metrics_without_anything_to_measure_are_left_out(accelerator, model_path):
    critic, data = make_critic(accelerator, model_path("llama")), batch()
    data.returns = torch.full_like(data.returns, 0.3)
    data.train(critic)
    assert "explained_variance" not in critic.metrics()
    critic.optimizer.zero_grad()
    data.mask = torch.zeros_like(data.mask)
    update(critic, data, micro_batches=1)
    assert critic.metrics() == {"grad_norm": 0.0}


def test_saving_before_the_first_step_changes_nothing(accelerator, model_path, tmp_path):
    saved, resumed, other = (make_critic(accelerator, model_path("llama"), warmup_steps=2) for _ in range(3))
    saved.save(tmp_path)
    resumed.load(tmp_path)
    for critic in (saved, resumed, other):
        update(critic, batch(), micro_batches=1)
    assert_same_weights(saved, other)
    assert_same_weights(resumed, other)
    saved.save(tmp_path)  # in place of the file as a whole
    assert [path.name for path in tmp_path.iterdir()] == [CRITIC_FILE]
    other.load(tmp_path)
    assert other.steps == 1 and other.warming_up
    update(other, batch(), micro_batches=1)
    assert other.steps == 2 and not other.warming_up


def test_checkpoints_of_another_critic_are_refused(accelerator, model_path, tmp_path):
    """Those of none: test_faults."""
    make_critic(accelerator, model_path("llama"), "lora").save(tmp_path)
    with pytest.raises(ValueError, match=r"holds the weights of another critic: .* has shape .* \(\d+ differ\)"):
        make_critic(accelerator, model_path("llama")).load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        (DistributedType.DEEPSPEED, "no", "cannot be trained with DEEPSPEED"),
        (DistributedType.FSDP, "no", "needs fsdp_version=2, got 1"),
        (DistributedType.NO, "fp16", "needs bf16 or float32, got fp16"),
    ],
)
def test_ways_of_training_that_cannot_have_a_critic(model_path, kind, precision, message):
    accelerator: Any = SimpleNamespace(distributed_type=kind, mixed_precision=precision, is_fsdp2=False)
    with pytest.raises(ValueError, match=message):
        make_critic(accelerator, model_path("llama"))


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two_processes(request: pytest.FixtureRequest, left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned."""
    results = left_by_two(request.param, "critic")
    assert all(result[adapter]["sharded"] == (request.param == "fsdp") for result in results for adapter in ADAPTERS)
    return results


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_two_processes_train_and_resume_the_critic_of_one(accelerator, model_path, tmp_path, two_processes, adapter):
    first, second = (result[adapter] for result in two_processes)
    one = run(accelerator, model_path("llama"), adapter, tmp_path)
    assert one["metrics"]["grad_norm"] > 0.1
    assert first["metrics"] == second["metrics"] == pytest.approx(one["metrics"], rel=1e-4)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-4)
    torch.testing.assert_close(first["values"], one["values"], rtol=1e-3, atol=1e-3)
    for result in (first, second, one):
        torch.testing.assert_close(result["resumed"], result["weights"], rtol=0, atol=0)
