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
from tests.troll.trl.test_ungraded import InTurn, Never
from troll import KLTarget
from troll.trl.callback import KL_TARGET, STATE
from troll.trl.kl_target import SETTLED_ROLLOUTS
from troll.trl.monitor import Watch

#: Rollouts of eight updates, of four completions each.
TARGET: dict[str, Any] = {"kl_target": 0.1, "steps_per_generation": 8, "learning_rate": 1e-2, "max_steps": 16}

#: What the tiny model ends at, from any start: 2e-4.
FOUND = 2e-4


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
    "cosine, warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "least rate": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_multiplies_the_rate_that_was_found(make, name):
    """In the step that was measured, and in the log."""
    trainer, keep = run(make, max_steps=8, **SCHEDULES[name])
    args = trainer.args
    alone = get_scheduler(
        args.lr_scheduler_type,
        AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0),
        args.warmup_steps,
        args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    shape = [alone.lr_lambdas[0](step) for step in range(args.max_steps)]
    assert len({*keep.found}) > 2  # it was moved
    assert keep.rates == [
        [pytest.approx(rate * part, rel=1e-12)] * 2 for rate, part in zip(keep.found, shape, strict=True)
    ]
    assert tiny.logged(trainer, "learning_rate") == [rates[0] for rates in keep.rates]
    assert trainer.lr_scheduler.get_last_lr() == [group["lr"] for group in trainer.optimizer.param_groups]


def test_groups_keep_the_ratio_of_their_rates(make):
    model = make.model()
    optimizer = groups(model, 1e-3, 1e-2, 0.0)
    _, keep = run(make, model=model, optimizers=(optimizer, None), lr_scheduler_type="linear", max_steps=8)
    for slow, fast, frozen in keep.rates:
        assert slow == pytest.approx(fast / 10) and frozen == 0.0
    # The search begins at a hundredth of the largest.
    assert keep.rates[0][1] == pytest.approx(1e-4)


def test_a_rate_that_is_a_tensor_stays_one(make):
    model = make.model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), foreach=False)
    _, keep = run(make, model=model, optimizers=(optimizer, None), max_steps=4)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert [rates[0] for rates in keep.rates] == pytest.approx(keep.found)


def test_a_users_scheduler_is_multiplied_once_in_two_trainings(make):
    model = make.model()
    optimizer = groups(model, 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    trainer, _ = run(make, model=model, optimizers=(optimizer, scheduler), max_steps=4)
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * trainer.kl_target_rate.rate)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_micro_batches_of_an_update_count_as_one(make, surrogate):
    """Their tokens together have the KL of the whole update, which is read for a clip, too."""
    shared: dict[str, Any] = {"loss_type": "dr_grpo", "surrogate": surrogate}
    trainer, whole = run(make, **shared)
    wanted = tiny.logged(trainer, "trust_region/kl_target/wanted")
    assert len(wanted) == 16 and wanted[0] == 0 and wanted[7] == pytest.approx(0.1) and wanted[:8] == wanted[8:]
    assert whole.found[0] == 1e-4 and FOUND / 3 < whole.found[-1] < 3 * FOUND
    halves: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    _, split = run(make, steps_per_generation=16, **{**shared, **halves})
    assert split.found == pytest.approx(whole.found[:4], rel=1e-3) and len({*split.found}) > 2


@pytest.mark.parametrize("mask_truncated_completions", [False, True])
def test_the_kl_is_that_of_a_completion_that_counts(make, mask_truncated_completions):
    trainer, _ = run(make, max_steps=8, mask_truncated_completions=mask_truncated_completions)
    compared = 0
    for log, batch in zip(trainer.state.log_history, trainer._buffered_inputs, strict=False):
        lengths = [sum(row) for row in batch["completion_mask"].tolist() if sum(row)]
        assert ("trust_region/kl_target/measured" in log) == bool(lengths)
        if lengths:
            mean = log["trust_region/kl_before_mean"]
            assert log["trust_region/kl_target/measured"] == pytest.approx(mean * sum(lengths) / len(lengths), rel=1e-5)
            compared += mean > 0
    assert compared > 2


@pytest.mark.parametrize(
    ("dtype", "bf16", "bfloat16"), [(None, False, False), (None, True, True), ("bfloat16", False, True)]
)
def test_bfloat16_is_known(make, dtype, bf16, bfloat16):
    model = make.model()
    if dtype is not None:
        model.to(getattr(torch, dtype))
    trainer = make(model=model, **{**TARGET, "max_steps": 1, "bf16": bf16})
    trainer.train()
    assert trainer.kl_target_rate._target._bfloat16 == bfloat16


def test_the_age_counts_updates_since_sampling_over_iterations(make, monkeypatch):
    ages = kept_ages(monkeypatch)
    batches: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run(make, steps_per_generation=4, num_iterations=2, max_steps=8, **batches)
    assert ages == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_fixed_rate_equals_a_run_without_a_target(make, monkeypatch):
    """Bit by bit: the target changes nothing but the rate."""
    monkeypatch.setattr(KLTarget, "update", lambda self, *_, schedule, **__: self.rate * schedule)
    monkeypatch.setattr(KLTarget, "used", lambda self, rate: None)
    shared: dict[str, Any] = {"lr_scheduler_type": "linear", "max_steps": 4}
    with_target, _ = run(make, learning_rate=1.0, **shared)
    without = make(**{**TARGET, **shared, "kl_target": None, "learning_rate": 0.01})
    without.train()
    assert without.kl_target_rate is None and not hasattr(without.lr_scheduler.lr_lambdas[0], "schedule")
    for ours, theirs in zip(with_target.state.log_history[:-1], without.state.log_history[:-1], strict=True):
        names = theirs.keys() - {"step_time"}
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    tiny.assert_same_gradients(tiny.parameters(with_target.model), tiny.parameters(without.model), 0)


# Updates that say nothing


def walk(trainer: Any) -> list[float]:
    """The rates that the controller counts as used."""
    return trainer.kl_target_rate.state_dict()["walked"]


@pytest.mark.filterwarnings("ignore:.*could not be judged")
@pytest.mark.parametrize(
    ("rewards", "levels"),
    [
        (lambda completion_ids, **_: [1.0] * len(completion_ids), {"entropy", "success"}),
        # Of 0.3, the mean of eight is rounded: TRL's advantages are not 0.
        (lambda completion_ids, **_: [0.3] * len(completion_ids), {"entropy", "success"}),
        ([Never(), tiny.reward], set()),
    ],
    ids=["all equal", "equal and rounded", "not judged"],
)
def test_rewards_without_an_advantage_move_nothing(make, rewards, levels):
    """A small KL is then not a reason for a higher rate; and of what was not judged there is no entropy or success."""
    trainer, keep = run(make, reward_funcs=rewards, max_steps=4, num_generations=8)
    assert {*keep.found} == {1e-4} and {*walk(trainer)} == {0.0}
    assert trainer.kl_target_rate.state_dict()["levels"].keys() == levels


@pytest.mark.filterwarnings("ignore:.*could not be judged")
@pytest.mark.parametrize(("deepspeed", "parts"), [(False, [1, 1, 0, 0]), (True, [1, 1, 0.9, 0.81])])
def test_an_update_without_a_judged_token_is_walked_by_momentum_under_deepspeed(make, deepspeed, parts):
    """DeepSpeed has made it when it could be skipped."""

    class Pretend(TrainerCallback):
        """That DeepSpeed trains, while the trainer's callback decides."""

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer.is_deepspeed_enabled = deepspeed

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer.is_deepspeed_enabled = False

    keep, rewards = Keep(), [InTurn(True, False), tiny.reward]
    settings = {**TARGET, "steps_per_generation": 2, "max_steps": 4}
    trainer = keep.trainer = make(callbacks=[keep, Pretend()], reward_funcs=rewards, **settings)
    trainer.train()
    assert walk(trainer) == [pytest.approx(part * rate) for part, (rate, *_) in zip(parts, keep.rates, strict=True)]


def test_a_step_that_the_optimiser_skips_is_not_walked(make, monkeypatch):
    """As in fp16, after an overflow."""
    trainer = make(**{**TARGET, "max_steps": 4})
    skipped = iter([False, True, False, True])
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", property(lambda _: now[0]))
    now = [False]

    class Skip(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            now[0] = next(skipped)

    trainer.add_callback(Skip())
    trainer.train()
    assert [rate == 0.0 for rate in walk(trainer)] == [False, True] * 2


@pytest.mark.parametrize(("rewards", "judged"), [([0.0, 1.0, 1.0, 0.5], True), ([-1.0, 1.0, 1.0, 0.5], False)])
def test_entropy_is_watched_and_rewards_that_are_not_negative(make, rewards, judged):
    trainer, _ = run(make, reward_funcs=lambda completion_ids, **_: rewards * (len(completion_ids) // 4), max_steps=4)
    levels = trainer.kl_target_rate.state_dict()["levels"]
    assert ("success" in levels) == judged
    assert levels["entropy"][2] == 4
    if judged:
        assert levels["success"][0] == pytest.approx(0.625)


# Checkpoints


def test_a_resumed_run_is_bit_by_bit_one_without_a_break(make, tmp_path):
    """With all that the controller has learnt in five rollouts."""
    settings: dict[str, Any] = {"kl_target": 0.1, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    settings["ddp_backend"] = None
    runs = interrupted(make, tmp_path, **{**settings, "save_steps": 10, "max_steps": 14})
    found = {entry["trust_region/kl_target/rate"] for entry in resumed_exactly(runs)}
    assert len(found) > 2 and min(found) > 2e-4  # it did not begin anew


def test_state_is_complete_before_any_callback_ends_the_step(make):
    """Transformers' own callbacks come first, and may save there (`enable_jit_checkpoint`)."""
    walked: list[int] = []

    class First(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            walked.append(len(state.stateful_callbacks[STATE][KL_TARGET]["walked"]))

    trainer = make(**{**TARGET, "max_steps": 3})
    trainer.callback_handler.callbacks.insert(0, First())
    trainer.train()
    assert walked == [1, 2, 3]


def test_next_training_without_a_target_has_none(make):
    trainer, _ = run(make, max_steps=2)
    trainer.args.kl_target = None
    trainer.callback_handler.pop_callback(Keep)
    trainer.train()
    assert trainer.kl_target_rate is None


def test_a_checkpoint_without_a_state_begins_the_search(make, tmp_path):
    settings: dict[str, Any] = {**TARGET, "save_strategy": "steps", "save_steps": 8, "output_dir": str(tmp_path)}
    make(**{**settings, "max_steps": 8, "kl_target": None}).train()
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert KL_TARGET not in state["stateful_callbacks"][STATE]
    forget(tmp_path / "checkpoint-8")
    keep = Keep()
    trainer = keep.trainer = make(callbacks=[keep], **{**settings, "max_steps": 9})
    trainer.train(resume_from_checkpoint=True)
    assert keep.rates[0] == [pytest.approx(1e-4)] * 2


def test_checkpoint_has_the_scheduler_of_a_run_without_target(make, tmp_path):
    run(make, output_dir=str(tmp_path), max_steps=8, save_strategy="steps", save_steps=8, lr_scheduler_type="linear")
    trainer = make(**{**TARGET, "kl_target": None, "max_steps": 12, "lr_scheduler_type": "linear"})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    # From the second step on, what the schedule alone says.
    expected = [1e-2 * (12 - step) / 12 for step in range(9, 12)]
    assert tiny.logged(trainer, "learning_rate")[-3:] == pytest.approx(expected)


# Refusals and warnings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_target": 0.0}, "kl_target must be finite and above 0, got 0.0"),
        ({"kl_target": float("inf")}, "kl_target must be finite and above 0, got inf"),
        ({"updates_per_rollout": 1}, "kl_target needs updates_per_rollout of at least 2, got 1"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "must be a multiple of gradient_accumulation_s",
        ),
        ({"learning_rate": 0.0}, "learning_rate, which must be above 0, got 0.0"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "lr_scheduler_type 'reduce_lr_on_p"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "lr_scheduler_type 'greedy'"),
        *(({"optim": name}, f"optim '{name}'") for name in ("lomo", "adalomo", "galore_adamw_layerwise")),
    ],
)
def test_what_no_kl_can_set_the_rate_of_is_refused_by_name(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**{"kl_target": 0.1, **settings})
    if settings.keys() - {"kl_target"}:
        config(**settings)


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


def test_weights_too_coarse_for_the_found_rate_are_warned_about(make, monkeypatch):
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


@pytest.mark.parametrize(("kl_target", "named"), [(None, "learning_rate (now 0.01)"), (0.1, "kl_target (now 0.1)")])
def test_advice_names_what_sets_the_rate(config, kl_target, named):
    watch = Watch(config(kl_target=kl_target, learning_rate=0.01))
    said = [watch.observe(9, 10, 1.0, 0.05, moved=True, last=True) for _ in range(2)]
    assert said[1] is not None and f"lower {named} or updates_per_rollout" in said[1]
