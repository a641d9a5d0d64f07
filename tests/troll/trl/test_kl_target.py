"""The learning rate that follows a KL target: what is written into the optimiser, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import TrainerCallback, get_scheduler

from tests.troll.ages import kept_ages
from tests.troll.trl import tiny
from tests.troll.trl.resuming import forget, interrupted, resumed_exactly
from tests.troll.trl.test_ungraded import InTurn
from troll import KLTarget
from troll.trl import TrollConfig
from troll.trl.callback import KL_TARGET, STATE
from troll.trl.kl_target import SETTLED_ROLLOUTS
from troll.trl.monitor import Watch
from troll.trl.surrogates import SURROGATES

#: Rollouts of eight updates, of four completions each.
TARGET: dict[str, Any] = {"kl_target": 0.03, "steps_per_generation": 8, "learning_rate": 1e-2, "max_steps": 16}

#: What the tiny model ends at, from any start: 3e-4.
FOUND = 3e-4


class Keep(TrainerCallback):
    """The optimiser's rates, and the rate before the schedule, as every step of the optimiser finds them."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.rates: list[list[float]] = []
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        self.found.append(self.trainer.kl_target_rate.rate)


def run(make: Any, *trainer_class: type, **settings: Any) -> tuple[Any, Keep]:
    """A training with a KL target, and its rates."""
    keep = Keep()
    trainer = keep.trainer = make(*trainer_class, callbacks=[keep], **{**TARGET, **settings})
    trainer.train()
    return trainer, keep


def groups(model: Any, *rates: float) -> AdamW:
    """An optimiser with a group of parameters for each rate."""
    parameters = list(model.parameters())
    return AdamW([{"params": parameters[place :: len(rates)], "lr": rate} for place, rate in enumerate(rates)])


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"lr_scheduler_type": "linear"},
    "cosine, warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 4},
    "least rate": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_multiplies_the_rate_that_was_found(make, name):
    """In the step that was measured, and in the log."""
    trainer, keep = run(make, **SCHEDULES[name])
    args = trainer.args
    alone = get_scheduler(
        args.lr_scheduler_type,
        AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0),
        args.warmup_steps,
        args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    shape = [alone.lr_lambdas[0](step) for step in range(args.max_steps)]
    assert len({*keep.found}) > 4  # it was moved
    assert keep.rates == [
        [pytest.approx(rate * part, rel=1e-12)] * 2 for rate, part in zip(keep.found, shape, strict=True)
    ]
    assert tiny.logged(trainer, "learning_rate") == [rates[0] for rates in keep.rates]
    assert trainer.lr_scheduler.get_last_lr() == [group["lr"] for group in trainer.optimizer.param_groups]


def test_groups_keep_the_ratio_of_their_rates(make):
    model = make.model()
    optimizer = groups(model, 1e-3, 1e-2, 0.0)
    _, keep = run(make, model=model, optimizers=(optimizer, None), lr_scheduler_type="linear")
    for slow, fast, frozen in keep.rates:
        assert slow == pytest.approx(fast / 10) and frozen == 0.0
    # The search begins at a hundredth of the largest.
    assert keep.rates[0][1] == pytest.approx(1e-4)


def test_a_rate_that_is_a_tensor_stays_one(make):
    model = make.model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), foreach=False)
    _, keep = run(make, model=model, optimizers=(optimizer, None))
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert [rates[0] for rates in keep.rates] == pytest.approx(keep.found)


def test_a_scheduler_of_the_user_is_multiplied_once_however_often_it_is_trained_with(make):
    model = make.model()
    optimizer = groups(model, 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    trainer, _ = run(make, model=model, optimizers=(optimizer, scheduler), max_steps=8)
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * trainer.kl_target_rate.rate)


def test_a_start_ten_thousand_times_too_low_finds_the_rate(make):
    """Within the third rollout; from a start that is right, it stays there."""
    settings: dict[str, Any] = {"max_steps": 40}
    _, low = run(make, learning_rate=FOUND / 1e4 * 100, **settings)
    _, right = run(make, learning_rate=FOUND * 100, **settings)
    assert low.rates[0] == pytest.approx([FOUND / 1e4] * 2)
    for keep in (low, right):
        assert all(FOUND / 3 < rates[0] < 3 * FOUND for rates in keep.rates[24:])


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("batches", [1, 2])
def test_the_rate_follows_with_every_surrogate_and_any_number_of_micro_batches(make, surrogate, batches):
    size = {"per_device_train_batch_size": 4 // batches, "gradient_accumulation_steps": batches}
    size["steps_per_generation"] = 8 * batches
    trainer, keep = run(make, surrogate=surrogate, **size)
    kls = tiny.logged(trainer, "trust_region/kl_before_mean")
    wanted = tiny.logged(trainer, "trust_region/kl_target/wanted")
    assert len(kls) == len(wanted) == 16
    assert wanted[:8] == wanted[8:] and wanted[0] == 0 and wanted[7] == pytest.approx(0.03)
    assert keep.found[0] == 1e-4 and FOUND / 3 < keep.found[-1] < 3 * FOUND


def test_micro_batches_of_an_update_count_as_one(make):
    """Their tokens together have the KL of the whole update."""
    shared: dict[str, Any] = {"loss_type": "dr_grpo"}
    _, whole = run(make, **shared)
    halves: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    _, split = run(make, steps_per_generation=16, **{**shared, **halves})
    assert split.found == pytest.approx(whole.found, rel=1e-3)
    assert len({*whole.found}) > 4


def test_the_age_counts_updates_since_sampling_in_every_iteration_over_a_rollout(make, monkeypatch):
    ages = kept_ages(monkeypatch)
    batches: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run(make, steps_per_generation=4, num_iterations=2, max_steps=8, **batches)
    assert ages == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_rate_that_does_not_move_is_that_of_a_run_without_a_target(make, monkeypatch):
    """Bit by bit: the target changes nothing but the rate."""
    monkeypatch.setattr(KLTarget, "update", lambda self, *_, schedule, **__: self.rate * schedule)
    monkeypatch.setattr(KLTarget, "used", lambda self, rate: None)
    with_target, _ = run(make, learning_rate=1.0, lr_scheduler_type="linear")
    without = make(**{**TARGET, "kl_target": None, "learning_rate": 0.01, "lr_scheduler_type": "linear"})
    scheduler = without.create_scheduler(1, without.create_optimizer())
    functions = [*scheduler.lr_lambdas]
    without.lr_scheduler, without.optimizer = None, None
    without.train()
    assert without.kl_target_rate is None and type(without.lr_scheduler.lr_lambdas[0]) is type(functions[0])
    for ours, theirs in zip(with_target.state.log_history[:-1], without.state.log_history[:-1], strict=True):
        assert {name: ours[name] for name in theirs if name != "step_time"} == {
            name: theirs[name] for name in theirs if name != "step_time"
        }
    tiny.assert_same_gradients(tiny.parameters(with_target.model), tiny.parameters(without.model), 0)


# Updates that say nothing


def walk(trainer: Any) -> list[float]:
    """The rates that the controller counts as used."""
    return trainer.kl_target_rate.state_dict()["walked"]


def test_rewards_that_are_all_equal_move_nothing(make):
    """Without an advantage, a small KL is not a reason for a higher rate."""
    trainer, keep = run(make, reward_funcs=lambda completion_ids, **_: [1.0] * len(completion_ids))
    assert {*keep.found} == {1e-4} and {*walk(trainer)} == {0.0}


@pytest.mark.filterwarnings("ignore:.*could not be judged")
def test_updates_without_a_judged_token_move_nothing(make):
    trainer, keep = run(make, reward_funcs=[InTurn(False, True), tiny.reward])
    assert {*keep.found[:9]} == {1e-4} and {*walk(trainer)[:8]} == {0.0}
    assert keep.found[-1] > 1e-4 and min(walk(trainer)[8:]) > 0


def test_a_step_that_the_optimiser_skips_is_not_walked(make, monkeypatch):
    """As in fp16, after an overflow."""
    trainer = make(**TARGET)
    skipped = iter([False, True, False, True] * 4)
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", property(lambda _: now[0]))
    now = [False]

    class Skip(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            now[0] = next(skipped)

    trainer.add_callback(Skip())
    trainer.train()
    assert [rate == 0.0 for rate in walk(trainer)] == [False, True] * 8


@pytest.mark.parametrize(("rewards", "judged"), [([0.0, 1.0, 1.0, 0.5], True), ([-1.0, 1.0, 1.0, 0.5], False)])
def test_entropy_is_watched_and_rewards_where_half_of_a_mean_says_something(make, rewards, judged):
    trainer, _ = run(make, reward_funcs=lambda completion_ids, **_: rewards * (len(completion_ids) // 4), max_steps=8)
    levels = trainer.kl_target_rate.state_dict()["levels"]
    assert ("success" in levels) == judged
    assert levels["entropy"][2] == 8
    if judged:
        assert levels["success"][0] == pytest.approx(0.625)


# Checkpoints


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_resumed_run_is_bit_by_bit_one_without_a_break(make, tmp_path, schedule):
    """With all that the controller has learnt in five rollouts."""
    settings: dict[str, Any] = {"kl_target": 0.1, "learning_rate": 1e-2, "lr_scheduler_type": schedule}
    settings["ddp_backend"] = None
    runs = interrupted(make, tmp_path, **{**settings, "save_steps": 10, "max_steps": 16})
    found = {entry["trust_region/kl_target/rate"] for entry in resumed_exactly(runs)}
    assert len(found) > 2 and min(found) > 2e-4  # it did not begin anew


def test_a_checkpoint_without_a_state_begins_the_search(make, tmp_path):
    settings: dict[str, Any] = {**TARGET, "save_strategy": "steps", "save_steps": 8, "output_dir": str(tmp_path)}
    make(**{**settings, "max_steps": 8, "kl_target": None}).train()
    checkpoint = tmp_path / "checkpoint-8"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert KL_TARGET not in state["stateful_callbacks"][STATE]
    forget(checkpoint)
    keep = Keep()
    trainer = keep.trainer = make(callbacks=[keep], **settings)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert keep.rates[0] == [pytest.approx(1e-4)] * 2


def test_a_checkpoint_has_the_scheduler_of_a_run_without_a_target(make, tmp_path):
    run(make, output_dir=str(tmp_path), max_steps=8, save_strategy="steps", save_steps=8, lr_scheduler_type="linear")
    trainer = make(**{**TARGET, "kl_target": None, "max_steps": 16, "lr_scheduler_type": "linear"})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    # From the second step on, what the schedule alone says.
    expected = [1e-2 * (16 - step) / 16 for step in range(9, 16)]
    assert tiny.logged(trainer, "learning_rate")[-7:] == pytest.approx(expected)


# Refusals and warnings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_target": 0.0}, "kl_target must be finite and above 0, got 0.0"),
        ({"kl_target": -1.0}, "kl_target must be finite and above 0, got -1.0"),
        ({"kl_target": float("inf")}, "kl_target must be finite and above 0, got inf"),
        ({"kl_target": float("nan")}, "kl_target must be finite and above 0, got nan"),
        ({"updates_per_rollout": 1}, "kl_target needs updates_per_rollout of at least 2, got 1"),
        ({"steps_per_generation": 1}, "kl_target needs updates_per_rollout of at least 2, got 1"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "must be a multiple of gradient_accumulation_s",
        ),
        ({"learning_rate": 0.0}, "kl_target begins its search at learning_rate, which must be above 0, got 0.0"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "lr_scheduler_type 'reduce_lr_on_p"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "lr_scheduler_type 'greedy'"),
        ({"optim": "lomo"}, "optim 'lomo'"),
        ({"optim": "adalomo"}, "optim 'adalomo'"),
        ({"optim": "galore_adamw_layerwise"}, "optim 'galore_adamw_layerwise'"),
    ],
)
def test_what_no_kl_can_set_the_rate_of_is_refused_by_name(tmp_path, settings, message):
    plain: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=message):
        TrollConfig(**{**plain, "kl_target": 0.03, **settings})
    if settings.keys() - {"kl_target"}:
        TrollConfig(**plain, **settings)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_without_functions_is_refused_before_a_step(make, wrapped):
    """Also within accelerate's wrapper, as one of DeepSpeed's own is."""
    model = make.model()
    before, optimizer = tiny.parameters(model), groups(model, 1e-2)
    scheduler: Any = StepLR(optimizer, 1)
    scheduler = SimpleNamespace(scheduler=scheduler) if wrapped else scheduler
    trainer = make(model=model, optimizers=(optimizer, scheduler), **TARGET)
    with pytest.raises(ValueError, match="a LambdaLR, and the scheduler is StepLR: set lr_scheduler_type, and leave"):
        trainer.train()
    assert not tiny.changed(before, model)


def test_weights_too_coarse_for_the_rate_that_was_found_are_warned_about(make, monkeypatch):
    """Not for the start, which says nothing."""
    model = make.model()
    asked: list[float] = []
    monkeypatch.setattr("troll.trl.checks.warn_about_precision", lambda accelerator, model, rate: asked.append(rate))
    trainer = make(model=model, **{**TARGET, "steps_per_generation": 2, "max_steps": 2 * SETTLED_ROLLOUTS + 2})
    assert asked == []
    trainer.train()
    (rate,) = asked
    assert rate == tiny.logged(trainer, "trust_region/kl_target/rate")[2 * SETTLED_ROLLOUTS - 1]
    make(**{**TARGET, "kl_target": None})
    assert asked == [rate, 1e-2]


@pytest.mark.parametrize(("kl_target", "named"), [(None, "learning_rate (now 0.01)"), (0.03, "kl_target (now 0.03)")])
def test_advice_names_what_sets_the_rate(tmp_path, kl_target, named):
    args: Any = TrollConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, kl_target=kl_target, learning_rate=0.01
    )
    watch = Watch(args)
    said = [watch.observe(9, 10, 1.0, 0.05, moved=True, last=True) for _ in range(2)]
    assert said[1] is not None and f"lower {named} or updates_per_rollout" in said[1]
