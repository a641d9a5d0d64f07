"""The learning rate that follows a KL target, with policies whose KL grows with the rates in known ways."""

import copy
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import troll
from troll.trust_region.rate import BFLOAT16, GROWTH, START, far_growth, mean, walk_of, wanted_kl

TARGET = 0.03
#: The constant rate with which the KL in a rollout's last update is the wanted one.
RIGHT = 1e-4
#: Updates per rollout and staleness. In the last one, rollouts are up to 128 updates old.
SHORT, USUAL, LONG, STALE = (2, 0), (8, 0), (32, 0), (8, 121)
SCALES = [SHORT, USUAL, LONG, STALE]
#: Each of them under one of the laws.
LAW_OF_SCALE = [
    ("sum of rate^1.5", SHORT),
    ("sum of rate^2", USUAL),
    ("square of the sum", LONG),
    ("square of the sum", STALE),
]
#: KLs of a walk of given rates, up to a factor.
LAWS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum of rate^1.5": lambda rates: sum(rate**1.5 for rate in rates),
    "sum of rate^2": lambda rates: sum(rate**2 for rate in rates),
    "square of the sum": lambda rates: sum(rates) ** 2,
}


class KLTarget(troll.KLTarget):
    """The control of a policy whose sequences have one token, if nothing else is said."""

    def update(self, kl: float, age: float, *, length: float = 1.0, **others: Any) -> float:
        return super().update(kl, age, length=length, **others)


@dataclass
class Policy:
    """A policy that is trained by a simulated loop, and what the loop has seen of it.

    Attributes:
        law: How its KL grows.
        scale: Updates per rollout, and staleness.
        start: The first rate, in right ones.
        noise: The standard deviation of the logarithm of what is measured.
        floor: The KL that is measured on top, before noise.
        rounding: The same, but not at age 0, where equal policies are computed equally; a mean over all tokens, so with
            less noise.
        length: The tokens of a sequence; None for so many that there can be so much rounding.
        most: The KL approaches this.
        target: The wanted KL.
        factor: What the KL is multiplied by; changes are a change of the policy.
    """

    law: str = "square of the sum"
    scale: tuple[int, int] = USUAL
    start: float = 1.0
    seed: int = 0
    noise: float = 0.3
    floor: float = 0.0
    rounding: float = 0.0
    rounding_noise: float = 0.02
    length: float | None = None
    bfloat16: bool = False
    most: float = math.inf
    target: float = TARGET
    factor: float = 1.0
    entropy: float | None = None
    success: float | Callable[[], float] | None = None
    #: Whether an update has a gradient; else Adam's momentum moves the policy.
    moves: Callable[[int], bool] = lambda update: True
    #: The rates that were used, the same before the schedule, and the KLs without noise and floor.
    used: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.updates, self.staleness = self.scale
        self.momentum = 0.0
        self.control = KLTarget(
            self.target,
            updates_per_rollout=self.updates,
            staleness=self.staleness,
            learning_rate=self.start * RIGHT / START,
            bfloat16=self.bfloat16,
            warn=self.warnings.append,
        )

    @property
    def last_kl(self) -> float:
        """The KL that is wanted in a rollout's last update."""
        return self.control.wanted(self.control.last_age)

    def measure(self, kl: float) -> float:
        """A KL as a batch shows it."""
        rounding = self.rounding * (1 + self.random.gauss(0, self.rounding_noise)) if kl > 0 else 0.0
        return rounding + sum(
            part * math.exp(self.random.gauss(0, self.noise)) for part in (kl, self.floor) if part > 0
        )

    def train(self, rollouts: int, schedule: Callable[[int], float] = lambda update: 1.0) -> "Policy":
        """Makes the updates of some rollouts; a schedule is a function of the update's number."""
        law = LAWS[self.law]
        for update in range(len(self.used), len(self.used) + rollouts * self.updates):
            # Until enough updates have been made, asynchronous rollouts are of the first policy.
            age = min(update, self.staleness + update % self.updates)
            walk = self.used[len(self.used) - age :]
            kl = self.factor * self.last_kl * law(walk) / law([RIGHT] * self.control.last_age)
            kl = kl if self.most == math.inf else self.most * kl / (self.most + kl)
            self.kls.append(kl)
            success = self.success() if callable(self.success) else self.success
            moves = self.moves(update)
            self.momentum = 1.0 if moves else 0.9 * self.momentum
            length = self.length or max(1.0, 1.5 * self.rounding / BFLOAT16)
            rate = self.control.update(
                self.measure(kl) / length,
                age,
                length=length,
                schedule=schedule(update),
                moves=moves,
                entropy=self.entropy,
                success=success,
            )
            self.used.append(self.momentum * rate)
            self.rates.append(self.control.rate)
        return self


def spread(rates: Sequence[float]) -> float:
    return max(rates) / min(rates)


@pytest.mark.parametrize("start", [1e-4, 1.0, 10.0])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("law", LAWS)
def test_rate_is_found_and_kept(law, scale, start):
    policy = Policy(law, scale, start).train(60)
    found = 3 if scale in (USUAL, LONG) else 18
    late = policy.rates[(found - 1) * policy.updates :]
    assert min(late) > RIGHT / 2 and max(late) < RIGHT * 2
    assert spread(policy.rates[30 * policy.updates :]) < 2
    # A first step that is ten times too long cannot be undone, and nothing much worse follows it.
    assert max(policy.kls) < 3 * max(policy.last_kl, policy.kls[1])
    assert max(policy.kls) < 50 * TARGET
    if start < 1:
        assert max(policy.rates) < 4 * RIGHT
    assert not policy.warnings


SCHEDULES: dict[str, Callable[[float], float]] = {
    "warm-up": lambda part: min(10 * part, 1.0),
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "warm-up and cosine": lambda part: min(10 * part, 1.0) * (1 + math.cos(math.pi * part)) / 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("law", "scale"), LAW_OF_SCALE)
def test_schedule_keeps_its_shape(law, scale, schedule):
    rollouts = 60
    policy = Policy(law, scale)
    values = [SCHEDULES[schedule](update / (rollouts * policy.updates)) for update in range(rollouts * policy.updates)]
    policy.train(rollouts, values.__getitem__)
    assert policy.used == pytest.approx([rate * value for rate, value in zip(policy.rates, values, strict=True)])
    # A control that undid the schedule would raise the rate tenfold where the schedule is a tenth.
    late = range(20 * policy.updates, rollouts * policy.updates)
    usual = mean(Policy(law, scale).train(rollouts).rates[late.start :])
    kept = [policy.rates[update] for update in late if values[update] >= 0.1]
    assert usual / 2 < min(kept) and max(kept) < usual * 2
    assert not policy.warnings


# What one measurement says


def test_wanted_kl_is_target_after_eight_updates():
    assert wanted_kl(TARGET, 7, 7) == TARGET
    assert wanted_kl(TARGET, 28, 28) == pytest.approx(2 * TARGET)
    assert wanted_kl(TARGET, 1, 7) == pytest.approx(TARGET / 7**1.7)


def test_expect_changes_number_of_updates():
    """The target goes on as one that was made with this number."""
    changed, made = (KLTarget(TARGET, updates_per_rollout=updates, learning_rate=1e-2) for updates in (8, 24))
    changed.expect(24)
    assert changed.last_age == made.last_age == 23 and changed.wanted(23) == made.wanted(23)
    for update in range(72):
        kl = 1e-3 * (update % 24) ** 2
        assert changed.update(kl, update % 24) == made.update(kl, update % 24)
    assert changed.state_dict() == made.state_dict()
    with pytest.raises(ValueError, match="updates_per_rollout must be at least 2"):
        changed.expect(1)


def moved(rate: float = RIGHT) -> KLTarget:
    """A control after the first update of a rollout."""
    control = KLTarget(TARGET, updates_per_rollout=8, learning_rate=rate / START)
    assert control.update(0.0, 0) == pytest.approx(rate)
    return control


@pytest.mark.parametrize("factor", [1.2, 1.0, 0.5, 0.01])
def test_rate_is_walk_that_reaches_wanted_kl(factor):
    control = moved()
    assert control.update(control.wanted(1) * factor**-1.7, 1) == pytest.approx(factor * RIGHT)


def test_walk_is_sum_of_used_rates():
    control = moved()
    control.used(RIGHT / 4)
    assert control.update(control.wanted(1), 1, schedule=0.5) == pytest.approx(RIGHT / 8)  # the rate of that walk, × s
    assert control.rate == pytest.approx(RIGHT / 4)
    # A walk of 3/8: twice 3/16, the mean with 1/4 is taken.
    assert control.update(control.wanted(2), 2) == pytest.approx(RIGHT * math.sqrt(3 / 16 / 4))


@pytest.mark.parametrize(("age", "walk"), [(0, 0), (1, 3), (2, 5), (2.5, 5.5), (3, 6), (3.01, 0), (4, 0), (1e300, 0)])
def test_walk_of_takes_newest_rates(age, walk):
    assert walk_of([1.0, 2.0, 3.0], age) == pytest.approx(walk)


@pytest.mark.parametrize(("part", "growth"), [(1.1e-3, 2), (0.9e-3, 10), (0.9 / 16, 2), (1.1 / 16, 1), (1, 1), (9, 1)])
def test_far_growth_follows_kl(part, growth):
    assert far_growth(part ** (-1 / 1.7)) == growth


@pytest.mark.parametrize(
    ("part", "growth"), [(1.5, 1.5 ** (-1 / 1.7)), (0.5, GROWTH), (0.05, 2), (1e-4, 10), (0.0, 10)]
)
def test_rate_grows_by_limited_factor(part, growth):
    control = moved()
    assert control.update(part * control.wanted(1), 1) == pytest.approx(growth * RIGHT)


SILENT = {
    "age 0": (1.0, 0),
    "NaN": (math.nan, 1),
    "infinite": (math.inf, 1),
    "infinite for its length": (1e300, 1, 1e10),
    "without a length": (1.0, 1, math.nan),
    "older than training": (1.0, 50),
    "mostly fresh": (1.0, 0.5),
}


@pytest.mark.parametrize("what", SILENT)
def test_update_that_says_nothing_keeps_rate(what):
    control = moved()
    before = control.update(control.wanted(1), 1)
    state = control.state_dict()
    kl, age, *length = SILENT[what]
    assert control.update(kl, age, length=length[0] if length else 1.0) == before
    after = control.state_dict()
    assert after.pop("walked") == [*state.pop("walked"), before]
    if what == "age 0":
        assert after.pop("floor") == [*state.pop("floor"), [0.0, 1.0]]
    assert after == state


@pytest.mark.parametrize("still", ["moves", "used", "schedule"])
def test_policy_that_has_not_moved_says_nothing(still):
    control = KLTarget(TARGET, updates_per_rollout=8, learning_rate=RIGHT / START)
    for age in range(8):
        control.update(0.0 if age == 0 else 1.0, age, moves=still != "moves", schedule=float(still != "schedule"))
        if still == "used":
            control.used(0.0)
        assert control.rate == pytest.approx(RIGHT)


def test_update_without_gradient_counts_for_momentum():
    control = KLTarget(TARGET, updates_per_rollout=4, learning_rate=1.0)
    for age, moves in enumerate([False, True, False, False, True]):
        control.update(math.nan, age % 4, moves=moves)
    assert control.state_dict()["walked"] == pytest.approx([control.rate * part for part in (0, 1, 0.9, 0.81, 1)])


@pytest.mark.parametrize("scale", [USUAL, (8, 8), (8, 32)])
def test_rate_stays_where_updates_have_no_gradient(scale):
    """For twelve rollouts, in the later of which the policy stands still."""
    policy = Policy(scale=scale, moves=lambda update: update < 40 * 8).train(52)
    assert min(policy.rates[40 * 8 :]) / RIGHT > 0.5 and max(policy.rates[40 * 8 :]) / RIGHT < 2
    sparse = Policy(scale=scale, moves=lambda update: update % 8 == 3).train(52)
    assert min(sparse.rates[40 * 8 :]) / RIGHT > 0.5 and max(sparse.rates[40 * 8 :]) / RIGHT < 2


# The floor


@pytest.mark.parametrize("start", [1e-4, 1.0])
@pytest.mark.parametrize(
    ("law", "scale", "floor"),
    [
        ("sum of rate^1.5", SHORT, 7e-4),
        ("square of the sum", SHORT, 2e-3),
        ("sum of rate^2", USUAL, 7e-4),
        ("sum of rate^1.5", USUAL, 5e-3),
        ("square of the sum", LONG, 0.02),
    ],
)
def test_rate_is_found_above_floor(law, scale, floor, start):
    policy = Policy(law, scale, start, floor=floor).train(60)
    late = policy.rates[30 * policy.updates :]
    assert min(late) > RIGHT / 2 and max(late) < 2 * RIGHT and spread(late) < 2
    assert not policy.warnings


def test_floor_is_subtracted():
    plain, noisy = moved(), moved()
    noisy.load_state_dict({**noisy.state_dict(), "floor": [[0.0, 1e-4], [0.0, 2e-4], [0.0, 3e-4]]})
    for age in range(1, 8):
        kl = 0.9 * plain.wanted(age)
        assert noisy.update(kl + 2e-4, age) == pytest.approx(plain.update(kl, age))


@pytest.mark.parametrize("part", [0.45, 0.55])
def test_floor_above_half_of_wanted_silences_that_age(part):
    control = moved()
    control.load_state_dict({**control.state_dict(), "floor": [[0.0, part * control.wanted(1)]]})
    rate = control.update(2 * control.wanted(1), 1)
    assert (rate == pytest.approx(RIGHT)) == (part > 0.5)
    assert control.update(10 * control.wanted(2), 2) < RIGHT / 2


def test_floor_is_not_told_of_after_one_measurement():
    messages: list[str] = []
    control = KLTarget(TARGET, updates_per_rollout=2, learning_rate=RIGHT / START, warn=messages.append)
    for _ in range(4):
        assert messages == []
        control.update(0.7 * control.wanted(1), 0)
        control.update(control.wanted(1), 1)
    assert len(messages) == 1


@pytest.mark.parametrize("start", [1e-4, 1e-2])
@pytest.mark.parametrize("law", LAWS)
def test_assumed_rounding_is_no_saturation(law, start):
    """With two updates on a rollout, the KL of bfloat16 after a step is the same for any low rate."""
    policy = Policy(law, SHORT, start, rounding=BFLOAT16 / 2, bfloat16=True, target=0.1).train(60)
    late = policy.rates[40 * policy.updates :]
    assert min(late) > RIGHT / 2 and max(late) < 2 * RIGHT
    assert not policy.warnings


@pytest.mark.parametrize("seed", range(6))
def test_noise_above_floor_does_not_limit_rate(seed):
    """One measurement of the wanted KL, by noise, does not show that the target has been reached."""
    policy = Policy("sum of rate^2", start=1e-2, seed=seed, noise=0.6, floor=7e-4, target=2e-3).train(60)
    assert min(policy.rates[-8:]) > RIGHT / 3 and not any("10 times" in message for message in policy.warnings)


@pytest.mark.parametrize("length", [3.0, 1000.0])
def test_target_is_the_kl_of_a_sequence(length):
    of_sequences, of_tokens = Policy().control, Policy().control
    for update in range(24):
        kl = [0.0, 0.01, 0.02, 0.05, 0.05, 0.1, 0.2, 0.1][update % 8]
        assert of_tokens.update(kl / length, update % 8, length=length) == pytest.approx(
            of_sequences.update(kl, update % 8)
        )


#: The numbers of updates with which bfloat16's rounding is measured.
MEASURED = [(4, 0), USUAL, LONG, (8, 2)]


@pytest.mark.parametrize("start", [1e-4, 1.0, 10.0])
@pytest.mark.parametrize("scale", MEASURED)
@pytest.mark.parametrize("part", [0.0, 0.1, 1.0, 3.0])
def test_rate_is_found_above_the_rounding_of_bfloat16(part, scale, start):
    """Which is three times what is wanted at most."""
    for law in LAWS:
        policy = Policy(law, scale, start, bfloat16=True)
        policy.rounding = part * policy.last_kl
        late = policy.train(60).rates[30 * policy.updates :]
        assert RIGHT / 2 < statistics.geometric_mean(late) < 2 * RIGHT
        assert min(late) > RIGHT / 2.5 and max(late) < 2.5 * RIGHT
        assert not policy.warnings
        if start <= 1:
            assert max(policy.kls) < 5 * policy.last_kl


@pytest.mark.parametrize("change", [0.3, 2.0])
@pytest.mark.parametrize("scale", MEASURED)
@pytest.mark.parametrize("law", LAWS)
def test_rate_stays_where_the_rounding_changes(law, scale, change):
    """As it does with the policy's entropy."""
    policy = Policy(law, scale, start=1e-2, bfloat16=True)
    policy.length = 4.5 * policy.last_kl / BFLOAT16
    for rollout in range(100):
        policy.rounding = 1.5 * policy.last_kl * change ** (rollout / 100)
        policy.train(1)
    late = policy.rates[30 * policy.updates :]
    assert RIGHT / 2 < statistics.geometric_mean(late) < 2 * RIGHT
    assert max(policy.kls) < 5 * policy.last_kl


def test_length_does_not_change_the_rounding_of_a_token():
    """Updates with longer sequences show more of it."""
    control, policy = (KLTarget(TARGET, updates_per_rollout=8, learning_rate=0.1, bfloat16=True) for _ in range(2))
    for update in range(64):
        age, length = update % 8, [100.0, 50.0, 200.0][update % 3]
        kl = TARGET * (walk_of(policy.state_dict()["walked"], age) / (7 * RIGHT)) ** 1.7
        control.update(kl / length + 3e-4 * (age > 0), age, length=length)
        policy.load_state_dict({**policy.state_dict(), "walked": control.state_dict()["walked"]})
    assert control.rate == pytest.approx(RIGHT, rel=0.05)
    assert control.compared[2] == pytest.approx(length * 3e-4, rel=0.1)


def test_no_rounding_is_known_before_the_first_step():
    control = KLTarget(TARGET, updates_per_rollout=8, learning_rate=1.0, bfloat16=True)
    for age in range(4):  # the first update has no gradient
        control.update(1e-3, age, length=100.0, moves=age > 0)
    assert control.rate == START


def test_rounding_that_varies_is_told_of():
    policy = Policy(bfloat16=True, rounding=3 * TARGET, rounding_noise=0.3).train(20)
    (warning,) = policy.warnings
    assert "more sequences in an update" in warning
    assert max(policy.rates) < 3 * RIGHT


@pytest.mark.parametrize("scale", [SHORT, (3, 0), (8, 4)])
def test_target_within_the_assumed_rounding_is_told_of(scale):
    """The rate stays where it is. Without knowing of the rounding, it would fall on and on."""
    told: dict[str, Any] = {"target": BFLOAT16, "rounding": BFLOAT16 / 1.5, "rounding_noise": 0.2}
    policy = Policy(scale=scale, bfloat16=True, **told).train(10)
    assert {*policy.rates} == {RIGHT}
    (warning,) = policy.warnings
    assert f"noise is {BFLOAT16:.2g} nats a sequence, and at most {policy.last_kl:.2g} are wanted" in warning
    assert "at least four updates on a rollout" in warning
    assert Policy(scale=scale, **told).train(10).rates[-1] < RIGHT / 2


def test_kl_far_above_noise_that_hides_the_target_lowers_the_rate():
    """If there are four in a row, which noise does not make."""
    control = KLTarget(TARGET, updates_per_rollout=16, learning_rate=RIGHT / START, bfloat16=True)
    control.update(0.0, 0)
    floor = [[RIGHT, kl / 150] for kl in (0.12, 0.06, 0.18, 0.09)]
    control.load_state_dict({**control.state_dict(), "floor": floor})
    for age, above in enumerate((0.0, 0.3, 0.3, 0.3, 0.1, 0.3, 0.3, 0.3), 1):
        assert control.update((0.12 + above) / 150, age, length=150.0) == pytest.approx(RIGHT)
    assert control.update((0.12 + 0.3) / 150, 9, length=150.0) < RIGHT / 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Policy(floor=2 * TARGET, noise=0.6),
        lambda: Policy(bfloat16=True, rounding=3 * TARGET, rounding_noise=0.3),
    ],
    ids=["engine", "rounding"],
)
def test_noise_that_hides_the_target_does_not_move_the_rate(make):
    """Not in the long run either, where some of it lies far above the rest."""
    policy = make().train(400)
    late = policy.rates[-1600:]
    assert min(late) > RIGHT / 3 and max(late) < 2 * RIGHT
    assert len(policy.warnings) == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warm-up and cosine"])
@pytest.mark.parametrize("scale", [(4, 0), USUAL])
def test_schedule_that_decays_does_not_make_a_kl_of_noise(scale, schedule):
    count = 100 * scale[0]
    policy = Policy("sum of rate^2", scale, bfloat16=True)
    policy.rounding = 3 * policy.last_kl
    policy.train(100, lambda update: SCHEDULES[schedule](update / count))
    late = policy.rates[count // 4 :]
    assert min(late) > RIGHT / 4 and max(late) < 4 * RIGHT
    assert not any("10 times" in message for message in policy.warnings)


@pytest.mark.parametrize("others", [[3, 8], [2, 4], [4, 3]])
def test_rounding_is_known_while_the_number_of_updates_changes(others):
    control = KLTarget(0.1, updates_per_rollout=8, learning_rate=RIGHT / START, bfloat16=True)
    for rollout in range(60):
        updates = others[rollout % 2]
        control.expect(updates)
        for age in range(updates):
            kl = (
                control.wanted(control.last_age)
                * (walk_of(control.state_dict()["walked"], age) / RIGHT / (updates - 1)) ** 1.7
            )
            control.update(kl / 60 + 1e-3 * (age > 0), age, length=60.0)
    assert RIGHT / 3 < control.rate < 3 * RIGHT


def test_rate_is_found_where_few_updates_have_gradients():
    """Without an update at age 1 that says something, bfloat16's rounding is assumed."""
    policy = Policy(start=1e-2, bfloat16=True, rounding=BFLOAT16 / 2, moves=lambda update: update % 8 == 3).train(200)
    assert RIGHT / 3 < policy.rates[-1] < 3 * RIGHT


def test_an_outlier_does_not_hide_the_target():
    policy = Policy(bfloat16=True)
    policy.rounding = 3 * policy.last_kl
    policy.train(20)
    state = policy.control.state_dict()
    state["floor"][-1][1] *= 3
    policy.control.load_state_dict(state)
    policy.factor = 4.0  # half the rate has the wanted KL
    assert RIGHT / 3 < policy.train(3).rates[-1] < RIGHT / 1.5
    assert not policy.warnings


def test_update_too_long_to_measure_keeps_what_is_known_of_rounding():
    policy = Policy(bfloat16=True, rounding=0.06).train(10)
    known = policy.control.state_dict()["floor"]
    policy.control.update(0.0, 0, length=1000.0)
    assert [entry for entry in policy.control.state_dict()["floor"] if entry[0] > 0] == known[1:]


def test_more_rounding_than_expected_is_measured():
    """Of which a larger model than was measured may have more."""
    policy = Policy(start=1e-2, bfloat16=True)
    policy.rounding = 3 * policy.last_kl
    policy.length = policy.rounding / (5 * BFLOAT16)
    late = policy.train(30).rates[-80:]
    assert min(late) > RIGHT / 2 and max(late) < 2 * RIGHT
    assert not policy.warnings


class Network:
    """Residual layers with weights in float32 that lie on bfloat16's grid at first; its steps go a random way."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        shapes = [(128, 64), *[(64, 64)] * 6, (64, 128)]
        weights = [torch.randn(shape, generator=self.random) for shape in shapes]
        weights[1:] = [weight / 8 for weight in weights[1:]]
        self.weights = [weight.bfloat16().float() for weight in weights]

    def log_probs(self, weights: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        hidden, *layers, head = (weight.to(dtype) for weight in weights)
        for layer in layers:
            hidden = hidden + torch.nn.functional.silu(hidden @ layer)
        return (torch.nn.functional.normalize(hidden, dim=-1) * 8 @ head).float().log_softmax(-1)

    def kl(self, old: list[torch.Tensor], dtype: torch.dtype) -> float:
        before, now = self.log_probs(old, dtype), self.log_probs(self.weights, dtype)
        return (before.exp() * (before - now)).sum(-1).mean().item()

    def rollout(self) -> list[torch.Tensor]:
        self.way = [torch.randn(weight.shape, generator=self.random) for weight in self.weights]
        return [weight.clone() for weight in self.weights]

    def step(self, rate: float) -> None:
        for weight, way in zip(self.weights, self.way, strict=True):
            weight += rate * way


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-2])
def test_network_in_bfloat16_meets_the_target(learning_rate):
    """Though its rounding grows with the first steps, which change few of the rounded weights."""
    network, length = Network(), 400.0
    control = KLTarget(0.1, updates_per_rollout=8, learning_rate=learning_rate, bfloat16=True)
    for _ in range(20):
        old = network.rollout()
        for age in range(8):
            kl = network.kl(old, torch.bfloat16)
            network.step(control.update(kl, age, length=length))
    measured, wanted, floor = control.compared
    assert 0.1 < length * network.kl(old, torch.float32) < 0.2
    assert 0.5 < measured / wanted < 2 and floor > 0


def test_measured_meets_wanted_at_the_right_rate():
    """Above the floor, which is what the first update after a step shows."""
    control = KLTarget(0.1, updates_per_rollout=8, learning_rate=RIGHT / START, bfloat16=True)
    for update in range(24):
        age = update % 8
        kl = control.wanted(7) * (walk_of(control.state_dict()["walked"], age) / (7 * RIGHT)) ** 1.7
        control.update((kl + 0.05 * (age > 0)) / 100, age, length=100.0)
        measured, wanted, floor = control.compared
        assert measured == pytest.approx(wanted, rel=1e-3, abs=1e-12)
        assert (wanted > 0) == (age > 1) and (age < 1 or floor == pytest.approx(0.05 + 0.1 / 7**1.7))


@pytest.mark.parametrize("length", [300.0, 3000.0])
def test_long_sequences_are_refused_in_bfloat16(length):
    """Rounding that grows with the walk would be taken for a KL of them."""
    messages: list[str] = []
    control = KLTarget(0.1, updates_per_rollout=8, learning_rate=RIGHT / START, bfloat16=True, warn=messages.append)
    for update in range(80):
        age = update % 8
        control.update(age * 3e-4, age, length=length)
    assert (control.rate == RIGHT) == (length > 1000) == any("cannot be followed" in each for each in messages)
    if length > 1000:
        assert "Set a target above 0.72," in messages[0]


def test_floor_that_silences_all_ages_is_told_once():
    policy = Policy(start=0.1, noise=0.0, floor=0.02).train(20)
    assert spread(policy.rates) == 1
    (message,) = policy.warnings
    assert all(part in message for part in ("0.03", "0.02", "Set a target above 0.04", "float32", "dropout"))


# Policies that have collapsed, or whose KL cannot be reached


@pytest.mark.parametrize("level", ["entropy", "success"])
@pytest.mark.parametrize("scale", [SHORT, USUAL, LONG])
def test_rate_does_not_grow_while_level_is_low(scale, level):
    policy = Policy("sum of rate^2", scale, entropy=1.0, success=0.4).train(20)
    setattr(policy, level, 0.1)
    policy.train(40 // policy.updates + 4)  # Until its mean shows it.
    policy.factor = 0.03
    fallen = policy.control.state_dict()["fallen"]
    policy.train(60)
    assert max(policy.rates[-60 * policy.updates :]) <= fallen
    (message,) = policy.warnings
    assert level in message and "collapsed" in message
    policy.factor = 4.0
    policy.train(5)
    assert policy.rates[-1] < 0.7 * fallen  # A lower rate stays possible.


@pytest.mark.parametrize("level", ["entropy", "success"])
@pytest.mark.parametrize("scale", [SHORT, USUAL, LONG])
def test_rate_grows_again_when_level_recovers(scale, level):
    policy = Policy(scale=scale, start=0.1, noise=0.0, entropy=1.0, success=0.4)
    policy.factor = 100.0  # What is right now is a fifteenth of it.
    policy.train(20)
    setattr(policy, level, 0.1)
    policy.train(40 // policy.updates + 4)
    policy.factor = 30.0
    low = policy.control.state_dict()["fallen"]
    assert max(policy.train(10).rates[-policy.updates :]) <= low
    setattr(policy, level, 0.9)
    policy.train(20)
    assert policy.rates[-1] > 1.5 * low and len(policy.warnings) == 1


@pytest.mark.parametrize("law", LAWS)
def test_noise_does_not_lower_rate_while_level_is_low(law):
    policies = [Policy(law, entropy=1.0).train(20) for _ in range(2)]
    policies[1].entropy = 0.3
    free, held = (policy.train(40).rates[-80:] for policy in policies)
    fallen = policies[1].control.state_dict()["fallen"]
    assert fallen is not None and max(held) <= fallen
    assert statistics.geometric_mean(held) > 0.9 * min(fallen, statistics.geometric_mean(free))


def test_entropy_is_believed_at_once():
    policy = Policy(noise=0.0, start=5.0, entropy=2.0).train(1)
    policy.factor, policy.entropy = 1e-3, 0.5
    fallen = policy.rates[-1]
    assert max(policy.train(3).rates[policy.updates :]) <= fallen


@pytest.mark.parametrize("level", [-0.5, 0.0, math.nan, None])
def test_level_without_a_half_is_ignored(level):
    policy = Policy(start=0.1, success=level, entropy=level).train(10)
    assert policy.rates[-1] > RIGHT / 2 and not policy.warnings


# With seed 5, the success of single rollouts falls below half; where fewer succeed, that of two, for a short while.
@pytest.mark.parametrize(("share", "seed"), [(0.1, 0), (0.1, 5), (0.05, 4), (0.02, 1)])
@pytest.mark.parametrize("scale", [SHORT, USUAL, LONG, STALE])
def test_noisy_success_has_not_fallen(scale, share, seed):
    """Some of a rollout's 64 samples succeed, and each of its updates is told the rollout's success."""
    generator = random.Random(seed)
    policy = Policy(scale=scale, start=0.1)
    for _ in range(100):
        policy.success = sum(generator.random() < share for _ in range(64)) / 64
        policy.train(1)
    assert not policy.warnings


def test_rate_does_not_grow_to_older_mean_if_level_is_low():
    control = moved()
    rate = control.update(0.1 * control.wanted(1), 1, entropy=1.0)
    assert rate == pytest.approx(GROWTH * RIGHT)
    assert control.update(2 * control.wanted(2), 2, entropy=0.1) <= rate


@pytest.mark.parametrize("scale", [SHORT, USUAL])
def test_rate_stays_within_ten_times_what_reached_the_kl(scale):
    policy = Policy(scale=scale).train(40)
    reached = policy.control.state_dict()["reached"]
    for _ in range(200):
        policy.factor *= 0.96
        policy.train(1)
    assert RIGHT / 2 < reached < 2 * RIGHT
    assert policy.rates[-1] == max(policy.rates) == 10 * reached
    (message,) = policy.warnings
    assert "10 times" in message and "0.03" in message


@pytest.mark.parametrize("start", [1e-4, 1.0])
@pytest.mark.parametrize(
    ("law", "scale", "target"),
    [
        ("sum of rate^1.5", SHORT, 0.5),
        ("square of the sum", SHORT, 1.0),
        ("sum of rate^2", USUAL, 0.5),
        ("square of the sum", USUAL, 1.0),
        ("sum of rate^2", LONG, 0.5),
    ],
)
@pytest.mark.parametrize("part", [1, 1e-3])
def test_rate_is_held_if_target_is_out_of_reach(law, scale, target, start, part):
    """However small the KL, if nothing is rounded."""
    # The KL approaches 0.05, and a right rate is one whose KL would be the target if it did not.
    target *= part
    policy = Policy(law, scale, start, most=0.05 * part, target=target, noise=0.1).train(150)
    assert max(policy.rates) < 50 * RIGHT  # within a rollout of 32 updates a rate grows far before the KL can tell
    late = policy.rates[100 * policy.updates :]
    assert spread(late) < 4
    messages = [message for message in policy.warnings if "out of reach" in message]
    assert len(messages) == 1 and f"target of {target:g}" in messages[0]


def test_rate_is_not_held_by_kl_of_first_updates():
    """Adam's first updates all go one way: the KL of the second rollout is no larger, for twice the rate."""
    policy = Policy(start=0.05, factor=20.0, noise=0.1).train(2)
    policy.factor = 1.0
    policy.train(10)
    assert RIGHT / 2 < policy.rates[-1] < 2 * RIGHT and not policy.warnings


@pytest.mark.parametrize("change", [{"most": math.inf, "factor": 400.0}, {"most": 0.01}])
def test_rate_is_released_when_policy_moves_otherwise(change):
    policy = Policy(scale=SHORT, most=0.05, target=1.0, noise=0.1).train(100)
    assert policy.control.state_dict()["held"] is not None
    for name, value in change.items():
        setattr(policy, name, value)
    held = [policy.train(1).control.state_dict()["held"] for _ in range(8)]
    assert None in held


@pytest.mark.parametrize(("law", "scale"), LAW_OF_SCALE[1:3])
def test_pull_that_saturates_late_ages_is_no_failure(law, scale):
    policy = Policy(law, scale, most=0.05).train(60)
    assert RIGHT / 2 < policy.rates[-1] < 2 * RIGHT and not policy.warnings


@pytest.mark.parametrize("kl", [0.0, -1.0, 1e3])
def test_rate_that_changes_nothing_ends_in_range(kl):
    warnings: list[str] = []
    control = KLTarget(TARGET, updates_per_rollout=4, learning_rate=1.0, warn=warnings.append)
    for update in range(4000):
        control.update(0.0 if update % 4 == 0 else kl, update % 4)
    assert control.rate == pytest.approx(1e4 if kl <= 0 else 1e-8)
    (message,) = warnings
    assert "does the optimiser use the rate" in message


# Errors, state, determinism


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("kl", {"kl": value}) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("learning_rate", {"learning_rate": value}) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("updates_per_rollout", {"updates_per_rollout": value}) for value in (0, -1, 1, 2.5, math.nan)),
        *(("staleness", {"staleness": value}) for value in (-1, 0.5)),
    ],
)
def test_setting_out_of_range_is_named(name, arguments):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got"):
        KLTarget(**{"kl": TARGET, "updates_per_rollout": 8, "learning_rate": 1e-2, **arguments})


def test_single_update_needs_staleness():
    with pytest.raises(ValueError, match="updates_per_rollout must be at least 2"):
        KLTarget(TARGET, updates_per_rollout=1, learning_rate=1e-2)
    assert KLTarget(TARGET, updates_per_rollout=1, staleness=1, learning_rate=1e-2).last_age == 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_argument_out_of_range_is_named(value):
    control = moved()
    with pytest.raises(ValueError, match="age must be"):
        control.update(0.1, value)
    with pytest.raises(ValueError, match="schedule must be"):
        control.update(0.1, 1, schedule=value)
    with pytest.raises(ValueError, match="rate must be"):
        control.used(value)
    with pytest.raises(ValueError, match="rate must be that of an update"):
        KLTarget(TARGET, updates_per_rollout=8, learning_rate=1.0).used(1.0)


@pytest.mark.parametrize("length", [0.0, -1.0, math.inf])
def test_length_out_of_range_is_named(length):
    with pytest.raises(ValueError, match="length must be positive and finite"):
        moved().update(0.1, 1, length=length)


def test_warnings_are_given_by_default():
    control = KLTarget(TARGET, updates_per_rollout=2, learning_rate=1.0)
    with pytest.warns(UserWarning, match="KL target of 0.03 cannot be followed"):
        for update in range(8):
            control.update(1.0, update % 2)


def test_tensors_do_not_get_into_the_state():
    control = moved()
    one: Any = torch.ones(())
    rate = control.update(0.01 * one, one, schedule=one, entropy=one, success=one)
    control.used(0.1 * one)
    assert type(rate) is float and json.dumps(control.state_dict())


#: What a loop could measure, and its settings.
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1)
UPDATES = st.lists(
    st.fixed_dictionaries(
        {
            "kl": NUMBERS,
            "age": st.integers(0, 12) | st.floats(0, 12),
            "length": st.floats(1e-3, 1e4) | st.just(math.nan),
            "schedule": st.floats(0, 1),
            "moves": st.booleans(),
            "entropy": NUMBERS | st.none(),
            "success": NUMBERS | st.none(),
        }
    ),
    max_size=40,
)
CONTROLS = st.builds(
    KLTarget,
    st.floats(1e-6, 10),
    updates_per_rollout=st.integers(1, 12),
    staleness=st.integers(1, 12),
    learning_rate=st.floats(1e-12, 1e3),
    bfloat16=st.booleans(),
    warn=st.just(lambda message: None),
)


@settings(deadline=None)
@given(CONTROLS, UPDATES, st.lists(st.floats(0, 1e300), max_size=40))
def test_rate_is_positive_and_finite(control, updates, used):
    for update, rate in itertools.zip_longest(updates, used):
        if update is not None:
            assert 0 <= control.update(**update) < math.inf
        if rate is not None and control.state_dict()["walked"]:
            control.used(rate)
        assert 0 < control.rate < math.inf


@settings(deadline=None)
@given(CONTROLS, UPDATES, st.integers(0, 40))
def test_resumed_control_continues(control, updates, cut):
    whole, resumed = [], []
    fresh, first = copy.deepcopy(control), control.state_dict()
    for number, update in enumerate(updates):
        if number == cut:
            kept = json.loads(json.dumps(control.state_dict(), allow_nan=False))
        whole.append(control.update(**update))
    if cut >= len(updates):
        kept, cut = first, 0
    fresh.load_state_dict(kept)
    for update in updates[cut:]:
        resumed.append(fresh.update(**update))
    assert resumed == whole[cut:]


def test_loaded_state_is_a_copy():
    control, other = moved(), moved()
    state = control.state_dict()
    other.load_state_dict(state)
    other.update(1.0, 1)
    other.used(3.0)
    assert state == control.state_dict() != other.state_dict()
