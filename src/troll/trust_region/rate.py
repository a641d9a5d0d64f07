"""The learning rate that moves the policy a wanted KL away from the one that sampled, found by measuring.

How far a policy may move while one rollout is used is a number of nats. Which learning rate moves it that far depends
on the model, the optimiser and the weights that are trained: 2e-4 for LoRA on SmolLM2, 1e-5 for all of its weights. So
the KL is chosen, and the rate is derived from what the last updates did. Let T be the target, and for one update

    a     the age of its rollout: the number of updates since it was sampled
    A     the age of a rollout's last update: updates_per_rollout − 1 + staleness
    D     the walk: the sum of the rates that these a updates really used
    W(a)  = T √(A/7) (a/A)^p, the KL that is wanted at age a; W = W(A)
    KL    what was measured of a sequence, the sum over its tokens, less the floor, what noise shows: the median of what
          is measured at age 0, where both policies are the same

The KL grows as the walk to the power p = 1.7 (2 by Taylor's theorem; with constant rates, 1.5 to 1.9 was measured). So
every update, at any age and any rate, says how long a walk reaches W, and the rate is that walk divided by A:

    rate  =  s / A · geometric mean of  D (W / KL)^(1/p)  over the updates of one rollout,    s the schedule

This is TRPO's step length √(2δ / xᵀFx), except that the last updates show the curvature, and no product with F is
needed. It is an estimate and not a feedback. rsl_rl's rule (`KLAdaptiveLR` in torchrl and skrl) multiplies or divides
the rate by 1.5 while the KL is outside [T/2, 2T]: it integrates an error as old as the rollout and oscillates, takes
23 updates for a rate that is 10,000 times too low, and undoes a schedule. Here the walk contains the schedule, which
keeps its shape.

In bfloat16 every step also shows a KL of rounding: from 1e-6 nats a token where nearly all tokens are certain to 1e-3
in free text. At age 0 there is nothing of it, where equal policies are computed equally. The floor is therefore what
age 1 measures, and D is the walk of which the rest comes: D^p is the p-th power of this update's walk less that of age
1's. This takes rounding to be the same after one step and after several, which it is not while a walk has changed few
of the rounded weights: where it could be several times T, nothing is measured.

The KL is the divergence from the policy that sampled, not from a reference model. It is that of a whole sequence, so
that a target means the same for short and long ones: most tokens of a long one are certain, and a mean over all of them
that suits a short one would let the few others go anywhere.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

#: p: the KL grows as the walk to this power.
EXPONENT = 1.7
#: The search begins at this part of `learning_rate`, and stays within this factor of it.
START, RANGE = 0.01, 1e6
#: How much the rate may grow in an update: usually; if the KL at the present rate is below a part of the wanted one;
#: and if all that is known is a bound of the KL.
GROWTH, FAR_GROWTH, BOUND_GROWTH = 1.25, ((1 / 1000, 10.0), (1 / 16, 2.0)), 2.0
#: How far the rate may grow above the one that first reached the wanted KL.
REACHED_GROWTH = 10.0
#: The fewest measurements to average. Where a rollout has two updates, only one of them is a measurement.
FEWEST = 4
#: A walk twice as long should raise the logarithm of the KL by p log 2; less than this part of it does not count as a
#: rise.
LEAST_RISE = 0.25
#: About what bfloat16 shows after a step where it was seen to show most, in nats a token: SmolLM2's free text.
BFLOAT16 = 1.2e-3
#: So much is assumed, and nothing is measured, if a rollout's last age is less than so many times the first one after a
#: step, or if so much is more than so many times the wanted KL.
MEASURABLE_AGES, MEASURABLE_KL = 3, 5.0
#: Rounding changes with the policy, and so is a median over this many rollouts.
ROUNDING_ROLLOUTS = 3
#: A KL this many times above the noise of the floor is no noise, if there are so many in a row.
CERTAIN, IN_A_ROW = 3.0, 4
#: Below this part of the wanted one, a KL that does not rise with the walk is out of reach.
JUDGED = 3 / 4
#: How much the rate may grow after a walk twice as long that has not raised the KL, until a second doubling decides.
DOUBTED_GROWTH = 3.0
#: The part of a step that Adam makes again in the next update if that has no gradient: its β₁.
MOMENTUM = 0.9
#: Entropy and success are compared with their mean over about this many rollouts; the floor at age 0 is a median of as
#: many.
RECENT_ROLLOUTS = 10
#: The smallest KL of which a logarithm is taken, as a part of the wanted one.
LEAST_KL = 1e-9


def wanted_kl(target: float, age: float, last_age: int) -> float:
    """W(a) in nats, the wanted KL of an update whose rollout is `age` updates old."""
    return target * math.sqrt(last_age / 7) * (age / last_age) ** EXPONENT


def far_growth(ratio: float) -> float:
    """The largest factor in one update for a rate that should become `ratio` times as large, if that is far; else 1."""
    part = ratio**-EXPONENT  # The KL at the present rate, as a part of the wanted one.
    return next((growth for limit, growth in FAR_GROWTH if part < limit), 1.0)


def walk_of(rates: Sequence[float], age: float) -> float:
    """The sum of the last `age` rates, the first of them in part if age is not an integer; 0 if not all are known."""
    count = math.ceil(age)
    if not 0 < count <= len(rates):
        return 0.0
    return sum(rates[-count:]) - (count - age) * rates[-count]


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


@dataclass
class _State:
    """The state with which a resumed run continues, in JSON's types."""

    #: The rate of the last update, before the schedule.
    rate: float
    #: The rates that the last updates used, the newest last; only in part where no gradient moved the policy.
    walked: list[float] = field(default_factory=list)
    #: The updates since the last with a gradient; None if there was none.
    idle: int | None = None
    #: (log a, log D, log KL) of the last measurements, those of a rollout.
    measured: list[list[float]] = field(default_factory=list)
    #: The number of measurements since the last that was only a bound, or of a rollout younger than usual.
    comparable: int = 0
    #: (walk, KL of a token) of the last updates without a walk or, in bfloat16, with the shortest.
    floor: list[list[float]] = field(default_factory=list)
    #: The last updates of rollouts since an update said something.
    silent: int = 0
    #: Where noise hides what is wanted, the updates in a row whose KL was far above it.
    certain: int = 0
    #: Of entropy and of success: the mean over few updates, the mean over many, and the number of updates.
    levels: dict[str, list[float]] = field(default_factory=dict)
    #: The rate when one of them fell: it is the limit until they recover.
    fallen: float | None = None
    #: The rate that first reached the wanted KL.
    reached: float | None = None
    #: Of a rollout: `log_walk` and `log_kl`, the means of log D and log KL, and its `rate`. The last is compared with
    #: that of a walk twice as long; the one before it, if there is one, has half its walk, and its KL was no lower.
    doubled: list[dict[str, float]] = field(default_factory=list)
    #: Those after the walk that two doublings have not raised the KL above: its rate is the limit.
    held: dict[str, float] | None = None
    #: The names of the warnings that were given.
    warned: list[str] = field(default_factory=list)


class _Floor(NamedTuple):
    """What noise shows of a sequence: at this age, after this walk, and how far that may be wrong."""

    age: int
    walk: float
    kl: float
    noise: float
    #: Whether `noise` is more than a guess.
    known: bool = True


class KLTarget:
    """Sets the learning rate of every update so that the KL in a rollout's last update becomes a wanted one.

        target = troll.KLTarget(0.1, updates_per_rollout=8, learning_rate=1e-2)
        ...
        rate = target.update(kl, age, length=length)  # in every update, before the optimiser's step, which uses it

    Four guards limit the rate where a measurement can mislead. Each gives one warning, once it cannot be noise:

    - Noise is more than half of what is wanted: the update says nothing.
    - Entropy or success is below half of its recent mean: the rate is not raised above the one with which that began,
      for a policy that has collapsed measures a small KL.
    - The KL once was the wanted one: the rate stays below ten times the rate of that moment.
    - Two doublings of the rate have not raised a KL that is more than noise: the rate goes back, until it changes.

    The state is plain numbers, and equal inputs give equal rates: each process of a training has its own object.

    Args:
        kl: T > 0, the wanted mean KL(p̃ ‖ p) of a sequence, the sum over its tokens, in nats, in the last of eight
            updates on a rollout. If a rollout's last update has age A instead of 7, √(A/7) times as much is wanted
            there.
        updates_per_rollout: U ≥ 1, the updates on one rollout; at least 2 if `staleness` is 0.
        learning_rate: The search begins at a hundredth of it: a first rate that is too high can ruin the policy, and
            one that is too low costs a rollout or two.
        staleness: The number of updates between the sampling of a rollout and its first update, as in asynchronous
            training.
        bfloat16: Whether the model computes in bfloat16, whose rounding shows a KL. It is measured with at least four
            updates on a rollout (more than twice the `staleness`) and sequences of up to some 400 tokens for a target
            of 0.1; else it is taken to be 1.2e-3 nats a token.
        warn: Takes the text of each warning; None for `warnings.warn`.

    Raises:
        ValueError: If a number is out of its range, or `updates_per_rollout` is 1 and `staleness` 0.
    """

    def __init__(
        self,
        kl: float,
        *,
        updates_per_rollout: int,
        learning_rate: float,
        staleness: int = 0,
        bfloat16: bool = False,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        for name, value in (("kl", kl), ("learning_rate", learning_rate)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not isinstance(staleness, int) or staleness < 0:
            raise ValueError(f"staleness must be an integer, at least 0, got {staleness}")
        self.kl, self._bfloat16 = kl, bfloat16
        self._staleness, self._start = staleness, START * learning_rate
        self.expect(updates_per_rollout)
        self._warn = warn or (lambda message: warnings.warn(message, stacklevel=2))
        #: Of a sequence in the last update, in nats: the KL above the floor, what is wanted of it, and the floor.
        self.compared = (math.nan, 0.0, 0.0)
        self._state = _State(self._start)

    def expect(self, updates_per_rollout: int) -> None:
        """Sets U, where the next rollouts have another number of updates than the last ones.

        Raises:
            ValueError: As the class does.
        """
        if not isinstance(updates_per_rollout, int) or updates_per_rollout < 1:
            raise ValueError(f"updates_per_rollout must be an integer, at least 1, got {updates_per_rollout}")
        if updates_per_rollout + self._staleness < 2:
            raise ValueError(
                "updates_per_rollout must be at least 2 for a KL target, got 1: in the first update on a rollout the "
                "policy is still the one that sampled, and its KL says nothing about the learning rate"
            )
        #: A, the age of a rollout's last update.
        self.last_age = updates_per_rollout - 1 + self._staleness
        # The age that shows the floor: in bfloat16 the first after a step, if there are others far above it.
        first = max(self._staleness, 1)
        self._floor_age = first if self._bfloat16 and self.last_age >= MEASURABLE_AGES * first else 0
        # The measurements of a rollout: those of the ages above the floor's.
        self._window = max(self.last_age - (self._floor_age or first - 1), FEWEST)
        # The updates over which success is a mean: all of a rollout may be told the same number, which is noisy.
        self._success_window = 2 * max(updates_per_rollout, FEWEST)
        # The updates over which the recent mean of entropy and success is one.
        self._recent_window = RECENT_ROLLOUTS * max(updates_per_rollout, 2 * FEWEST)

    @property
    def rate(self) -> float:
        """The rate of the last update, before the schedule."""
        return self._state.rate

    def wanted(self, age: float) -> float:
        """The wanted KL of a sequence, in nats, in an update whose rollout is `age` updates old."""
        return wanted_kl(self.kl, age, self.last_age)

    def update(
        self,
        kl: float,
        age: float,
        *,
        length: float,
        schedule: float = 1.0,
        moves: bool = True,
        entropy: float | None = None,
        success: float | None = None,
    ) -> float:
        """Takes what an update has measured before its step, and returns the rate for this step.

        An update leaves the rate as it is if its KL is not finite, its age is below 1, or no gradient has moved the
        policy since its rollout was sampled.

        Args:
            kl: The mean KL(p̃ ‖ p) of the update's tokens over all processes, in nats; NaN if it has no token.
            length: The mean number of these tokens in a sequence; 1 where there are no sequences, as for robots.
            age: The number of calls of this method since the update's tokens were sampled, not counting this one; the
                mean if they come from several rollouts.
            schedule: s ≥ 0, the schedule for this step, relative to its peak.
            moves: False if this step has no gradient for the policy, since no token counts or none has an advantage.
                Adam's momentum still moves it, by 0.9 of the step before; call `used(0)` if nothing does, as where only
                a critic is trained.
            entropy: The mean entropy of the update's tokens, if it is known.
            success: The mean success or reward of the update's sequences, at least 0, if it is known.

        Returns:
            The rate for this step, with the schedule.

        Raises:
            ValueError: If age or schedule is negative or not finite, or length not positive and finite.
        """
        for name, value in (("age", age), ("schedule", schedule)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if length <= 0 or length == math.inf:
            raise ValueError(f"length must be positive and finite, got {length}")
        state = self._state
        # A tensor must not get into the state.
        kl, age, length = float(kl), float(age), float(length)
        # One batch tells the entropy, and not the success.
        levels = (("entropy", entropy, 1), ("success", success, self._success_window))
        fallen = [name for name, value, window in levels if self._has_fallen(name, value, window)]
        if not fallen:
            state.fallen = None
        elif state.fallen is None:
            state.fallen = state.rate
        walk, floor = walk_of(state.walked, age), self._floor(length)
        # What lies above the floor is of the rest of the walk, as if the rollout were that much younger.
        part = (1 - (floor.walk / walk) ** EXPONENT) ** (1 / EXPONENT) if walk > floor.walk else 0.0
        shown = length * kl
        excess = shown - floor.kl
        self.compared = (max(excess, 0.0), self.wanted(part * age), floor.kl)
        moved = 0 < walk < math.inf and state.idle is not None and state.idle < age
        if math.isfinite(shown) and (age == 0 if floor.age == 0 else moved and floor.age <= age < floor.age + 1):
            self.compared = (0.0, 0.0, shown)
            # What followed a much longer walk was more than the floor.
            entries = [each for each in state.floor if not 0 < 2 * walk < each[0]]
            state.floor = [*entries, [walk, max(kl, 0.0)]][-RECENT_ROLLOUTS:]
        elif math.isfinite(shown) and age >= 1 and moved and part * walk > 0:
            self._observe(excess, part * age, part * walk, age, floor, fallen)
        rate = state.rate * float(schedule)
        if moves:
            state.idle = 0
        elif state.idle is not None:
            state.idle += 1
        part = 0.0 if state.idle is None else MOMENTUM**state.idle
        state.walked = [*state.walked, part * rate][-4 * (self.last_age + 1) :]
        return rate

    def used(self, rate: float) -> None:
        """Corrects the rate of the last update, if its step did not use what `update` returned.

        Args:
            rate: The rate that was used; 0 if the step was skipped, as in fp16 after an overflow.

        Raises:
            ValueError: If the rate is negative or not finite, or there was no update.
        """
        if not 0 <= rate < math.inf or not self._state.walked:
            raise ValueError(f"rate must be that of an update, finite and at least 0, got {rate}")
        self._state.walked[-1] = float(rate)

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint; it survives JSON."""
        return dataclasses.asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of a checkpoint. Settings are not part of it."""
        self._state = _State(**copy.deepcopy(state))

    def _floor(self, length: float) -> _Floor:
        """The floor of sequences with so many tokens."""
        measurable = BFLOAT16 * length <= MEASURABLE_KL * self.wanted(self.last_age)
        age = self._floor_age if measurable else 0
        # Where U has changed, there may be entries of other ages.
        entries = [each for each in self._state.floor if (each[0] > 0) == (age > 0)]
        kls = [kl for _, kl in entries]
        if age == 0 or not entries:
            kl = length * max(median(kls or [0.0]), BFLOAT16 if self._bfloat16 else 0.0)
            return _Floor(age, 0.0, kl, noise=kl)
        known = len(entries) >= FEWEST
        newest = entries[-ROUNDING_ROLLOUTS:] if known else [min(entries)]
        walk, kl = (median_low(values) for values in zip(*newest, strict=True))
        # The standard deviation, by the median of deviations.
        noise = 1.5 * median(abs(each - median(kls)) for each in kls) if known else kl / CERTAIN
        return _Floor(age, walk, length * kl, length * noise, known)

    def _observe(self, kl: float, since: float, walk: float, age: float, floor: _Floor, fallen: Sequence[str]) -> None:
        """Takes what lies above the floor, the age and the walk since then, and moves the rate."""
        state, wanted, noise = self._state, self.wanted(since), floor.noise
        certain, hidden = kl > CERTAIN * noise, noise > wanted / 2
        if hidden:
            state.certain = state.certain + 1 if certain else 0
        # The noise at age 0, of dropout or an engine, is no bound of what it may be.
        if hidden and (floor.age == 0 or state.certain < (IN_A_ROW if floor.known else 1)):
            state.silent += age >= self.last_age and floor.known
            if state.silent == FEWEST:
                least = noise / MEASURABLE_KL if floor.age < self._floor_age else 2 * noise
                self._tell(
                    "floor",
                    f"a KL target of {self.kl:g} cannot be followed: noise is {noise:.2g} nats a sequence, and at "
                    f"most {wanted:.2g} are wanted. The learning rate stays at {state.rate:.2g}. Set a target above "
                    f"{least / wanted * self.kl:.2g}, or none, or remove noise: float32, no dropout, the trainer's own "
                    "old policy, more sequences in an update, or at least four updates on a rollout",
                )
            return
        state.silent = 0
        # A KL that does not stand out from the noise is at most as large. That can only show that the rate is too low.
        least = max(noise, LEAST_KL * wanted)
        measured = [math.log(since), math.log(walk), math.log(max(kl, least))]
        log_rate, bound = self._log_rate([measured]), kl <= least
        if bound and state.measured and log_rate <= self._log_rate(state.measured):
            return
        # After a short walk, as a schedule makes it, noise that adds to the KL would lower the rate, and noise that
        # takes from it would say nothing.
        expected = wanted * min(walk / (since * state.rate), 1.0) ** EXPONENT
        if noise > expected / 2 and not certain and log_rate < math.log(state.rate):
            return
        if state.fallen is not None and log_rate > math.log(2 * state.fallen):
            self._tell(
                "fallen",
                f"the {' and the '.join(fallen)} fell below half of the recent mean. Until it recovers, the learning "
                f"rate is not raised above {state.fallen:.2g}: a policy that has collapsed measures a small KL. Look "
                f"at what it samples; if it has collapsed, begin again with a KL target below {self.kl:g}",
            )
        # During the search, an older bound is only looser.
        older = [] if bound and state.reached is None else state.measured
        state.measured = [*older, measured][-self._window :]
        state.comparable = 0 if bound or age <= self._staleness - 1 else state.comparable + 1
        self._hold_if_saturated(least=max(floor.kl, CERTAIN * noise))
        self._move_rate(BOUND_GROWTH if bound else GROWTH)
        if state.reached is None and not hidden and state.comparable >= self._window and self._log_part() >= 0:
            state.reached = state.rate

    def _log_rate(self, measured: Sequence[Sequence[float]]) -> float:
        """The logarithm of the geometric mean of D (W / KL)^(1/p), divided by A."""
        _, log_walk, log_kl = map(mean, zip(*measured, strict=True))
        return log_walk + (math.log(self.wanted(self.last_age)) - log_kl) / EXPONENT - math.log(self.last_age)

    def _log_part(self) -> float:
        """The logarithm of the measured KL as a part of the wanted one, the mean over the last measurements."""
        log_age, _, log_kl = map(mean, zip(*self._state.measured, strict=True))
        return log_kl - math.log(self.wanted(math.exp(log_age)))

    def _hold_if_saturated(self, least: float) -> None:
        """Limits the rate if a walk has been doubled twice and the KL has not risen.

        The limit ends where the KL becomes the wanted one, or halves. A KL below `least` may be noise.
        """
        state, log_part = self._state, self._log_part()
        _, log_walk, log_kl = map(mean, zip(*state.measured, strict=True))
        if state.held is not None and (log_part >= 0 or log_kl < state.held["log_kl"] - math.log(2)):
            state.held = None
        # Means can be compared if each is over all ages of a rollout.
        if state.comparable < self._window or math.exp(log_kl) < least or log_part > math.log(JUDGED):
            state.doubled = []
            return
        if state.doubled:
            longer, larger = log_walk - state.doubled[-1]["log_walk"], log_kl - state.doubled[-1]["log_kl"]
            if 0 <= longer < math.log(2):
                return
            if longer < 0 or larger >= LEAST_RISE * EXPONENT * longer:
                state.doubled = []
            elif len(state.doubled) == 2:  # one may be noise, or Adam: its first updates all go one way, and far
                state.held, state.doubled = state.doubled[0], state.doubled[1:]
                self._tell(
                    "held",
                    f"a KL target of {self.kl:g} is out of reach: the KL is {math.exp(log_part):.0%} of the wanted, "
                    f"and {math.exp(log_walk - state.held['log_walk']):.2g} times the learning rate did not raise it. "
                    f"The rate is held at {state.held['rate']:.2g}; lower the target",
                )
                return
        state.doubled = [*state.doubled, {"log_walk": log_walk, "log_kl": log_kl, "rate": state.rate}]

    def _move_rate(self, growth: float) -> None:
        """Moves the rate to the measured one, or towards it by a factor of at most `growth`, if that is not far."""
        state, span = self._state, math.log(RANGE)
        away = self._log_rate(state.measured) - math.log(self._start)
        rate = self._start * math.exp(min(max(away, -span), span))
        growth = max(growth, far_growth(rate / state.rate))
        held = math.inf if state.held is None else state.held["rate"]
        rate = min(rate, growth * state.rate, held, math.inf if state.fallen is None else state.fallen)
        if len(state.doubled) == 2:  # a second doubling will decide
            rate = min(rate, DOUBTED_GROWTH * state.doubled[1]["rate"])
        if state.reached is not None and rate > REACHED_GROWTH * state.reached:
            rate = REACHED_GROWTH * state.reached
            self._tell(
                "reached",
                f"the learning rate stays at {rate:.2g}, {REACHED_GROWTH:g} times the one that first reached a KL "
                f"target of {self.kl:g}. The policy moves less than it did: look at what it samples, it may have "
                "collapsed",
            )
        if abs(math.log(rate / self._start)) > 0.999 * span:
            self._tell(
                "range",
                f"the learning rate stays at {rate:.2g}, {rate / self._start:.0e} times the first one, and the KL does "
                f"not meet a target of {self.kl:g}. Is it the KL to the policy that sampled, and does the optimiser "
                "use the rate?",
            )
        state.rate = rate

    def _has_fallen(self, name: str, value: float | None, window: int) -> bool:
        """Takes a value, if there is one; whether its mean over `window` updates is below half of the recent one."""
        now, recent, count = self._state.levels.get(name, (0.0, 0.0, 0))
        if value is not None and math.isfinite(value):
            value, count = float(value), count + 1
            part = 1 / min(count, window)
            now = (1 - part) * now + part * value
            part = 1 / min(count, self._recent_window)
            if now < recent / 2 > 0:
                part /= 10  # What is recent changes slowly here, or a collapse would soon be usual.
            recent = (1 - part) * recent + part * value
            self._state.levels[name] = [now, recent, count]
        return now < recent / 2 > 0

    def _tell(self, name: str, message: str) -> None:
        """Gives a warning, once."""
        if name not in self._state.warned:
            self._state.warned.append(name)
            self._warn(message)
