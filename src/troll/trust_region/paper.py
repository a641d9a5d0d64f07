"""The paper's own step, as its code computes it: for comparison only.

It differs from [trust_region_step][troll.trust_region_step] in three ways:

- The policies are compared on the union of both supports. Each token outside of it has probability 1e-12, whatever its
  mass. In the old policy this also holds for tokens that only the new one keeps, since they were not stored. Where
  policies are peaked, this makes no difference. Where they are flat, it sees divergences that do not exist: with half
  of the mass outside, a divergence of 0.001 nats can look like 0.15.
- The multiplier is found by n-ary bracketing on a log scale within [1e-7, 1e2].
- The ratio is that of the floored policies, also for a sampled token below the floor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_shape
from .dual import TokenCurve, tilt, tolerance
from .policy.sparse import SparsePolicy
from .probabilities import LOG_FLOOR, as_float, divergence, floored
from .projection import broadcast_bound
from .reading.capture import capture
from .step import TrustRegionStep

#: Range and resolution of the search for the multiplier η.
BRACKET_RANGE = (1e-7, 1e2)
BRACKET_POINTS = 8
BRACKET_ROUNDS = 20


def paper_step(logits: Tensor, old: SparsePolicy, kl_bound: float | Tensor = 0.05) -> TrustRegionStep:
    """Computes the ratio of each sampled token, and the pull, as the paper's code does.

    Args:
        logits: The new policy, (..., V), aligned with the tokens and divided by the sampling temperature.
        old: The old policy, (...), as captured, not truncated. Its K and δ also select the new policy's support.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (...).

    Returns:
        The step, differentiable in the logits as `trust_region_step`'s is. NaN where logits are not a distribution.

    Raises:
        ValueError: If positions or vocabulary do not fit, ε ≤ 0, or the old policy is truncated.
    """
    if old.truncated:
        raise ValueError("old must not be truncated: outside its tokens nothing has a probability to be floored")
    old.check_positions(logits.shape[:-1])
    check_shape("logits", logits, (*old.shape, old.vocab_size))
    bound = broadcast_bound(kl_bound, old.shape, as_float(logits))
    ids = union_support(logits, old)
    whole = torch.log_softmax(as_float(logits), -1)
    raw = whole.gather(-1, ids.clamp(min=0))
    log_old = torch.nn.functional.pad(old.log_probs.to(raw), (0, ids.shape[-1] - old.top_k), value=-torch.inf)

    # The rest is one more outcome, of 1e-12 for each of its tokens. NaN has to remain in a row that is not a
    # distribution.
    outside = (logits.shape[-1] - (ids >= 0).sum(-1, keepdim=True)).to(raw.dtype).log() + LOG_FLOOR
    present = torch.cat([ids >= 0, outside > -torch.inf], -1)
    log_new, log_old = (
        floored(torch.cat([x, torch.where(x[..., :1].isnan(), torch.nan, outside)], -1), present)
        for x in (raw, log_old)
    )

    s = torch.where(present, log_new - log_old, 0.0)
    kl_before = divergence(s.detach(), log_old).clamp(min=0)
    broken, projected = kl_before.isnan(), kl_before > bound
    tau, center = torch.ones_like(kl_before), torch.zeros_like(kl_before)
    if bool(projected.any()):
        curve = TokenCurve(log_old[projected], s.detach()[projected])
        tau[projected] = bracket(curve, bound[projected])
        center[projected] = curve.mean
    log_q = _projected(log_new, log_old, s, present, tau, center, projected)

    at = old.slot.unsqueeze(-1)
    log_ratio = (log_q - log_old).gather(-1, at).squeeze(-1)
    apart = torch.where(present & projected.unsqueeze(-1), log_new - log_q.detach(), 0.0)
    kl_after = divergence(torch.where(present, (log_q - log_old).detach(), 0.0), log_old)
    return TrustRegionStep(
        log_ratio=torch.where(broken, torch.nan, log_ratio),
        regression=torch.where(broken, torch.nan, divergence(apart, log_q.detach())),
        log_prob=torch.where(broken, torch.nan, raw.gather(-1, at).squeeze(-1)),
        kl_before=kl_before,
        kl_after=torch.where(projected, kl_after, kl_before),
        multiplier=torch.where(broken, torch.nan, 1 / tau - 1),
        projected=projected,
    )


def union_support(logits: Tensor, old: SparsePolicy) -> Tensor:
    """The tokens of both policies' supports, (..., 2 K), the old policy's first; −1 in unused slots."""
    sampled = old.token_ids.gather(-1, old.slot.unsqueeze(-1)).squeeze(-1)
    own = capture(logits, sampled, top_k=old.top_k, mass_threshold=old.mass_threshold).token_ids
    known = (own.unsqueeze(-1) == old.token_ids.unsqueeze(-2)).any(-1)
    return torch.cat([old.token_ids, own.masked_fill(known, -1)], -1)


def bracket(curve: TokenCurve, kl_bound: Tensor) -> Tensor:
    """τ = 1/(1 + η) of each token, (N,), by the paper's n-ary bracketing of η.

    Each round evaluates 8 values of η, equally spaced on a log scale, and keeps the interval that holds the root. The
    result is the feasible end (KL ≤ ε) of the last interval or, if even η = 1e2 does not meet the bound, that η.

    Args:
        curve: KL(τ) of N tokens.
        kl_bound: ε, (N,), with `0 < ε < KL(1)`.
    """
    low, high = (torch.full_like(kl_bound, end).log() for end in BRACKET_RANGE)
    found = torch.zeros_like(kl_bound, dtype=torch.bool)
    fractions = torch.linspace(0, 1, BRACKET_POINTS + 2, dtype=kl_bound.dtype, device=kl_bound.device)[1:-1]
    for _ in range(BRACKET_ROUNDS):
        bottom, width = low, high - low
        for fraction in fractions:
            log_eta = torch.where(found, high, bottom + fraction * width)
            kl = curve.at(1 / (1 + log_eta.exp())).kl
            feasible = kl <= kl_bound
            high = torch.where(feasible & (log_eta < high), log_eta, high)
            low = torch.where(~feasible & (log_eta > low), log_eta, low)
            found = found | (feasible & (kl >= kl_bound * (1 - tolerance(kl_bound.dtype))))
        if bool(found.all()):
            break
    return 1 / (1 + high.exp())


def _projected(
    log_new: Tensor, log_old: Tensor, s: Tensor, present: Tensor, tau: Tensor, center: Tensor, projected: Tensor
) -> Tensor:
    """Log q, (..., M), differentiable in log p̃ and s: log p̃ itself where nothing is projected."""
    rows = s[projected]
    if not len(rows):
        return log_new
    p, at_root = log_old[projected], tau[projected]
    found = tilt(p, rows, at_root, center[projected])
    # The implicit function theorem: one Newton step on KL(τ) changes nothing in value and gives τ its derivative. With
    # σ² = 0, nothing moves on the surface of the ball.
    slope = at_root * found.variance.detach()
    step = torch.where(slope > 0, (found.kl - found.kl.detach()) / slope, 0.0)
    moved = tilt(p, rows, at_root - step, center[projected])
    log_q = log_new.clone()
    log_q[projected] = torch.where(present[projected], p + moved.log_ratio, -torch.inf)
    return log_q
