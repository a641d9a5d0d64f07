"""The dual problem: one monotone scalar root per token.

The projected policy is ``q ∝ p e^{τ s}`` with ``s = log p̃ − log p`` and ``τ = 1/(1 + η) ∈ (0, 1)``. Its divergence
``KL(τ) = KL(q ‖ p)`` grows from 0 at ``τ = 0`` to ``KL(p̃ ‖ p)`` at ``τ = 1``, and a solver finds where it meets the
bound. To add a solver, write a function with the signature of :func:`newton` and name it in :data:`SOLVERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Range and resolution of the paper's search for the multiplier η.
BRACKET_RANGE = (1e-7, 1e2)
BRACKET_POINTS = 8
BRACKET_ROUNDS = 20

#: A guard only: `newton` needs 3 to 5 evaluations in the median, and at worst 13 were seen.
MAX_EVALUATIONS = 64


class Tilted(NamedTuple):
    """The tilted policy ``q ∝ p e^{τ s}`` and the moments that both Newton's method and the backward pass need.

    Shapes: ``log_ratio`` is (N, M), the others (N,).
    """

    log_ratio: Tensor
    """``log q − log p``, meaningless on absent outcomes (their p is 0)."""
    kl: Tensor
    """KL(q ‖ p) in nats."""
    mean: Tensor
    """``μ = E_q[s]``."""
    variance: Tensor
    """``σ² = Var_q[s]``."""


class Root(NamedTuple):
    """Where KL(τ) meets the bound. Each (N,)."""

    tau: Tensor
    mean: Tensor
    """An estimate of ``E_q[s]`` at the root, around which the caller centres s."""
    evaluations: Tensor
    """Evaluations of KL(τ) spent on each token (int64), beside that of τ = 1."""


def tilt(log_p: Tensor, s: Tensor, tau: Tensor, center: Tensor) -> Tilted:
    """Evaluates ``q ∝ p e^{τ s}``.

    KL(q ‖ p) is summed as ``Σ p (x eˣ − expm1 x)`` with ``x = log q − log p``: terms that are never negative. The
    textbook form ``τ A'(τ) − A(τ)`` cancels in float32.

    Args:
        log_p: Old policy, (N, M), normalised; −inf on absent outcomes.
        s: ``log p̃ − log p``, (N, M); any finite number on absent outcomes.
        tau: (N,).
        center: (N,). Any number gives the same result up to rounding, which is least near ``E_q[s]``.
    """
    centered = s - center.unsqueeze(-1)
    exponent = tau.unsqueeze(-1) * centered
    unnormalised = log_p + exponent
    normaliser = torch.logsumexp(unnormalised, dim=-1, keepdim=True)
    q = torch.exp(unnormalised - normaliser)
    log_ratio = exponent - normaliser
    mean = (q * centered).sum(-1)
    variance = (q * (centered - mean.unsqueeze(-1)).square()).sum(-1)
    return Tilted(log_ratio, divergence(log_ratio, log_p), center + mean, variance)


def divergence(log_ratio: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) from ``x = log q − log p``, (..., M) to (...), as ``Σ p (x eˣ − expm1 x)``; absent where p = 0."""
    growth = torch.expm1(log_ratio)
    return (torch.exp(log_p) * (log_ratio * (growth + 1) - growth)).sum(-1)


def tolerance(dtype: torch.dtype) -> float:
    """How close to the root a solver comes, on |log KL(τ) − log ε|."""
    # Both sit well above the rounding error of `tilt` and well inside what the caller promises:
    # 1e-3 · ε in float32, 1e-9 in float64.
    return 2e-5 if dtype == torch.float32 else 1e-11


def newton(log_p: Tensor, s: Tensor, kl_bound: Tensor) -> Root:
    """Safeguarded Newton iteration on ``log KL(τ) = log ε``.

    Near-deterministic policies make KL(τ) look like a step, and neither plain Newton in τ nor in log τ survives that.
    From below the root, log KL is usually concave in τ and the step is taken in τ; from above, in log τ. Where a step
    leaves the bracket, or has not halved ``|log KL − log ε|``, the bracket is bisected: convergence is certain.
    Tokens that have converged drop out of the computation.

    Args:
        log_p: Old policy, (N, M), normalised; −inf on absent outcomes.
        s: ``log p̃ − log p``, (N, M); 0 on absent outcomes.
        kl_bound: ε, (N,), with ``0 < ε < KL(p̃ ‖ p)``.
    """
    at_one = tilt(log_p, s, torch.ones_like(kl_bound), torch.zeros_like(kl_bound))
    tau, center = _first_guess(log_p, s, kl_bound, at_one), at_one.mean
    lower, upper = torch.zeros_like(tau), torch.ones_like(tau)
    previous = torch.full_like(tau, torch.inf)
    active = torch.arange(tau.numel(), device=tau.device)
    root = Root(tau.clone(), center.clone(), torch.zeros_like(active))

    for evaluation in range(1, MAX_EVALUATIONS + 1):
        at = tilt(log_p, s, tau, center)
        gap = torch.log(at.kl / kl_bound)
        root.evaluations[active] = evaluation
        lower, upper = torch.where(gap < 0, tau, lower), torch.where(gap > 0, tau, upper)

        slope = tau * at.variance / at.kl
        step = torch.where(gap < 0, tau - gap / slope, tau * torch.exp(-gap / (tau * slope)))
        unsafe = ~((step > lower) & (step < upper)) | (gap.abs() > 0.5 * previous)
        step = torch.where(unsafe, 0.5 * (lower + upper), step)

        # At float resolution the bracket cannot shrink further: its lower end is the feasible one.
        exhausted = (step <= lower) | (step >= upper)
        done = (gap.abs() <= tolerance(tau.dtype)) | exhausted
        root.tau[active] = torch.where(exhausted & (gap > 0), lower, tau)
        root.mean[active] = at.mean

        going = (~done).nonzero().squeeze(-1)
        if going.numel() == 0:
            return root
        if going.numel() < active.numel():
            log_p, s, kl_bound, lower, upper = (x[going] for x in (log_p, s, kl_bound, lower, upper))
        tau, center, previous, active = step[going], at.mean[going], gap.abs()[going], active[going]

    root.tau[active] = lower
    return root


def _first_guess(log_p: Tensor, s: Tensor, kl_bound: Tensor, at_one: Tilted) -> Tensor:
    # Three cheap estimates, each good somewhere: the parabola of KL at τ = 0, the tangent of log KL over log τ at
    # τ = 1, and the parabola through KL(1). Their median is never the worst one.
    p = torch.exp(log_p)
    mean = (p * s).sum(-1, keepdim=True)
    variance = (p * (s - mean).square()).sum(-1)
    from_zero = torch.sqrt(2 * kl_bound / variance).clamp(max=1)
    from_one = torch.exp(torch.log(kl_bound / at_one.kl) * at_one.kl / at_one.variance)
    through_one = torch.sqrt(kl_bound / at_one.kl)
    return torch.stack([from_zero, from_one, through_one]).nan_to_num(0.5).median(0).values


def bracket(log_p: Tensor, s: Tensor, kl_bound: Tensor) -> Root:
    """The paper's n-ary bracketing of the multiplier, kept as the reference and for comparison.

    Each round evaluates 8 values of η, equally spaced on a log scale, and keeps the interval that holds the root; at
    most 20 rounds, ``η ∈ [1e-7, 1e2]``. Returns the feasible end (KL ≤ ε), except where ``η = 1e2`` is not enough: it
    is then returned, and the bound is missed. Arguments as for :func:`newton`.
    """
    low = torch.full_like(kl_bound, BRACKET_RANGE[0]).log()
    high = torch.full_like(kl_bound, BRACKET_RANGE[1]).log()
    mean = (torch.exp(log_p) * s).sum(-1)
    evaluations = torch.zeros_like(kl_bound, dtype=torch.int64)
    converged = torch.zeros_like(kl_bound, dtype=torch.bool)
    fractions = torch.linspace(0, 1, BRACKET_POINTS + 2, dtype=log_p.dtype, device=log_p.device)[1:-1]

    for _ in range(BRACKET_ROUNDS):
        bottom, width = low, high - low
        evaluations += BRACKET_POINTS * (~converged).to(torch.int64)
        for fraction in fractions:
            log_eta = bottom + fraction * width
            at = tilt(log_p, s, 1 / (1 + log_eta.exp()), mean)
            feasible = at.kl <= kl_bound
            high = torch.where(feasible & (log_eta < high) & ~converged, log_eta, high)
            low = torch.where(~feasible & (log_eta > low) & ~converged, log_eta, low)
            mean = torch.where(converged, mean, at.mean)
            converged |= feasible & (at.kl >= kl_bound * (1 - tolerance(log_p.dtype)))
        if bool(converged.all()):
            break
    return Root(1 / (1 + high.exp()), mean, evaluations)


Solver = Callable[[Tensor, Tensor, Tensor], Root]

SOLVERS: dict[str, Solver] = {"newton": newton, "bracket": bracket}
