"""The float64 definition of the trust-region core, one token position at a time.

Everything that computes slots, tails, floors, the projection or its gradients (PyTorch, fused, Triton, sharded, verl)
is tested against this file. It is written to be read beside DESIGN.md, not to be fast: numpy and scipy, no torch, one
row of logits per call. p is the old policy, p̃ ("new") the new one, q the projection.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

FLOOR = 1e-12

Array = np.ndarray


# Small pieces


def log_sum_exp(values: Array | Sequence[float]) -> float:
    """log Σ exp(values); −inf for no values at all, or where all of them are −inf."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or array.max() == -np.inf:
        return -math.inf
    top = array.max()
    return float(top + np.log(np.sum(np.exp(array - top))))


def log_softmax(logits: Array) -> Array:
    logits = np.asarray(logits, dtype=np.float64)
    # Taking the maximum off first keeps the digits of a probability near one. Rows that are not finite become NaN.
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max()
    return shifted - math.log(np.sum(np.exp(shifted)))


def is_finite_row(logits: Array) -> bool:
    """−inf marks a masked token and is fine; NaN, +inf or nothing but −inf is not."""
    logits = np.asarray(logits, dtype=np.float64)
    return not (np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all())


def kl_divergence(log_a: Array, log_b: Array) -> float:
    """KL(a ‖ b) of two normalised distributions; an outcome without mass in a contributes nothing."""
    a, b = np.exp(log_a), np.exp(log_b)
    present = log_a > -np.inf
    x = log_a[present] - log_b[present]
    # Σ a x, with Σ (b − a) = 0 added outcome by outcome: no term is negative, and nothing cancels.
    b_minus_a = np.where(x >= 0, a[present] * np.expm1(-np.maximum(x, 0)), -b[present] * np.expm1(np.minimum(x, 0)))
    return float(np.sum(a[present] * x + b_minus_a) + np.sum(b[~present]))


def floored(log_probs: Array) -> Array:
    """Probabilities below 1e-12 are raised to it, and all are renormalised."""
    probs = np.maximum(np.exp(log_probs), FLOOR)
    return np.log(probs) - math.log(np.sum(probs))


# The old policy: slots and tail


def slots(logits: Array, token: int, top_k: int, mass_threshold: float) -> list[int]:
    """The used slots, in order: larger logit first, then smaller id; always with the sampled token."""
    vocabulary = len(logits)
    size = min(top_k, vocabulary)
    order = sorted(range(vocabulary), key=lambda v: (-logits[v], v))
    probs = np.exp(log_softmax(logits))[order]

    used: list[int] = []
    for i in range(size):
        remaining = float(np.sum(probs[i:]))
        if mass_threshold > 0 and remaining <= mass_threshold:
            break
        used.append(order[i])

    if token not in used:
        if len(used) < size:
            used.append(token)
        else:
            used[-1] = token
    return used


def kept_set(
    logits: Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_p_first: bool = False,
    ties: str = "all",
) -> list[int]:
    """What a sampler with these settings may draw: by top-k, then top-p; by min-p first or last; in `slots`' order.

    With `ties` "all", top-k keeps all tokens as likely as the k-th, and top-p removes the smaller ids of a tie first.
    With "exact", top-k keeps k tokens, and both remove the larger ids first.
    """
    probs = np.exp(log_softmax(logits))
    smaller_ids_stay = ties == "exact"
    kept = sorted(range(len(probs)), key=lambda v: (-logits[v], v if smaller_ids_stay else -v))
    if min_p_first:
        kept = [v for v in kept if probs[v] >= min_p * probs[kept[0]]]
    if top_k:
        last = logits[kept[min(top_k, len(kept)) - 1]]
        kept = kept[:top_k] if smaller_ids_stay else [v for v in kept if logits[v] >= last]
    if top_p < 1:
        mass = math.fsum(probs[kept])
        kept = [v for i, v in enumerate(kept) if i == 0 or math.fsum(probs[kept[i:]]) > (1 - top_p) * mass]
    kept = [v for v in kept if probs[v] >= min_p * probs[kept[0]]]
    return sorted(kept, key=lambda v: (-logits[v], v))


@dataclass
class OldRow:
    """One position of the captured policy, in raw numbers. `size` is the number of slots, used or not."""

    ids: list[int]
    log_probs: Array
    tail_log_prob: float
    slot: int
    size: int
    mass_threshold: float
    vocabulary: int

    @property
    def token(self) -> int:
        """The sampled token."""
        return self.ids[self.slot]

    @property
    def log_prob(self) -> float:
        return float(self.log_probs[self.slot])

    def padded_ids(self) -> list[int]:
        return self.ids + [-1] * (self.size - len(self.ids))

    def padded_log_probs(self) -> list[float]:
        return list(self.log_probs) + [-math.inf] * (self.size - len(self.ids))


def complement(vocabulary: int, support: Sequence[int]) -> list[int]:
    inside = set(support)
    return [v for v in range(vocabulary) if v not in inside]


def capture(logits: Array, token: int, top_k: int, mass_threshold: float) -> OldRow:
    logits = np.asarray(logits, dtype=np.float64)
    ids = slots(logits, token, top_k, mass_threshold)
    log_probs, tail_log_prob = on_support(logits, ids)
    size = min(top_k, len(logits))
    return OldRow(ids, log_probs, tail_log_prob, ids.index(token), size, mass_threshold, len(logits))


def on_support(logits: Array, ids: Sequence[int]) -> tuple[Array, float]:
    """The raw log-probabilities of the tokens on a support, and that of its complement."""
    log_probs = log_softmax(logits)
    return log_probs[list(ids)], log_sum_exp(log_probs[complement(len(log_probs), ids)])


# The outcomes that both policies are compared on


@dataclass
class Outcomes:
    """Both policies on the same outcomes, floored and normalised.

    `tokens[j]` are the vocabulary entries that outcome j stands for, `blocked[j]` says that p̃ is floored there, so that
    no gradient flows through it.
    """

    tokens: list[list[int]]
    log_old: Array
    log_new: Array
    blocked: Array


def dense_outcomes(new_logits: Array, old_logits: Array) -> Outcomes:
    """Every vocabulary entry is an outcome."""
    log_new = log_softmax(new_logits)
    return Outcomes(
        tokens=[[v] for v in range(len(log_new))],
        log_old=floored(log_softmax(old_logits)),
        log_new=floored(log_new),
        blocked=np.exp(log_new) < FLOOR,
    )


def bucket_outcomes(new_logits: Array, old: OldRow) -> Outcomes:
    """The old policy's support, and its complement as one more outcome unless neither policy has any mass there."""
    log_new, new_tail = on_support(new_logits, old.ids)
    log_old = old.log_probs
    tokens = [[v] for v in old.ids]
    if not (old.tail_log_prob == -math.inf and new_tail == -math.inf):
        log_new = np.append(log_new, new_tail)
        log_old = np.append(log_old, old.tail_log_prob)
        tokens.append(complement(old.vocabulary, old.ids))
    return Outcomes(tokens, floored(log_old), floored(log_new), np.exp(log_new) < FLOOR)


def floor_outcomes(new_logits: Array, old: OldRow) -> Outcomes:
    """The union of both supports, and everything else as one outcome, of which every token has 1e-12 in both policies.

    So has, in the old policy, every token that it did not keep itself.
    """
    log_probs = log_softmax(new_logits)
    new_ids = slots(new_logits, old.token, old.size, old.mass_threshold)
    union = list(old.ids) + [v for v in new_ids if v not in old.ids]
    rest = complement(old.vocabulary, union)
    kept = dict(zip(old.ids, old.log_probs, strict=True))

    tokens = [[v] for v in union]
    old_probs = [max(math.exp(kept.get(v, -math.inf)), FLOOR) for v in union]
    new_probs = [max(math.exp(log_probs[v]), FLOOR) for v in union]
    blocked = [math.exp(log_probs[v]) < FLOOR for v in union]
    if rest:
        tokens.append(rest)
        old_probs.append(len(rest) * FLOOR)
        new_probs.append(len(rest) * FLOOR)
        blocked.append(True)
    log_old, log_new = (np.log(probs) - math.log(math.fsum(probs)) for probs in (old_probs, new_probs))
    return Outcomes(tokens, log_old, log_new, np.asarray(blocked))


# The projection


@dataclass
class Solution:
    """q = argmin KL(q ‖ p̃) subject to KL(q ‖ p) ≤ ε, on floored and normalised outcomes."""

    projected: bool
    tau: float
    log_q: Array
    kl_before: float
    kl_after: float

    @property
    def multiplier(self) -> float:
        return 1.0 / self.tau - 1.0 if self.projected else 0.0


def interpolate(log_old: Array, log_new: Array, tau: float) -> Array:
    """log p + τ s − A(τ)."""
    log_q = log_old + tau * (log_new - log_old)
    return log_q - log_sum_exp(log_q)


def solve(log_old: Array, log_new: Array, kl_bound: float) -> Solution:
    kl_before = kl_divergence(log_new, log_old)
    if not kl_before > kl_bound:
        return Solution(False, 1.0, log_new, kl_before, kl_before)

    def excess(tau: float) -> float:
        return kl_divergence(interpolate(log_old, log_new, tau), log_old) - kl_bound

    tau = float(brentq(excess, 0.0, 1.0, xtol=1e-300, rtol=4 * np.finfo(np.float64).eps, maxiter=1000))
    log_q = interpolate(log_old, log_new, tau)
    return Solution(True, tau, log_q, kl_before, kl_divergence(log_q, log_old))


@dataclass
class SharedSolution:
    """min Σ w KL(q ‖ p̃) subject to Σ w KL(q ‖ p) ≤ ε over the tokens of one group; log_q holds one row a token."""

    projected: bool
    tau: float
    log_q: list[Array]
    kl_before: float
    kl_after: float


def solve_shared(
    pairs: Sequence[tuple[Array, Array]], weights: Array | Sequence[float], kl_bound: float
) -> SharedSolution:
    """One τ for several tokens, given (log_old, log_new) of each; their numbers of outcomes may differ."""

    def at(tau: float) -> tuple[list[Array], float]:
        log_q = [interpolate(old, new, tau) for old, new in pairs]
        terms = [w * kl_divergence(q, old) for w, q, (old, _) in zip(weights, log_q, pairs, strict=True)]
        return log_q, math.fsum(terms)

    tau = 1.0
    log_q, kl_before = at(tau)
    projected = kl_before > kl_bound
    if projected:
        tau = float(
            brentq(
                lambda x: at(x)[1] - kl_bound, 0.0, 1.0, xtol=1e-300, rtol=4 * np.finfo(np.float64).eps, maxiter=1000
            )
        )
        log_q, _ = at(tau)
    return SharedSolution(projected, tau, log_q, kl_before, at(tau)[1])


def moments(log_q: Array, s: Array) -> tuple[float, float]:
    """The mean μ and the variance σ² of s under q."""
    q = np.exp(log_q)
    mean = float(np.sum(q * s))
    return mean, float(np.sum(q * (s - mean) ** 2))


# Gradients


def projection_gradient(outcomes: Outcomes, solution: Solution, upstream: Array) -> Array:
    """∂L/∂log p̃ of every outcome, from upstream = ∂L/∂log q, for a projected token (the KKT formula)."""
    s = outcomes.log_new - outcomes.log_old
    q = np.exp(solution.log_q)
    mean, variance = moments(solution.log_q, s)
    total = float(np.sum(upstream))
    covariance = float(np.sum(upstream * (s - mean)))
    gradient = solution.tau * (upstream - q * total - covariance * q * (s - mean) / variance)
    return np.where(outcomes.blocked, 0.0, gradient)


def regression_gradient(outcomes: Outcomes, solution: Solution) -> Array:
    """∂KL(p̃ ‖ ⌊q⌋)/∂log p̃ of every outcome, for a projected token.

    Through the normalisation of p̃, so p̃ (log p̃ − log q + 1) less p̃ times the sum of that, which is KL + 1.
    """
    new = np.exp(outcomes.log_new)
    difference = outcomes.log_new - solution.log_q
    gradient = new * (difference - float(np.sum(new * difference)))
    return np.where(outcomes.blocked, 0.0, gradient)


def proximal_gradient(outcomes: Outcomes) -> Array:
    """∂KL(p ‖ p̃)/∂log p̃ of every outcome: −p each, which the normalisation of p̃ makes p̃ − p."""
    return through_floor(outcomes, -np.exp(outcomes.log_old))


def to_logits(new_logits: Array, tokens: list[list[int]], gradient: Array) -> Array:
    """From ∂L/∂log p̃ of every outcome (raw log-probabilities) to ∂L/∂z of every vocabulary entry."""
    log_probs = log_softmax(new_logits)
    result = -np.exp(log_probs) * float(np.sum(gradient))
    for outcome, members in enumerate(tokens):
        if gradient[outcome] == 0.0:
            continue
        # An outcome of several tokens is a logsumexp: each token takes its share of the outcome's mass.
        share = np.exp(log_probs[members] - log_sum_exp(log_probs[members])) if len(members) > 1 else 1.0
        result[members] += gradient[outcome] * share
    return result


# Products: the per-token step, and the projection of a whole distribution


@dataclass
class StepRow:
    log_ratio: float
    log_prob: float
    regression: float
    kl_before: float
    kl_after: float
    multiplier: float
    projected: bool
    log_ratio_gradient: Array  # with respect to the raw logits of the new policy, as the two below
    log_prob_gradient: Array
    regression_gradient: Array


def step(new_logits: Array, old: OldRow, kl_bound: float, pull: str = "projection", *, paper: bool = False) -> StepRow:
    """What DESIGN.md calls the step, "The ratio" included, or the paper's; `regression` is the pull that was chosen."""
    assert pull in ("projection", "proximal")
    new_logits = np.asarray(new_logits, dtype=np.float64)
    if not (is_finite_row(new_logits) and not np.isnan(old.log_probs).any()):
        nothing = np.full(len(new_logits), math.nan)
        nan = math.nan
        return StepRow(nan, nan, nan, nan, nan, nan, False, nothing, nothing, nothing)

    outcomes = (floor_outcomes if paper else bucket_outcomes)(new_logits, old)
    solution = solve(outcomes.log_old, outcomes.log_new, kl_bound)
    sampled = np.zeros(len(outcomes.tokens))
    sampled[old.slot] = 1.0
    log_prob = float(log_softmax(new_logits)[old.token])

    if not paper:
        log_ratio, gradient = _ratio_of_raw(outcomes, solution, old, log_prob, sampled)
    else:
        log_ratio = float(solution.log_q[old.slot] - outcomes.log_old[old.slot])
        if solution.projected:
            gradient = projection_gradient(outcomes, solution, upstream=sampled)
        else:
            gradient = through_floor(outcomes, sampled)

    regression, pulled = 0.0, np.zeros(len(outcomes.tokens))
    if pull == "proximal":
        regression = kl_divergence(outcomes.log_old, outcomes.log_new)
        pulled = proximal_gradient(outcomes)
    elif solution.projected:
        regression = kl_divergence(outcomes.log_new, solution.log_q)
        pulled = regression_gradient(outcomes, solution)
    return StepRow(
        log_ratio=log_ratio,
        log_prob=log_prob,
        regression=regression,
        kl_before=solution.kl_before,
        kl_after=solution.kl_after,
        multiplier=solution.multiplier,
        projected=solution.projected,
        log_ratio_gradient=to_logits(new_logits, outcomes.tokens, gradient),
        log_prob_gradient=to_logits(new_logits, outcomes.tokens, sampled),
        regression_gradient=to_logits(new_logits, outcomes.tokens, pulled),
    )


def _ratio_of_raw(
    outcomes: Outcomes, solution: Solution, old: OldRow, log_prob: float, sampled: Array
) -> tuple[float, Array]:
    """τ s_o − A(τ) with s_o from raw log-probabilities, τ and A from the floored outcomes; and its gradient.

    The gradient is with respect to the raw log-probabilities of the outcomes. That of o receives τ, floored or not; the
    others what the derivatives of τ and A in s_j leave, through the floor.
    """
    s_sampled, to_sampled = raw_s(old, log_prob, sampled)
    if not solution.projected:
        return s_sampled, to_sampled
    s = outcomes.log_new - outcomes.log_old
    log_ratio = solution.tau * s_sampled - log_sum_exp(outcomes.log_old + solution.tau * s)
    # With q fixed, ∂A/∂s_j = τ q_j; and τ moves by −τ q_j (s_j − μ)/σ², which changes τ s_o − A by s_o − μ as much.
    q = np.exp(solution.log_q)
    mean, variance = moments(solution.log_q, s)
    correlation = (s_sampled - mean) if s_sampled > -math.inf else 0.0  # the ratio is 0, whatever else moves
    direct = -solution.tau * q * (1 + correlation * (s - mean) / variance)
    return log_ratio, through_floor(outcomes, direct) + solution.tau * to_sampled


def raw_s(old: OldRow, log_prob: float, sampled: Array) -> tuple[float, Array]:
    """s of the sampled token, and its gradient. A token that the old policy excludes cannot have been sampled: 0."""
    if old.log_prob == -math.inf:
        return 0.0, np.zeros_like(sampled)
    return log_prob - old.log_prob, sampled


def shared_step(
    rows: Sequence[tuple[Array, OldRow]],
    weights: Array | Sequence[float],
    kl_bound: float,
    upstream: Array,
    pull: str = "projection",
) -> list[StepRow]:
    """The steps of tokens that share one multiplier.

    `log_ratio_gradient` is that of Σ upstream · log_ratio over all tokens: the multiplier moves with each.
    """
    outcomes = [bucket_outcomes(new, old) for new, old in rows]
    s = [each.log_new - each.log_old for each in outcomes]
    shared = solve_shared([(each.log_old, each.log_new) for each in outcomes], weights, kl_bound)
    tau = shared.tau
    means, variances = zip(*(moments(log_q, x) for log_q, x in zip(shared.log_q, s, strict=True)), strict=True)
    slope = float(np.sum(np.asarray(weights) * variances))
    log_probs = [float(log_softmax(new)[old.token]) for new, old in rows]
    # τ moves with the s of every token, and with τ every ratio.
    correlation = sum(upstream[t] * (raw_s(old, log_probs[t], s[t])[0] - means[t]) for t, (_, old) in enumerate(rows))
    steps = []
    for t, (new, old) in enumerate(rows):
        solution = Solution(
            shared.projected, tau, shared.log_q[t], kl_divergence(outcomes[t].log_new, outcomes[t].log_old), 0.0
        )
        sampled = np.zeros(len(s[t]))
        sampled[old.slot] = 1.0
        own, to_sampled = raw_s(old, log_probs[t], sampled)
        log_ratio, of_ratio, regression, pulled = own, upstream[t] * to_sampled, 0.0, np.zeros_like(sampled)
        if shared.projected:
            log_ratio = tau * own - log_sum_exp(outcomes[t].log_old + tau * s[t])
            q = np.exp(shared.log_q[t])
            direct = -tau * q * (upstream[t] + weights[t] * correlation * (s[t] - means[t]) / slope)
            of_ratio = through_floor(outcomes[t], direct) + tau * upstream[t] * to_sampled
            regression = kl_divergence(outcomes[t].log_new, shared.log_q[t])
            pulled = regression_gradient(outcomes[t], solution)
        if pull == "proximal":  # of each token, whatever they share
            regression = kl_divergence(outcomes[t].log_old, outcomes[t].log_new)
            pulled = proximal_gradient(outcomes[t])
        gradients = [to_logits(new, outcomes[t].tokens, each) for each in (of_ratio, sampled, pulled)]
        kl_after = kl_divergence(shared.log_q[t], outcomes[t].log_old)
        multiplier = solution.multiplier
        steps.append(
            StepRow(
                log_ratio,
                log_probs[t],
                regression,
                solution.kl_before,
                kl_after,
                multiplier,
                shared.projected,
                *gradients,
            )
        )
    return steps


@dataclass
class TruncatedRow:
    """The step on a sampler's kept set, over the whole vocabulary's logits, and the log mass of the set."""

    step: StepRow
    kept_log_mass: float
    kept_log_mass_gradient: Array
    entropy: float
    entropy_gradient: Array


def truncated_step(new_logits: Array, old: OldRow, kl_bound: float, pull: str = "projection") -> TruncatedRow:
    """Both policies on the kept set and renormalised; and the pull also between the masses of the set and of the rest.

    `old` has the kept set's own log-probabilities, and as its tail the log mass of all other tokens, above −inf.
    """
    kept, token = old.ids, old.token
    own = replace(old, ids=list(range(len(kept))), tail_log_prob=-math.inf, vocabulary=len(kept))
    on_kept = step(np.asarray(new_logits)[kept], own, kl_bound, pull)
    parts = [kept, complement(len(new_logits), kept)]
    log_probs = log_softmax(new_logits)
    new_masses = np.array([log_sum_exp(log_probs[part]) for part in parts])
    old_masses = np.array([math.log(-math.expm1(old.tail_log_prob)), old.tail_log_prob])
    two = OldRow([0, 1], old_masses, -math.inf, slot=0, size=2, mass_threshold=0.0, vocabulary=2)
    of_mass = step(new_masses, two, kl_bound, pull)

    def spread(on_set: Array, of_masses: Array | None = None) -> Array:
        """A gradient on the kept set, and that of the two masses, each token of a part with its share."""
        result = np.zeros(len(new_logits))
        result[kept] += on_set
        for part, gradient in zip(parts, [] if of_masses is None else of_masses, strict=of_masses is not None):
            result[part] += gradient * np.exp(log_probs[part] - log_sum_exp(log_probs[part]))
        return result

    one_hot = np.eye(len(new_logits))[token]
    own_entropy, entropy_gradient = entropy(np.asarray(new_logits)[kept])
    return TruncatedRow(
        StepRow(
            on_kept.log_ratio,
            float(log_probs[token]),
            on_kept.regression + of_mass.regression,
            on_kept.kl_before,
            on_kept.kl_after,
            on_kept.multiplier,
            on_kept.projected,
            spread(on_kept.log_ratio_gradient),
            one_hot - np.exp(log_probs),
            spread(on_kept.regression_gradient, of_mass.regression_gradient),
        ),
        float(new_masses[0]),
        spread(np.zeros(len(kept)), np.array([1.0, 0.0])) - np.exp(log_probs),
        own_entropy,
        spread(entropy_gradient),
    )


def entropy(logits: Array) -> tuple[float, Array]:
    """−Σ p log p of a row of logits, and its gradient."""
    log_probs = log_softmax(logits)
    probs = np.exp(log_probs)
    finite = np.where(probs > 0, log_probs, 0.0)
    value = -float(np.sum(probs * finite))
    return value, -probs * (finite + value)


def through_floor(outcomes: Outcomes, gradient: Array) -> Array:
    """From ∂L/∂log p̃ of floored, renormalised outcomes to that of the raw ones."""
    raw = gradient - np.exp(outcomes.log_new) * float(np.sum(gradient))
    return np.where(outcomes.blocked, 0.0, raw)


@dataclass
class ProjectedRow:
    """log q of every outcome; `gradient(upstream)` pulls ∂L/∂log q back to the new policy's logits."""

    log_probs: Array
    solution: Solution
    outcomes: Outcomes
    new_logits: Array

    def gradient(self, upstream: Array) -> Array:
        if self.solution.projected:
            upstream = projection_gradient(self.outcomes, self.solution, upstream)
        return to_logits(self.new_logits, self.outcomes.tokens, upstream)


def project(new_logits: Array, old: Array | OldRow, kl_bound: float) -> ProjectedRow:
    """Dense for a row of old logits; on K + 1 outcomes (less the absent ones) for a captured bucket policy."""
    new_logits = np.asarray(new_logits, dtype=np.float64)
    log_probs = log_softmax(new_logits)
    if isinstance(old, OldRow):
        outcomes = bucket_outcomes(new_logits, old)
    else:
        outcomes = dense_outcomes(new_logits, old)
    solution = solve(outcomes.log_old, outcomes.log_new, kl_bound)
    if solution.projected:
        result = solution.log_q
    else:
        result = np.asarray([log_sum_exp(log_probs[members]) for members in outcomes.tokens])
    return ProjectedRow(result, solution, outcomes, new_logits)


# The objective


def loss(
    log_ratio: Array,
    regression: Array,
    advantages: Array,
    mask: Array,
    regression_weight: float,
    ratio_level: str,
    aggregation: str,
    max_length: int | None = None,
    num_tokens: float | None = None,
) -> float:
    """−(ratio · advantage) + α · regression, over the tokens that the mask keeps; (B, T) arrays, no gradients."""
    sequences, length = log_ratio.shape
    per_sequence: list[list[float]] = []
    for b in range(sequences):
        kept = [t for t in range(length) if mask[b, t]]
        log_ratios = {t: float(log_ratio[b, t]) for t in kept}
        if ratio_level == "sequence" and kept:
            mean = sum(log_ratios.values()) / len(kept)
            log_ratios = dict.fromkeys(kept, mean)
        losses = []
        for t in kept:
            advantage = float(advantages[b]) if advantages.ndim == 1 else float(advantages[b, t])
            losses.append(-math.exp(log_ratios[t]) * advantage + regression_weight * float(regression[b, t]))
        per_sequence.append(losses)

    if aggregation == "sequence_mean":
        # A sequence without a token counts as zero, as in TRL.
        return sum(sum(losses) / max(len(losses), 1) for losses in per_sequence) / sequences
    total = sum(sum(losses) for losses in per_sequence)
    if aggregation == "token_mean":
        return total / (max(sum(len(losses) for losses in per_sequence), 1) if num_tokens is None else num_tokens)
    assert aggregation == "fixed_length" and max_length is not None
    return total / (sequences * max_length)
