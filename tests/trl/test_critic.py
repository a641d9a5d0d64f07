"""The critic: which state a value is of, its loss, its optimiser, its checkpoints, in one process and in two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

from tests.trl import tiny
from tests.trl.critic_worker import (
    ADAPTERS,
    COMPLETION,
    PROMPT,
    Batch,
    batch,
    make_critic,
    run,
    trained,
    update,
)
from troll.trl.advantages.critic import CRITIC_FILE, Critic, value_loss


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    GradientState._reset_state()


@pytest.fixture
def opinionated(accelerator, model_path) -> Critic:
    """A critic whose values are not zero."""
    return with_opinions(make_critic(accelerator, model_path("qwen3")))


def assert_same_weights(ours: Critic, theirs: Critic | dict[str, torch.Tensor], tolerance: float = 0) -> None:
    expected = theirs if isinstance(theirs, dict) else trained(theirs)
    torch.testing.assert_close(trained(ours), expected, rtol=0, atol=tolerance)


def with_opinions(critic: Critic) -> Critic:
    generator = torch.Generator().manual_seed(5)
    head = critic.accelerator.unwrap_model(critic.model).score
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    return critic


def values_of(critic: Critic, data: Batch) -> torch.Tensor:
    return critic.values(data.input_ids, data.attention_mask, COMPLETION)


# Values


def test_values_start_at_zero_in_float32(accelerator, model_path):
    values = values_of(make_critic(accelerator, model_path("qwen3")), batch())
    assert values.dtype == torch.float32
    assert values.shape == (8, COMPLETION)
    assert not values.any()


@pytest.mark.parametrize("position", range(-1, COMPLETION))
def test_a_value_is_of_the_state_before_its_token(opinionated, position):
    """The first one reads the prompt's last token, at position −1."""
    input_ids = torch.arange(3, 3 + PROMPT + COMPLETION).unsqueeze(0)
    other = input_ids.clone()
    other[0, PROMPT + position] += 20
    values, changed = (opinionated.values(ids, torch.ones_like(ids), COMPLETION)[0] for ids in (input_ids, other))
    differs = (values - changed).abs() > 1e-6
    assert differs.tolist() == [t > position for t in range(COMPLETION)]


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2"])
def test_padding_of_the_prompt_changes_nothing(accelerator, model_path, architecture):
    critic = with_opinions(make_critic(accelerator, model_path(architecture)))
    input_ids = torch.arange(3, 3 + PROMPT + COMPLETION).unsqueeze(0)
    padded = torch.nn.functional.pad(input_ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(input_ids), (5, 0))
    unpadded = critic.values(input_ids, torch.ones_like(input_ids), COMPLETION)
    torch.testing.assert_close(critic.values(padded, mask, COMPLETION), unpadded, rtol=1e-4, atol=1e-5)


def test_rows_can_be_scored_a_few_at_a_time(opinionated):
    data = batch()
    few = opinionated.values(data.input_ids, data.attention_mask, COMPLETION, batch_size=3)
    torch.testing.assert_close(few, values_of(opinionated, data))


def test_a_critic_does_not_share_weights_with_the_policy(accelerator, make):
    policy = make.model("llama")
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    critic = make_critic(accelerator, policy)
    for _ in range(3):
        update(critic, batch(), micro_batches=1)
    torch.testing.assert_close(dict(policy.state_dict()), before, rtol=0, atol=0)


def test_dropout_is_off_in_training_too(accelerator):
    model = tiny.make_model("llama", attention_dropout=0.5, classifier_dropout=0.5)
    critic = with_opinions(make_critic(accelerator, model, "lora"))
    data = batch()
    critic.model.train()
    with torch.no_grad():
        values = [critic._forward(data.input_ids, data.attention_mask, COMPLETION) for _ in range(2)]
    torch.testing.assert_close(*values, rtol=0, atol=0)


# The loss


def test_the_clipped_loss_is_the_larger_of_two():
    # Towards the target and past the clip; away from it and past the clip; within the clip.
    values = torch.tensor([0.9, -0.9, 0.1], requires_grad=True)
    returns, old = torch.ones(3), torch.zeros(3)
    loss = value_loss(values, returns, old, 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.8**2 / 2, 1.9**2 / 2, 0.9**2 / 2]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.9, -0.9]))


# Training


def test_critic_ignores_tokens_outside_the_mask(accelerator, model_path):
    data = batch()
    expected, poisoned = (make_critic(accelerator, model_path("llama")) for _ in range(2))
    update(expected, data, micro_batches=1)
    data.returns = data.returns.masked_fill(~data.mask, math.nan)
    data.old_values = data.old_values.masked_fill(~data.mask, math.nan)
    update(poisoned, data, micro_batches=1)
    assert expected.metrics() == poisoned.metrics()
    assert_same_weights(poisoned, expected)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_make_the_update_of_the_whole_batch(accelerator, model_path, micro_batches):
    whole, parts = (with_opinions(make_critic(accelerator, model_path("qwen3"))) for _ in range(2))
    update(whole, batch(), micro_batches=1)
    update(parts, batch(), micro_batches=micro_batches)
    assert whole.steps == parts.steps == 1
    expected = whole.metrics()
    assert expected["grad_norm"] > 0.1
    assert parts.metrics() == pytest.approx(expected, rel=1e-4)
    # AdamW's first step is the sign of the gradient times the learning rate.
    assert_same_weights(parts, whole, 1e-4)


def test_the_gradient_is_of_the_mean_over_tokens(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"), value_clip=9.0)
    data = batch()
    update(critic, data, micro_batches=2)
    # With a head of zeros, the gradient of its bias is the mean of V − R = −R, and Adam keeps a tenth of it; the
    # gradient is clipped to the norm 0.5.
    norm = critic.metrics()["grad_norm"]
    state = critic.optimizer.state[critic.accelerator.unwrap_model(critic.model).score.bias]
    expected = -data.returns[data.mask].mean() * min(1, 0.5 / norm)
    torch.testing.assert_close(state["exp_avg"] / 0.1, expected.view(1), rtol=1e-4, atol=1e-6)


def test_lora_trains_only_the_adapter_and_the_head(accelerator, model_path, tmp_path):
    critic = make_critic(accelerator, model_path("llama"), "lora")
    model = accelerator.unwrap_model(critic.model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for seed in range(3):
        update(critic, batch(seed), micro_batches=1)
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == set(trained(critic))
    assert all(".lora_" in name or ".score.modules_to_save." in name for name in moved)
    assert {name.split(".")[-4] for name in moved if ".lora_" in name} == {"q_proj", "down_proj"}
    critic.save(tmp_path)
    assert set(torch.load(tmp_path / CRITIC_FILE)["weights"]) == moved


def test_gradient_checkpointing_changes_no_gradient(accelerator, model_path):
    plain, checkpointed = (
        with_opinions(make_critic(accelerator, model_path("llama"), gradient_checkpointing=flag))
        for flag in (False, True)
    )
    assert accelerator.unwrap_model(checkpointed.model).is_gradient_checkpointing
    for critic in (plain, checkpointed):
        update(critic, batch(), micro_batches=1)
    assert checkpointed.metrics() == pytest.approx(plain.metrics(), rel=1e-5)


def test_the_critic_warms_up_for_whole_updates(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"), warmup_steps=2)
    seen = []
    for i in range(6):  # three updates of two micro-batches
        seen.append(critic.warming_up)
        accelerator.gradient_state._set_sync_gradients(i % 2 == 1)
        batch().train(critic)
        critic.step()
    assert seen == [True] * 4 + [False] * 2


def test_infinite_gradients_stop_before_the_optimiser(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"))
    before = trained(critic)
    data = batch()
    data.returns[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="critic, step 1: the gradients are NaN or infinite"):
        update(critic, data, micro_batches=1)
    assert_same_weights(critic, before)


def test_weight_decay_spares_biases_and_norms(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"))
    decayed, spared = critic.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(trained(critic))


# Metrics


def test_metrics_are_over_tokens(accelerator, model_path):
    critic = make_critic(accelerator, model_path("llama"), value_clip=0.2)
    data = batch()
    update(critic, data, micro_batches=2)
    metrics = critic.metrics()
    returns, old = data.returns[data.mask], data.old_values[data.mask]
    loss = value_loss(torch.zeros_like(returns), returns, old, 0.2)
    explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    assert metrics.pop("grad_norm") > 0
    assert metrics == pytest.approx(
        {
            "value_loss": loss.mean().item(),
            "clip_fraction": (old.abs() > 0.2).float().mean().item(),
            "value_mean": 0.0,
            "return_mean": returns.mean().item(),
            "explained_variance": explained.item(),
        },
        rel=1e-4,
        abs=1e-6,
    )
    assert critic.metrics() == {}


def test_metrics_without_anything_to_measure_are_left_out(accelerator, model_path):
    equal, none = (make_critic(accelerator, model_path("llama")) for _ in range(2))
    data = batch()
    data.returns = torch.full_like(data.returns, 0.3)
    data.train(equal)
    assert "explained_variance" not in equal.metrics()
    data.mask = torch.zeros_like(data.mask)
    update(none, data, micro_batches=1)
    assert none.metrics() == {"grad_norm": 0.0}


# Checkpoints


@pytest.mark.parametrize("adapter", ["whole", "lora"])
def test_a_resumed_critic_repeats_every_bit(accelerator, model_path, tmp_path, adapter):
    through, resumed = (make_critic(accelerator, model_path("llama"), adapter, warmup_steps=3) for _ in range(2))
    for seed in range(2):
        update(through, batch(seed), micro_batches=2)
    through.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.steps == 2
    assert resumed.warming_up
    for seed in range(2, 4):
        update(through, batch(seed), micro_batches=2)
        update(resumed, batch(seed), micro_batches=2)
    assert_same_weights(resumed, through)


def test_saving_before_the_first_step_changes_nothing(accelerator, model_path, tmp_path):
    saved, resumed, other = (make_critic(accelerator, model_path("llama")) for _ in range(3))
    saved.save(tmp_path)
    resumed.load(tmp_path)
    for critic in (saved, resumed, other):
        update(critic, batch(), micro_batches=1)
    assert_same_weights(saved, other)
    assert_same_weights(resumed, other)
    saved.save(tmp_path)  # in place of the file as a whole
    assert [path.name for path in tmp_path.iterdir()] == [CRITIC_FILE]
    assert torch.load(tmp_path / CRITIC_FILE)["steps"] == 1


def test_checkpoints_of_no_or_another_critic_are_refused(accelerator, model_path, tmp_path):
    critic = make_critic(accelerator, model_path("llama"))
    with pytest.raises(FileNotFoundError, match=rf"has no {CRITIC_FILE}: it is no checkpoint of a run with a critic"):
        critic.load(tmp_path)
    make_critic(accelerator, model_path("llama"), "lora").save(tmp_path)
    with pytest.raises(ValueError, match=r"holds the weights of another critic: .* has shape .* \(\d+ differ\)"):
        critic.load(tmp_path)


# What is refused


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        (DistributedType.DEEPSPEED, "no", "cannot be trained with DEEPSPEED"),
        (DistributedType.MEGATRON_LM, "no", "cannot be trained with MEGATRON_LM"),
        (DistributedType.FSDP, "no", "needs fsdp_version=2, got 1"),
        (DistributedType.NO, "fp16", "needs bf16 or float32, got fp16"),
    ],
)
def test_ways_of_training_that_cannot_have_a_critic(model_path, kind, precision, message):
    accelerator: Any = SimpleNamespace(distributed_type=kind, mixed_precision=precision, is_fsdp2=False)
    with pytest.raises(ValueError, match=message):
        make_critic(accelerator, model_path("llama"))


# Two processes


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two_processes(request: pytest.FixtureRequest, left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned."""
    results = left_by_two(request.param, "critic")
    assert all(result[adapter]["sharded"] == (request.param == "fsdp") for result in results for adapter in ADAPTERS)
    return results


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_two_processes_train_and_resume_the_critic_of_one(accelerator, model_path, tmp_path, two_processes, adapter):
    first, second = (result[adapter] for result in two_processes)
    one = run(accelerator, str(model_path("llama")), adapter, tmp_path)
    assert one["metrics"]["grad_norm"] > 0.1
    assert first["metrics"] == second["metrics"] == pytest.approx(one["metrics"], rel=1e-4)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-4)
    torch.testing.assert_close(first["values"], one["values"], rtol=1e-3, atol=1e-3)
    for result in (first, second):
        torch.testing.assert_close(result["resumed"], result["weights"], rtol=0, atol=0)
