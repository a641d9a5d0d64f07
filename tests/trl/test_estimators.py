"""Advantage estimators in the trainer: what reaches the loss, PPO's critic, and its checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.trl import dense
from tests.trl.tiny import assert_same_gradients, logged, loss_and_gradients, make_dataset, reward, rollout
from troll.trl.advantages.critic import CRITIC_FILE
from troll.trl.advantages.estimators import ESTIMATORS, gae, reinforce_plus_plus, terminal_rewards


def scored(trainer: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A rollout before it is shuffled, and the rewards of its completions in float64."""
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(0)
    output = trainer._generate_and_score_completions(inputs)
    rows = zip(output["completion_ids"].tolist(), output["completion_mask"].sum(-1).tolist(), strict=True)
    return output, torch.tensor(reward([ids[:length] for ids, length in rows])).double()


def test_rloo(make):
    output, rewards = scored(make(advantage_estimator="rloo"))
    groups = rewards.view(-1, 4)
    expected = [float(r - (group.sum() - r) / 3) for group in groups for r in group]
    assert output["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus(make, baseline):
    name = "reinforce_plus_plus" + "_baseline" * baseline
    output, rewards = scored(make(advantage_estimator=name))
    if baseline:
        rewards = (rewards.view(-1, 4) - rewards.view(-1, 4).mean(-1, keepdim=True)).flatten()
    tokens = torch.repeat_interleave(rewards, output["completion_mask"].sum(-1))
    expected = (rewards - tokens.mean()) / tokens.std(correction=0)
    assert output["advantages"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_group_is_trls(make):
    output, rewards = scored(make(advantage_estimator="group"))
    groups = rewards.view(-1, 4)
    expected = (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-4)
    assert output["advantages"].tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "gae"])
def test_the_table_of_completions_has_the_estimators_advantages(make, estimator):
    trainer = make(advantage_estimator=estimator)
    output, _ = scored(trainer)
    advantages, mask = output["advantages"], output["completion_mask"]
    if estimator == "gae":
        advantages = (advantages * mask).sum(-1) / mask.sum(-1)
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages.tolist())


def test_ppo_uses_the_critics_values(make):
    trainer = make(advantage_estimator="gae", gamma=0.9, gae_lambda=0.8, whiten_advantages=False)
    with torch.no_grad():
        trainer.advantages.critic.model.score.weight.normal_(std=0.1)
    output, rewards = scored(trainer)
    mask = output["completion_mask"]
    values = output["troll_values"].double()
    assert float(values[mask.bool()].std()) > 1e-3
    advantages, returns = gae(terminal_rewards(rewards, mask), values, mask, 0.9, 0.8)
    torch.testing.assert_close(output["advantages"].double(), advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output["troll_returns"].double(), returns, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("surrogate", ["troll", "clip", "none"])
def test_ppos_policy_gradient_is_that_of_its_token_advantages(make, surrogate, accumulation):
    trainer = make(
        advantage_estimator="gae",
        surrogate=surrogate,
        loss_type="bnpo",
        gradient_accumulation_steps=accumulation,
        steps_per_generation=2 * accumulation,
    )
    inputs = rollout(trainer)[0]
    _, gradients = loss_and_gradients(trainer, inputs)
    model = make.model()
    log_probs = dense.completion_logits(model, inputs, 1.0).log_softmax(-1)
    log_probs = log_probs.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    mask = dense.scored_mask(inputs)
    # Old and new policy are equal: every surrogate has the plain policy gradient.
    (-(log_probs * inputs["advantages"])[mask].mean() / accumulation).backward()
    assert_same_gradients(gradients, {name: p.grad for name, p in model.named_parameters()})


def test_one_completion_per_prompt_takes_an_odd_batch(make):
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 3, "steps_per_generation": 3}
    trainer = make(advantage_estimator="gae", num_generations=1, max_steps=3, **sizes)
    trainer.train()
    assert len(logged(trainer, "loss")) == 3


def test_a_critic_draws_no_random_numbers_of_the_rollouts(make):
    ppo, grpo = (scored(make(advantage_estimator=name))[0] for name in ("gae", "group"))
    assert ppo["completion_ids"].tolist() == grpo["completion_ids"].tolist()
    states = []
    for name in ("gae", "group"):
        make(advantage_estimator=name)
        states.append(torch.rand(1))
    assert states[0] == states[1]


def test_several_objectives_are_refused_where_rewards_are_summed(make):
    with pytest.raises(ValueError, match="multi_objective_aggregation must be 'sum_then_normalize'"):
        make(advantage_estimator="rloo", multi_objective_aggregation="normalize_then_sum")


def test_one_completion_per_prompt_is_enough_without_groups(make):
    for estimator in ("reinforce_plus_plus", "gae"):
        trainer = make(advantage_estimator=estimator, num_generations=1, max_steps=2)
        trainer.train()
        assert trainer.args.num_generations == 1
        assert len(logged(trainer, "loss")) == 2
    for estimator in ("group", "rloo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ValueError, match="at least 2 generations"):
            make(advantage_estimator=estimator, num_generations=1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_every_estimator_trains(make, estimator, surrogate):
    trainer = make(advantage_estimator=estimator, surrogate=surrogate, eval_dataset=make_dataset(4))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    trainer.evaluate()
    assert all(torch.isfinite(torch.tensor(logged(trainer, "loss"))))
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_the_critic_learns_and_says_so(make):
    trainer = make(advantage_estimator="gae", critic_learning_rate=1e-2, max_steps=48, learning_rate=1e-5)
    trainer.train()
    losses = logged(trainer, "critic/value_loss")
    assert len(losses) == 48
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    explained = logged(trainer, "critic/explained_variance")
    assert sum(explained[-16:]) > sum(explained[:16])


def test_warming_up_trains_the_critic_alone(make):
    trainer = make(advantage_estimator="gae", critic_warmup_steps=3, max_steps=3, weight_decay=0.1)
    policy = {name: p.clone() for name, p in trainer.model.named_parameters()}
    critic = {name: p.clone() for name, p in trainer.advantages.critic.model.named_parameters()}
    trainer.train()
    assert all(torch.equal(p, policy[name]) for name, p in trainer.model.named_parameters())
    assert any(not torch.equal(p, critic[name]) for name, p in trainer.advantages.critic.model.named_parameters())
    longer = make(advantage_estimator="gae", critic_warmup_steps=3, max_steps=4)
    longer.train()
    assert any(not torch.equal(p, policy[name]) for name, p in longer.model.named_parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_has_the_same_critic_and_policy(make, tmp_path, lora):
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    settings: dict[str, Any] = {
        "advantage_estimator": "gae",
        "critic_learning_rate": 1e-2,
        "kl_bound": 0.01,
        "kl_bound_schedule": "hold_projected_fraction",
        "kl_bound_schedule_kwargs": {"target": 0.1, "rate": 0.5},
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "peft_config": peft,
    }
    whole = make(**settings, output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = make(**settings, output_dir=str(tmp_path / "resumed"))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / CRITIC_FILE).is_file()
    assert json.loads((checkpoint / "kl_bound.json").read_text())["kind"] == "hold_projected_fraction"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    critics = resumed.advantages.critic.model, whole.advantages.critic.model
    for ours, theirs in ((resumed.model, whole.model), critics):
        parameters = dict(theirs.named_parameters())
        assert all(torch.equal(p, parameters[name]) for name, p in ours.named_parameters())
    assert resumed.kl_bound.value == whole.kl_bound.value != 0.01


def test_a_checkpoint_without_a_critic_is_refused(make, tmp_path):
    make(save_strategy="steps", save_steps=2, max_steps=2, output_dir=str(tmp_path)).train()
    ppo = make(advantage_estimator="gae", max_steps=4, output_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no checkpoint of a run with a critic"):
        ppo.train(resume_from_checkpoint=True)


def test_reinforce_plus_plus_is_the_registered_function():
    assert ESTIMATORS["reinforce_plus_plus"].of_sequences is reinforce_plus_plus
