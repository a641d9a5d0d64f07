"""β of a KL penalty: PPO's rule, what it goes by, and that a resumed run has the same."""

import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.trl import resuming
from tests.trl.tiny import logged, same_updates
from troll.trl.kl_controller import AdaptiveKLController

WEIGHT, SEEN = "trust_region/kl_penalty_weight", "trust_region/kl_penalty_kl"


def test_the_weight_adapts_to_the_mean_of_an_update_and_of_the_tokens_that_count():
    weight = AdaptiveKLController(Accelerator(cpu=True), "kl_penalty", 1.0, target=0.03)
    weight.observe(torch.tensor([0.1, 9.0, 0.1]), torch.tensor([1, 0, 1]))
    weight.observe(torch.tensor([0.0, 0.0]), torch.tensor([1, 1]))
    weight.end_update(adapt=True)
    assert weight.value == 2.0  # by a mean of 0.05
    weight.observe(torch.tensor([9.0]), torch.tensor([1]))
    weight.end_update(adapt=False)  # not the rollout's last
    weight.observe(torch.tensor([0.03]), torch.tensor([1]))
    weight.end_update(adapt=True)
    assert weight.value == 2.0
    weight.observe(torch.tensor([9.0]), torch.tensor([1]))
    weight.start()  # interrupted, and begun again
    weight.end_update(adapt=True)
    weight.observe(torch.tensor([9.0]), torch.tensor([0]))  # nothing was seen
    weight.end_update(adapt=True)
    assert weight.value == 1.0


@pytest.mark.parametrize(("kl", "limit"), [(9.0, 3.0 * 1024), (0.0, 3.0 / 1024)])
def test_a_target_out_of_reach_takes_the_weight_to_a_limit_and_is_warned_about_once(kl, limit):
    weight = AdaptiveKLController(Accelerator(cpu=True), "kl_penalty", 3.0, target=0.03)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rollouts in range(1, 41):
            weight.observe(torch.tensor([kl]), torch.tensor([1]))
            weight.end_update(adapt=True)
            assert len(said) == (rollouts > 10)
    assert weight.value == limit
    weight.load_state_dict({"weight": 1e9})  # that of a run with another initial weight, and so another limit
    assert weight.state_dict() == {"weight": 1e9}
    assert str(said[0].message).startswith(f"trust_region/kl_penalty_weight stays at {limit:g}, the limit ")


#: Two rollouts of two updates of two micro-batches.
TWO_ROLLOUTS: dict[str, Any] = {
    "surrogate": "kl_penalty",
    "surrogate_kwargs": {"direction": "new_old"},
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


def test_weight_adapts_to_the_last_update_of_a_rollout(make):
    """Once a rollout, by the mean KL of all tokens of its second update; the first one's is 0."""
    fixed = make(**TWO_ROLLOUTS)
    fixed.train()
    assert logged(fixed, WEIGHT) == [1, 1, 1, 1]
    assert logged(fixed, SEEN) == []
    kl = logged(fixed, "trust_region/kl_before_mean")
    assert kl[0] == 0 < kl[1]
    for target, factor in ((kl[1] * 1.52, 0.5), (kl[1] * 1.48, 1), (kl[1] / 1.48, 1), (kl[1] / 1.52, 2)):
        trainer = make(**{**TWO_ROLLOUTS, "surrogate_kwargs": {"direction": "new_old", "target": target}})
        trainer.train()
        assert logged(trainer, WEIGHT) == [1, 1, factor, factor]
        assert logged(trainer, "trust_region/kl_before_mean")[:2] == kl[:2]
        assert [entry["step"] for entry in trainer.state.log_history if SEEN in entry] == [2, 4]
        assert logged(trainer, SEEN)[0] == pytest.approx(kl[1], rel=1e-5)


def test_the_loss_takes_the_weight_that_has_adapted(make):
    adaptive = make(surrogate="kl_penalty", surrogate_kwargs={"target": 0.01})
    adaptive.kl_controller.value = 6.0
    for _ in same_updates(adaptive, make(surrogate="kl_penalty", surrogate_kwargs={"weight": 6.0})):
        pass


def test_a_pull_adapts_as_a_penalty_does(make):
    """By the same rule and at the same time; the proximal one without a bound is the penalty, in every update."""
    shared: dict[str, Any] = {**TWO_ROLLOUTS, "surrogate_kwargs": {"target": 1e-7}}
    penalty = make(**shared)
    penalty.train()
    shared |= {"surrogate": "troll", "surrogate_kwargs": None, "pull": "proximal", "kl_bound": float("inf")}
    pull = make(**shared, regression_target=1e-7)
    pull.train()
    assert logged(pull, "trust_region/regression_weight") == logged(penalty, WEIGHT) == [1, 1, 2, 2]
    seen = logged(pull, "trust_region/regression_kl")
    assert len(seen) == 2 and seen == pytest.approx(logged(penalty, SEEN), rel=1e-3)


def test_the_other_direction_adapts_to_its_own_divergence(make):
    """What is seen is KL(p ‖ p̃), and not KL(p̃ ‖ p), which the monitor measures."""
    trainer = make(**{**TWO_ROLLOUTS, "surrogate_kwargs": {"target": 1.0}}, learning_rate=0.1)
    trainer.train()
    seen, measured = logged(trainer, SEEN), logged(trainer, "trust_region/kl_before_mean")[1::2]
    assert len(seen) == len(measured) == 2
    for kl, other in zip(seen, measured, strict=True):
        assert kl > 0
        assert kl != pytest.approx(other, rel=0.01)


ADAPTIVE: dict[str, Any] = {"surrogate": "kl_penalty", "surrogate_kwargs": {"target": 1e-6}, "ddp_backend": None}


def test_a_resumed_run_goes_on_with_the_weight(make, tmp_path):
    """Bit for bit, after the weight has changed."""
    results = resuming.interrupted(make, tmp_path, **ADAPTIVE)
    assert [entry[WEIGHT] for entry in resuming.resumed_exactly(results)] == [2, 2]


def test_a_fixed_weight_is_the_settings_in_a_resumed_run_too(make, tmp_path):
    settings = resuming.SETTINGS | {"surrogate": "kl_penalty", "ddp_backend": None, "output_dir": str(tmp_path)}
    make(surrogate_kwargs={"weight": 1.0}, **settings).train()
    trainer = make(surrogate_kwargs={"weight": 5.0}, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(trainer, WEIGHT) == [1, 1, 5, 5]
