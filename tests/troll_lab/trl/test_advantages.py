"""Advantages of tokens in the trainer: what reaches the loss, PPO's critic, and its checkpoints."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.troll.trl import dense, estimators_contract, tiny
from tests.troll.trl.resuming import interrupted, resumed_exactly
from tests.troll.trl.test_checks import tokenizer_with
from tests.troll.trl.test_diagnostics import assert_no_nan_where_nothing_is_judged
from troll.trl.estimators import ESTIMATORS
from troll_lab.trl.critic import CRITIC_FILE
from troll_lab.trl.estimators import gae, terminal_rewards

#: Those that only this trainer can compute.
OURS = [name for name, estimator in ESTIMATORS.items() if estimator.laboratory]


def scored(trainer: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A rollout before it is shuffled, and the rewards of its completions in float64."""
    output = tiny.rolled_out(trainer)
    return output, torch.tensor(tiny.reward(tiny.unpadded(output))).double()


def test_ppo_uses_the_critics_values(make):
    trainer = make(
        advantage_estimator="gae", critic_kwargs={"gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": False}
    )
    with torch.no_grad():
        trainer.critic.model.score.weight.normal_(std=0.1)
    output, rewards = scored(trainer)
    mask = output["completion_mask"]
    values = output["troll_values"].double()
    assert float(values[mask.bool()].std()) > 1e-3
    advantages, returns = gae(terminal_rewards(rewards, mask), values, mask, 0.9, 0.8)
    torch.testing.assert_close(output["advantages"].double(), advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output["troll_returns"].double(), returns, rtol=1e-5, atol=1e-6)
    means = (output["advantages"] * mask).sum(-1) / mask.sum(-1)
    assert list(trainer._logs["advantages"]) == pytest.approx(means.tolist())


@pytest.mark.parametrize(("surrogate", "accumulation"), [("troll", 2), ("clip", 1)])
def test_ppos_policy_gradient_is_that_of_its_token_advantages(make, surrogate, accumulation):
    passes = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 2 * accumulation}
    trainer = make(advantage_estimator="gae", surrogate=surrogate, loss_type="bnpo", **passes)
    inputs = tiny.rollout(trainer)[0]
    _, gradients = tiny.loss_and_gradients(trainer, inputs)
    model = make.model()
    log_probs, mask = dense.completion_log_probs(model, inputs), dense.scored_mask(inputs)
    # Old and new policy are equal: every surrogate has the plain policy gradient.
    (-(log_probs * inputs["advantages"])[mask].mean() / accumulation).backward()
    tiny.assert_same_gradients(gradients, tiny.gradients(model))


def test_a_critic_draws_no_random_numbers_of_the_rollouts(make):
    found = []
    for name in ("gae", "group"):
        trainer = make(advantage_estimator=name)
        drawn = torch.rand(1)  # after the trainer was made
        found.append((drawn.item(), scored(trainer)[0]["completion_ids"].tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("estimator", OURS)
def test_one_completion_per_prompt_is_enough_without_groups(make, estimator):
    estimators_contract.one_completion_is_enough_without_groups(make, estimator)


@pytest.mark.parametrize("estimator", OURS)
def test_every_estimator_trains(make, estimator):
    estimators_contract.trains(make, estimator)


def test_the_critic_learns_and_says_so(make):
    trainer = make(advantage_estimator="gae", critic_kwargs={"learning_rate": 3e-2}, max_steps=12, learning_rate=1e-5)
    trainer.train()
    losses = tiny.logged(trainer, "critic/value_loss")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_warming_up_trains_the_critic_alone(make):
    """For whole updates, of two micro-batches each."""
    passes = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "weight_decay": 0.1}
    for steps, policy_moves in ((3, False), (4, True)):
        trainer = make(advantage_estimator="gae", critic_kwargs={"warmup_steps": 3}, max_steps=steps, **passes)
        policy, critic = tiny.parameters(trainer.model), tiny.parameters(trainer.critic.model)
        trainer.train()
        assert bool(tiny.changed(policy, trainer.model)) == policy_moves
        assert tiny.changed(critic, trainer.critic.model)


def test_a_resumed_run_has_the_same_critic_and_policy(make, tmp_path):
    """The critic says so by its values, and `test_critic` by its weights."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = {"advantage_estimator": "gae", "critic_kwargs": {"learning_rate": 1e-2}, "peft_config": lora}
    with tiny.no_warnings_about("with other settings"):
        log = resumed_exactly(interrupted(make, tmp_path, ddp_backend=None, **settings))
    assert all("critic/value_loss" in entry for entry in log)
    assert (tmp_path / "checkpoint-2" / CRITIC_FILE).is_file()


def test_a_critic_without_the_models_tokens_is_refused(make, model_path):
    model = make.model()
    model.resize_token_embeddings(49)
    critic = {"advantage_estimator": "gae", "critic_kwargs": {"model_name_or_path": str(model_path("llama"))}}
    message = r"embedding of the critic has 48 rows, and that of the trained model 49: it lacks '<new>' \(id 48\)"
    with pytest.raises(ValueError, match=message):
        make(model=model, processing_class=tokenizer_with("<new>"), **critic)


def test_no_metric_is_nan_where_nothing_is_judged(make):
    assert_no_nan_where_nothing_is_judged(make, advantage_estimator="gae")


class Stop(TrainerCallback):
    """Asks for a log after the second update, and stops at the third."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = state.global_step == 2
        control.should_training_stop = state.global_step == 3


def test_a_log_of_a_users_callback_has_the_critics_metrics(make):
    trainer = make(logging_steps=100, callbacks=[Stop()], advantage_estimator="gae")
    trainer.train()
    first, last, _ = trainer.state.log_history
    assert first.keys() >= {"trust_region/kl_before_mean", "critic/value_loss", "entropy"}
    assert last["step"] == 3 and "critic/value_loss" in last
