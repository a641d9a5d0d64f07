"""The float64 definition of the trust-region core, one token position at a time.

Everything that computes slots, tails, floors, the projection or its gradients (PyTorch, fused, Triton, sharded, verl)
is tested against this file. It is written to be read beside DESIGN.md, not to be fast: numpy and scipy, no torch, one
row of logits per call. p is the old policy, p̃ ("new") the new one, q the projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

FLOOR = 1e-12

Array = np.ndarray


# ---------------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------------
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


@dataclass
class OldRow:
    """One position of the captured policy. `size` is the number of slots, used or not."""

    ids: list[int]
    log_probs: Array
    tail_log_prob: float
    tail: str
    size: int
    mass_threshold: float
    vocabulary: int

    def log_prob(self, token: int) -> float:
        if token not in self.ids:
            raise ValueError(f"token {token} is outside the support")
        return float(self.log_probs[self.ids.index(token)])

    def padded_ids(self) -> list[int]:
        return self.ids + [-1] * (self.size - len(self.ids))

    def padded_log_probs(self) -> list[float]:
        return list(self.log_probs) + [-math.inf] * (self.size - len(self.ids))


def complement(vocabulary: int, support: Sequence[int]) -> list[int]:
    inside = set(support)
    return [v for v in range(vocabulary) if v not in inside]


def capture(logits: Array, token: int, top_k: int, mass_threshold: float, tail: str) -> OldRow:
    logits = np.asarray(logits, dtype=np.float64)
    vocabulary = len(logits)
    ids = slots(logits, token, top_k, mass_threshold)
    rest = complement(vocabulary, ids)
    log_probs = log_softmax(logits)

    if tail == "bucket":
        kept = log_probs[ids]
        tail_log_prob = log_sum_exp(log_probs[rest])
    else:
        # Every other token of the vocabulary has 1e-12, and the whole is renormalised.
        probs = np.maximum(np.exp(log_probs[ids]), FLOOR)
        total = float(np.sum(probs)) + len(rest) * FLOOR
        kept = np.log(probs / total)
        tail_log_prob = math.log(len(rest) * FLOOR / total) if rest else -math.inf
    return OldRow(ids, kept, tail_log_prob, tail, min(top_k, vocabulary), mass_threshold, vocabulary)


def on_support(logits: Array, ids: Sequence[int]) -> tuple[Array, float]:
    """The raw log-probabilities of the tokens on a support, and that of its complement."""
    log_probs = log_softmax(logits)
    return log_probs[list(ids)], log_sum_exp(log_probs[complement(len(log_probs), ids)])


# ---------------------------------------------------------------------------------------------------------------------
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


def floor_outcomes(new_logits: Array, token: int, old: OldRow) -> Outcomes:
    """The union of both supports, and everything else as one outcome in which every token has 1e-12."""
    log_probs = log_softmax(new_logits)
    new_ids = slots(new_logits, token, old.size, old.mass_threshold)
    union = list(old.ids) + [v for v in new_ids if v not in old.ids]
    rest = complement(old.vocabulary, union)

    # The old policy is already normalised: its tail is shared equally by the tokens it did not store.
    unstored = old.vocabulary - len(old.ids)
    log_old = []
    for v in union:
        log_old.append(old.log_prob(v) if v in old.ids else old.tail_log_prob - math.log(unstored))

    new = [max(math.exp(log_probs[v]), FLOOR) for v in union]
    blocked = [math.exp(log_probs[v]) < FLOOR for v in union]
    tokens = [[v] for v in union]
    if rest:
        log_old.append(old.tail_log_prob - math.log(unstored) + math.log(len(rest)))
        new.append(len(rest) * FLOOR)
        blocked.append(True)
        tokens.append(rest)
    log_new = np.log(np.asarray(new)) - math.log(math.fsum(new))
    return Outcomes(tokens, np.asarray(log_old), log_new, np.asarray(blocked))


def outcomes_of(new_logits: Array, token: int, old: OldRow) -> Outcomes:
    if old.tail == "bucket":
        return bucket_outcomes(new_logits, old)
    return floor_outcomes(new_logits, token, old)


# ---------------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def projection_gradient(outcomes: Outcomes, solution: Solution, upstream: Array) -> Array:
    """∂L/∂log p̃ of every outcome, from upstream = ∂L/∂log q, for a projected token (the KKT formula)."""
    s = outcomes.log_new - outcomes.log_old
    q = np.exp(solution.log_q)
    mean = float(np.sum(q * s))
    variance = float(np.sum(q * (s - mean) ** 2))
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


# ---------------------------------------------------------------------------------------------------------------------
# Products: the per-token step, and the projection of a whole distribution


@dataclass
class StepRow:
    log_prob: float
    new_log_prob: float
    regression: float
    kl_before: float
    kl_after: float
    multiplier: float
    projected: bool
    log_prob_gradient: Array  # with respect to the raw logits of the new policy, as the two below
    new_log_prob_gradient: Array
    regression_gradient: Array


def step(new_logits: Array, token: int, old: OldRow, kl_bound: float) -> StepRow:
    new_logits = np.asarray(new_logits, dtype=np.float64)
    if not (is_finite_row(new_logits) and not np.isnan(old.log_probs).any()):
        nothing = np.full(len(new_logits), math.nan)
        nan = math.nan
        return StepRow(nan, nan, nan, nan, nan, nan, False, nothing, nothing, nothing)

    outcomes = outcomes_of(new_logits, token, old)
    solution = solve(outcomes.log_old, outcomes.log_new, kl_bound)
    raw = float(log_softmax(new_logits)[token])
    position = outcomes.tokens.index([token])
    one_hot = np.zeros(len(outcomes.tokens))
    one_hot[position] = 1.0
    raw_gradient = to_logits(new_logits, outcomes.tokens, one_hot)

    if solution.projected:
        log_prob = float(solution.log_q[position])
        log_prob_gradient = to_logits(
            new_logits, outcomes.tokens, projection_gradient(outcomes, solution, upstream=one_hot)
        )
        regression = kl_divergence(outcomes.log_new, solution.log_q)
        pull = to_logits(new_logits, outcomes.tokens, regression_gradient(outcomes, solution))
    else:
        log_prob, log_prob_gradient = raw, raw_gradient
        regression, pull = 0.0, np.zeros(len(new_logits))
    return StepRow(
        log_prob=log_prob,
        new_log_prob=raw,
        regression=regression,
        kl_before=solution.kl_before,
        kl_after=solution.kl_after,
        multiplier=solution.multiplier,
        projected=solution.projected,
        log_prob_gradient=log_prob_gradient,
        new_log_prob_gradient=raw_gradient,
        regression_gradient=pull,
    )


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


# ---------------------------------------------------------------------------------------------------------------------
# The objective


def loss(
    log_probs: Array,
    regression: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    regression_weight: float,
    ratio_level: str,
    aggregation: str,
    max_length: int | None,
) -> float:
    """−(ratio · advantage) + α · regression, over the tokens that the mask keeps; (B, T) arrays, no gradients."""
    sequences, length = log_probs.shape
    per_sequence: list[list[float]] = []
    for b in range(sequences):
        kept = [t for t in range(length) if mask[b, t]]
        log_ratios = {t: float(log_probs[b, t] - old_log_probs[b, t]) for t in kept}
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
        return total / max(sum(len(losses) for losses in per_sequence), 1)
    assert aggregation == "fixed_length" and max_length is not None
    return total / (sequences * max_length)
