"""The learning rate that follows a KL target in verl: what the optimiser uses, logs, saves, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig

from tests.troll.ages import kept_ages
from tests.troll.verl.actor import ACTOR, Actor, as_batch, captured, nested, policy_loss, rollout, trolled
from tests.troll.verl.worker import CASES
from troll import KLTarget
from troll.verl.engine import TrustRegionEngine
from troll.verl.kl_target import STATE, KLTargetScheduler, computes_in_bfloat16
from troll.verl.seam.training import assign
from troll.verl.settings import TrollPolicyLossConfig

#: What the tests' actor ends at, from any start: 1.2e-3. A rollout has three mini-batches, twice.
FOUND = 1.2e-3
TARGET = (*policy_loss("kl_target=0.1"), f"{ACTOR}.ppo_epochs=2")

CONSTANT: dict[str, Any] = {"lr_scheduler_type": "constant", "lr_warmup_steps": 0}
COSINE: dict[str, Any] = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1}


def rollouts(actor: Actor, count: int, batch: TensorDict | None = None, **options: Any) -> dict[str, list[Any]]:
    """The metrics of the updates on so many rollouts."""
    found: dict[str, list[Any]] = {}
    for _ in range(count):
        scored = actor.score(as_batch(rollout()) if batch is None else batch)
        for name, values in actor.update(scored, **{"epochs": 2, **options}).items():
            found.setdefault(name, []).extend(values)
    return found


class Following:
    """An actor with a KL target, and the rates that its optimiser used."""

    def __init__(
        self, learning_rate: float = 100 * FOUND, schedule: dict[str, Any] = CONSTANT, **settings: Any
    ) -> None:
        self.actor: Actor = trolled(True, *TARGET)
        self.engine = self.actor.engine
        self.optimizer = self.engine.optimizer
        self.optimizer.param_groups[0]["initial_lr"] = learning_rate  # of which verl's scheduler is made
        assign(self.engine.optimizer_config, **{"min_lr_ratio": None, **schedule})
        self.actor.reset(ppo_epochs=2, **settings)
        self.rates: list[float] = []
        self.hook = self.optimizer.register_step_pre_hook(lambda *_: self.rates.append(self.rate))

    @property
    def target(self) -> KLTarget:
        return self.engine.lr_scheduler._target

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def state(self) -> dict[str, Any]:
        """That of the controller."""
        return self.engine.lr_scheduler.state_dict()[STATE]

    def rollouts(self, count: int, batch: TensorDict | None = None, **options: Any) -> dict[str, list[Any]]:
        return rollouts(self.actor, count, batch, **options)


@pytest.fixture
def follow() -> Iterator[Callable[..., Following]]:
    made: list[Following] = []

    def follow(**options: Any) -> Following:
        made.append(Following(**options))
        return made[-1]

    yield follow
    for each in made:
        each.hook.remove()


def test_rate_is_found_from_far_below(follow: Any) -> None:
    run = follow(learning_rate=FOUND / 100)
    metrics = run.rollouts(5)
    assert run.rates[0] == pytest.approx(FOUND / 1e4) and run.rates == metrics["trust_region/kl_target/rate"]
    assert all(FOUND / 3 < rate < 3 * FOUND for rate in run.rates[24:])
    wanted = metrics["trust_region/kl_target/wanted"]
    assert wanted[0] == 0 and wanted[5] == pytest.approx(0.1 * math.sqrt(5 / 7)) and wanted == wanted[:6] * 5
    # At a rollout's last update, the KL is near what is wanted.
    measured = metrics["trust_region/kl_target/measured"]
    assert 1 / 4 < measured[-1] / wanted[-1] < 4
    # It is that of a sequence, of which a mini-batch has four.
    tokens = [float(sample.mask.sum()) for sample in rollout()]
    lengths = [sum(part) / sum(each > 0 for each in part) for part in (tokens[:4], tokens[4:8], tokens[8:])]
    floor, kls = metrics["trust_region/kl_target/floor"], metrics["trust_region/kl_before_mean"]
    found = [(measured[update] + floor[update]) / kls[update] for update in range(1, 6)]
    assert found == pytest.approx([*lengths[1:], *lengths], rel=1e-6)


@pytest.mark.parametrize(
    ("mixed_precision", "bfloat16"),
    [(None, True), ({"reduce_dtype": "fp32"}, True), ({"param_dtype": "bf16"}, True), ({"param_dtype": "fp32"}, False)],
)
def test_engine_computes_in_the_dtype_of_fsdp(mixed_precision: dict[str, str] | None, bfloat16: bool) -> None:
    """Whatever its `dtype` is, which only Megatron's engine reads."""
    engine = FSDPEngineConfig(dtype="float32", mixed_precision=mixed_precision)
    assert computes_in_bfloat16(engine) == bfloat16
    assert computes_in_bfloat16(McoreEngineConfig())


def test_bfloat16_is_that_of_the_engine(follow: Any) -> None:
    run = follow()
    assert run.engine._autocast_dtype == torch.float32 and not run.target._bfloat16


def test_schedule_multiplies_the_rate(follow: Any) -> None:
    """verl steps its scheduler once a batch, and logs the rate that the last update used."""
    run = follow(schedule=COSINE)
    metrics = run.rollouts(4)
    alone = super(TrustRegionEngine, run.engine)._build_lr_scheduler(AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    shape = [alone.lr_lambdas[0](step) for step in range(4)]
    found = metrics["trust_region/kl_target/rate"]
    assert shape[:3] == [0, 0.5, 1] and 0 < shape[3] < 1 and len({*found}) > 6
    assert run.rates == pytest.approx([rate * shape[number // 6] for number, rate in enumerate(found)], rel=1e-12)
    assert metrics["lr"] == run.rates[5::6]


#: Kinds of trust regions; "rollout" is that of a rollout that reports.
KINDS: dict[str, dict[str, Any]] = {
    "sequence": CASES["sequence"],
    "penalty": {"pull": "proximal", "kl_bound": math.inf},
    "truncated": {"rollout_top_k": 5},
    "rollout": {"anchor": "rollout", "bypass_mode": True, "rollout_name": "transformers"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rate_follows_with_every_kind_of_trust_region(follow: Any, kind: str) -> None:
    run, batch = follow(learning_rate=FOUND), as_batch(rollout())
    if kind == "rollout":
        run.actor.score(batch)
        batch["old_policies"] = nested(captured(run.engine, batch))
    run.actor.reset(ppo_epochs=2, **KINDS[kind])
    metrics = run.rollouts(1, batch)
    assert "entropy" not in metrics  # verl is not given what it did not ask for
    rates = metrics["trust_region/kl_target/rate"]
    assert run.rates == rates and rates[0] == pytest.approx(FOUND / 100) and rates[5] > 10 * rates[0]
    assert run.state["levels"]["entropy"][2] == 6


def test_age_counts_updates_since_the_weights_were_sent(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = kept_ages(monkeypatch)
    run = follow()
    run.rollouts(2)
    assert ages == [0, 1, 2, 3, 4, 5] * 2
    # Agent loops of several conversations have more mini-batches in some rollouts than in others.
    run.rollouts(1, as_batch(rollout(16)))
    assert run.target.last_age == 7
    run.rollouts(1, as_batch(rollout(8)))
    assert ages[12:] == [*range(8), *range(4)]
    # The next rollout is expected to be as the last one was, in a resumed run too.
    saved = run.engine.lr_scheduler.state_dict()
    run.actor.reset(ppo_epochs=2)
    assert run.target.last_age == 5
    run.engine.lr_scheduler.load_state_dict(saved)
    assert run.target.last_age == 3


def test_age_counts_over_the_batches_of_separate_async(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mini-batch is a batch there, and is scored by the weights that the rollout has."""
    ages = kept_ages(monkeypatch)
    run = follow(trainer_mode="separate_async")
    samples = rollout()
    for start in (0, 4, 8, 0, 4, 8):
        run.rollouts(1, as_batch(samples[start : start + 4]))
    assert ages == [0, 1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize("field", ["advantages", "mask"])
def test_updates_that_teach_nothing_move_nothing(follow: Any, field: str) -> None:
    """A small KL is no reason for a higher rate then."""
    samples = [dataclasses.replace(x, **{field: torch.zeros_like(getattr(x, field))}) for x in rollout()]
    run = follow()
    run.rollouts(1, as_batch(samples))
    assert {*run.state["walked"]} == {0.0} and run.state["rate"] == pytest.approx(FOUND)
    run.rollouts(1)
    assert run.state["walked"][-6:] == run.rates[-6:] and run.rates[-1] != run.rates[0]


@pytest.mark.parametrize(("reward", "moves"), [(0.0, True), (12.0, True), (0.3, False)])
def test_advantages_count_but_for_rounding(follow: Any, reward: float, moves: bool) -> None:
    """An offset of the rewards makes no difference; GRPO makes advantages of 0.029 of equal rewards of 0.3."""
    samples = rollout()
    if not moves:
        samples = [dataclasses.replace(x, advantages=torch.full_like(x.advantages, 0.029)) for x in samples]
    run = follow()
    rewards = [torch.zeros(len(x.response)).index_fill(0, torch.tensor([0]), reward) for x in samples]
    run.rollouts(1, as_batch(samples, rm_scores=rewards))
    assert (min(run.state["walked"]) > 0) == moves and (max(run.state["walked"]) > 0) == moves


def test_more_updates_than_planned_want_no_larger_kl() -> None:
    _, scheduler = scheduled(1e-2)
    means = {"kl_before_mean": 0.01, "length": 4.0, "teaching": 1.0, "entropy": 1.0}
    wanted = [scheduler.update(means)["kl_target/wanted"] for _ in range(32)]
    assert wanted[-1] == pytest.approx(0.1 * math.sqrt(31 / 7))


@pytest.mark.parametrize("of", ["logits", "gradients"])
def test_skipped_update_is_not_walked(follow: Any, of: str) -> None:
    def broken(_module: Any, _inputs: Any, hidden: Tensor) -> Tensor:
        if of == "logits":
            return hidden + torch.nan
        hidden.register_hook(lambda gradient: gradient * torch.inf)
        return hidden

    run = follow()
    run.rollouts(1)
    rate, scored = run.state["rate"], run.actor.score(as_batch(rollout()))
    with run.actor.final_norm.register_forward_hook(broken):
        norms = run.actor.update(scored, epochs=1)["grad_norm"]
    assert not any(map(math.isfinite, norms))
    assert run.state["walked"][-3:] == [0.0] * 3 and min(run.state["walked"][:-3]) > 0
    assert of == "gradients" or run.state["rate"] == rate  # no token has a KL


@pytest.mark.parametrize(("least", "judged"), [(0.0, True), (-1.0, False)])
def test_entropy_and_rewards_of_at_least_zero_are_watched(follow: Any, least: float, judged: bool) -> None:
    """The rewards of verl's batches; a sequence without a token that counts is one of its fillings."""
    samples = rollout()
    samples[1] = dataclasses.replace(samples[1], mask=torch.zeros_like(samples[1].mask))
    rewards: list[Tensor] = []
    for number, sample in enumerate(samples):
        values = torch.zeros(len(sample.response))
        values[-1] = 100.0 if number == 1 else least if number % 4 == 2 else 1.0
        rewards.append(values)
    run = follow()
    run.rollouts(1, as_batch(samples, rm_scores=rewards), epochs=1)
    levels = run.state["levels"]
    assert levels["entropy"][2] == 3 and 0 < levels["entropy"][0] < math.log(99)
    assert ("success" in levels) == judged
    if judged:  # two of three in the first mini-batch, and three of four in the others
        assert levels["success"][::2] == [pytest.approx((2 / 3 + 3 / 4 + 3 / 4) / 3), 3]


def test_target_changes_nothing_but_the_rate(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, if the rate does not move; and without a target nothing is changed."""
    monkeypatch.setattr(KLTarget, "update", lambda self, *_, schedule, **__: self.rate * schedule)
    schedule = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 0}
    with_target = follow(learning_rate=1.0, schedule=schedule)
    ours = with_target.rollouts(2)
    parameters = with_target.actor.parameters()
    plain: Actor = trolled(
        True, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.01", f"{ACTOR}.optim.lr_scheduler_type=cosine"
    )
    assert type(plain.engine.lr_scheduler) is LambdaLR and plain.engine.kl_target is None
    theirs = rollouts(plain, 2)
    for name, value in plain.parameters().items():
        assert torch.equal(parameters[name], value), name
    names = ("measured", "wanted", "floor", "rate")
    assert ours.keys() - theirs.keys() == {f"trust_region/kl_target/{name}" for name in names}
    trained = {name for name in theirs if not name.startswith("perf/") and name not in ("mfu", "lr")}
    assert {name: ours[name] for name in trained} == {name: theirs[name] for name in trained}


def test_checkpoints_with_and_without_a_target_go_on(follow: Any) -> None:
    run = follow(schedule=COSINE)
    run.rollouts(1)
    saved = run.engine.lr_scheduler.state_dict()
    plain = LambdaLR(AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0), lambda step: 1.0)
    plain.load_state_dict(saved)
    assert plain.last_epoch == 1 and plain.get_last_lr() == run.engine.lr_scheduler.scheduler.get_last_lr()
    run.actor.reset(ppo_epochs=2)
    run.engine.lr_scheduler.load_state_dict({name: value for name, value in saved.items() if name != STATE})
    assert run.state["rate"] == pytest.approx(FOUND) and run.state["walked"] == []
    # The schedule goes on, and the optimiser has its rate before the first update.
    assert run.rate == pytest.approx(FOUND * plain.get_last_lr()[0] / (100 * FOUND))


SETTINGS = TrollPolicyLossConfig(kl_target=0.1, train_batch_size=8)


def scheduled(*rates: Any, **options: Any) -> tuple[AdamW, KLTargetScheduler]:
    """An optimiser with a group for each rate, and its scheduler."""
    optimizer = AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], foreach=False)
    return optimizer, KLTargetScheduler(LambdaLR(optimizer, lambda step: 1 / (1 + step)), SETTINGS, **options)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    optimizer, scheduler = scheduled(1e-3, 1e-2, 0.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-5, 1e-4, 0.0])
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-6, 5e-5, 0.0])
    assert scheduler.get_last_lr() == pytest.approx([1e-5, 1e-4, 0.0])


def test_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(1e-2, dtype=torch.float64)
    optimizer, scheduler = scheduled(rate)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(1e-4)
    assert scheduler.get_last_lr() == pytest.approx([1e-4])


def test_warnings_are_logged_by_one_process(caplog: pytest.LogCaptureFixture) -> None:
    for warns in (True, False):
        _, scheduler = scheduled(1e-2, warns=warns)
        scheduler._target._tell("held", "50% of what is wanted")
    assert [record.getMessage() for record in caplog.records] == ["50% of what is wanted"]


def test_scheduler_without_functions_is_refused() -> None:
    optimizer, _ = scheduled(1e-2)
    with pytest.raises(ValueError, match=r"multiplies the rates of LambdaLR, .* is StepLR: set kl_target=null"):
        KLTargetScheduler(StepLR(optimizer, 1), SETTINGS)
