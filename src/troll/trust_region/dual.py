"""The dual problem: the root of a monotone scalar function, for each token or each group of tokens that share one.

The projected policy is `q ∝ p e^{τ s}` with `s = log p̃ − log p` and `τ = 1/(1 + η) ∈ (0, 1)`. Its divergence
`KL(τ) = KL(q ‖ p)` grows from 0 at `τ = 0` to `KL(p̃ ‖ p)` at `τ = 1`, and `newton` finds where it meets the bound.
It sees KL(τ) as a `Curve`, which hides whether a root belongs to one token or to several.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .probabilities import divergence

#: A safety limit: `newton` needs 3 to 5 evaluations in the median, and 13 in the worst case seen.
MAX_EVALUATIONS = 64


class Tilted(NamedTuple):
    """The tilted policy `q ∝ p e^{τ s}`, and the moments that Newton's method and the backward pass need.

    `log_ratio` is (N, M), the others are (N,).
    """

    log_ratio: Tensor
    """`log q − log p`, meaningless on absent outcomes (their p is 0)."""
    log_normaliser: Tensor
    """`log Σ p e^{τ (s − center)} = A(τ) − τ · center`."""
    kl: Tensor
    """KL(q ‖ p) in nats."""
    mean: Tensor
    """`μ = E_q[s]`."""
    variance: Tensor
    """`σ² = Var_q[s]`."""


class Moments(NamedTuple):
    """KL(τ), and the variance that gives its derivative, each (R,)."""

    kl: Tensor
    """KL(q ‖ p) in nats; for a root that several tokens share, their weighted sum."""
    variance: Tensor
    """`σ²`, or the weighted sum of it: the derivative of KL(τ) is `τ σ²`."""


class Root(NamedTuple):
    """Where KL(τ) meets the bound, each (R,)."""

    tau: Tensor
    evaluations: Tensor
    """Evaluations of KL(τ) spent on each root (int64), in addition to that at τ = 1."""
    bisections: Tensor
    """Unsafe Newton steps that a bisection replaced (int64)."""


def tilt(log_p: Tensor, s: Tensor, tau: Tensor, center: Tensor) -> Tilted:
    """Evaluates `q ∝ p e^{τ s}`.

    KL(q ‖ p) is summed as `Σ p (x eˣ − expm1 x)` with `x = log q − log p`: terms that are never negative. The
    textbook form `τ A'(τ) − A(τ)` cancels in float32.

    Args:
        log_p: Old policy, (N, M), normalised; −inf on absent outcomes.
        s: `log p̃ − log p`, (N, M); any finite number on absent outcomes.
        tau: τ in [0, 1], (N,).
        center: (N,), subtracted from s. Any number gives the same result up to rounding, which is least near `E_q[s]`.
    """
    centered = s - center.unsqueeze(-1)
    exponent = tau.unsqueeze(-1) * centered
    unnormalised = log_p + exponent
    normaliser = torch.logsumexp(unnormalised, dim=-1, keepdim=True)
    q = torch.exp(unnormalised - normaliser)
    log_ratio = exponent - normaliser
    mean = (q * centered).sum(-1)
    variance = (q * (centered - mean.unsqueeze(-1)).square()).sum(-1)
    return Tilted(log_ratio, normaliser.squeeze(-1), divergence(log_ratio, log_p), center + mean, variance)


class Curve(Protocol):
    """The function KL(τ) of R roots, the interface between a problem and `newton`.

    `newton` narrows its curve, in place, to the roots that it has not found yet, so a curve can be used only once.
    """

    def at(self, tau: Tensor) -> Moments:
        """KL(τ) and σ² at (R,) values of τ, where the derivative of KL(τ) is `τ σ²`."""

    def variance_at_zero(self) -> Tensor:
        """σ² at τ = 0, (R,)."""

    def narrow(self, roots: Tensor) -> None:
        """Keeps some of the R roots, by their indices (R',) int64, ascending."""


class TokenCurve:
    """KL(τ) of N tokens, each with a root of its own. `SharedCurve` has fewer roots than tokens.

    Rounding is least if s is centred near `E_q[s]`, so each evaluation is centred where the one before it ended.

    Args:
        log_p: Old policy, (N, M), normalised; −inf on absent outcomes.
        s: `log p̃ − log p`, (N, M); 0 on absent outcomes.

    Attributes:
        mean: `E_q[s]` of all N tokens, each at the last τ where it was evaluated.
    """

    def __init__(self, log_p: Tensor, s: Tensor) -> None:
        self.log_p, self.s = log_p, s
        self.mean = s.new_zeros(len(s))
        self._center = self.mean
        self._tokens = torch.arange(len(s), device=s.device)

    def at(self, tau: Tensor) -> Moments:
        """KL(τ) at (R,) values of τ."""
        at = tilt(self.log_p, self.s, tau, self._center)
        self._center = at.mean
        self.mean[self._tokens] = at.mean
        return Moments(at.kl, at.variance)

    def variance_at_zero(self) -> Tensor:
        """σ² at τ = 0, (R,), where q = p: cheaper than `at`."""
        p = torch.exp(self.log_p)
        mean = (p * self.s).sum(-1, keepdim=True)
        return (p * (self.s - mean).square()).sum(-1)

    def narrow(self, roots: Tensor) -> None:
        """Keeps some of the R roots, by their indices (R',) int64, ascending."""
        self.log_p, self.s, self._center, self._tokens = (
            x[roots] for x in (self.log_p, self.s, self._center, self._tokens)
        )


def tolerance(dtype: torch.dtype) -> float:
    """The largest |log KL(τ) − log ε| at which the search stops."""
    # Both are well above the rounding error of `tilt`, and well below the error that the caller allows: 1e-3 · ε in
    # float32, 1e-9 in float64.
    return 2e-5 if dtype == torch.float32 else 1e-11


def newton(curve: Curve, kl_bound: Tensor) -> Root:
    """Safeguarded Newton iteration on `log KL(τ) = log ε`.

    With near-deterministic policies KL(τ) is nearly a step, where plain Newton fails both in τ and in log τ. From below
    the root, log KL is usually concave in τ and the step is taken in τ; from above, in log τ. If a step leaves the
    bracket, or has not halved `|log KL − log ε|`, the bracket is bisected, so the iteration always converges. Roots
    that have converged drop out of the computation.

    Args:
        curve: KL(τ) of R roots.
        kl_bound: ε, (R,), with `0 < ε < KL(1)`.
    """
    tau = _first_guess(curve, kl_bound)
    lower, upper = torch.zeros_like(tau), torch.ones_like(tau)
    previous = torch.full_like(tau, torch.inf)
    active = torch.arange(tau.numel(), device=tau.device)
    bisections = torch.zeros_like(active)
    root = Root(tau.clone(), bisections.clone(), bisections.clone())

    for evaluation in range(1, MAX_EVALUATIONS + 1):
        at = curve.at(tau)
        gap = torch.log(at.kl / kl_bound)
        root.evaluations[active], root.bisections[active] = evaluation, bisections
        lower, upper = torch.where(gap < 0, tau, lower), torch.where(gap > 0, tau, upper)

        slope = tau * at.variance / at.kl
        step = torch.where(gap < 0, tau - gap / slope, tau * torch.exp(-gap / (tau * slope)))
        unsafe = ~((step > lower) & (step < upper)) | (gap.abs() > 0.5 * previous)
        step = torch.where(unsafe, 0.5 * (lower + upper), step)

        # At float resolution the bracket cannot shrink further: its lower end is the feasible one.
        exhausted = (step <= lower) | (step >= upper)
        done = (gap.abs() <= tolerance(tau.dtype)) | exhausted
        root.tau[active] = torch.where(exhausted & (gap > 0), lower, tau)

        going = (~done).nonzero().squeeze(-1)
        if going.numel() == 0:
            return root
        if going.numel() < active.numel():
            curve.narrow(going)
            kl_bound, lower, upper = kl_bound[going], lower[going], upper[going]
        tau, previous, bisections, active = (x[going] for x in (step, gap.abs(), bisections + unsafe, active))

    root.tau[active] = lower
    return root


def _first_guess(curve: Curve, kl_bound: Tensor) -> Tensor:
    # Three cheap estimates, each good in some cases: the parabola of KL at τ = 0, the tangent of log KL over log τ at
    # τ = 1, and the parabola through KL(1). Their median is never the worst one.
    at_one = curve.at(torch.ones_like(kl_bound))
    from_zero = torch.sqrt(2 * kl_bound / curve.variance_at_zero()).clamp(max=1)
    from_one = torch.exp(torch.log(kl_bound / at_one.kl) * at_one.kl / at_one.variance)
    through_one = torch.sqrt(kl_bound / at_one.kl)
    return torch.stack([from_zero, from_one, through_one]).nan_to_num(0.5).median(0).values
