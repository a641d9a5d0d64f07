r"""The projection onto the KL ball around the old policy, and its closed-form gradient.

The problem, for the distributions p (old), p̃ (new) and the bound ε of a token, with KL in nats:

    q  =  argmin_q KL(q ‖ p̃)   subject to   KL(q ‖ p) ≤ ε

Where `KL(p̃ ‖ p) ≤ ε`, the new policy is its own projection. Elsewhere q lies on the geometric path from p to p̃,

    log q  =  log p + τ s − A(τ),     s = log p̃ − log p,     A(τ) = log Σ p e^{τ s},     τ = 1/(1 + η),

at the one τ in (0, 1) where `KL(q ‖ p) = ε`; `dual` finds this root. The search is not differentiated: the gradient
follows from the conditions of Karush, Kuhn and Tucker, see [project][troll.project].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import expanded, shape_text
from .constraint import Constraint, SharedCurve
from .dual import TokenCurve, newton, tilt
from .policy.on_support import PolicyOnSupport, check_one_support, present_outcomes
from .policy.sparse import SparsePolicy
from .probabilities import as_float, divergence, floored


@dataclass(frozen=True, eq=False)
class Projection:
    """The result of [project][troll.project], for token positions (...).

    Tokens that share a constraint are projected together: `multiplier`, `projected` and `iterations` are those of their
    group. If a token of positive weight is not a distribution, `log_probs` and `kl_after` of the whole group are NaN.

    Attributes:
        log_probs: log q, differentiable: (..., V) for dense inputs; (..., K + 1) for sparse ones, the tail last, −inf
            on absent outcomes. Where not projected, the log-probabilities of the new policy.
        multiplier: η, (...); 0 where not projected.
        kl_before: KL(p̃ ‖ p), (...), in nats; NaN for a row that is not a distribution.
        kl_after: KL(q ‖ p), (...), in nats.
        projected: (...) bool, true where q differs from p̃.
        iterations: Evaluations of KL(τ) that the search needed, (...) int64, without the one at τ = 1 that decides
            whether to project; 0 where not projected.
    """

    log_probs: Tensor
    multiplier: Tensor
    kl_before: Tensor
    kl_after: Tensor
    projected: Tensor
    iterations: Tensor


def project(
    new_log_probs: Tensor | PolicyOnSupport | SparsePolicy,
    old_log_probs: Tensor | PolicyOnSupport | SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    constraint: Constraint | None = None,
) -> Projection:
    r"""Solves `min_q KL(q ‖ p̃)` subject to `KL(q ‖ p) ≤ ε` for every token (arXiv 2510.03817).

    Where `KL(p̃ ‖ p) ≤ ε`, `q = p̃`. Elsewhere `log q = (η log p + log p̃)/(η + 1)`, normalised, with the one
    `η > 0` for which `KL(q ‖ p) = ε`. The gradient reaches only the new policy, in closed form (KKT): with
    `g = ∂L/∂log q`, `s = log p̃ − log p`, `μ = E_q[s]`, `σ² = Var_q[s]` and `τ = 1/(1 + η)`,

        ∂L/∂s_j = τ [ g_j − q_j Σg − Σ g(s − μ) · q_j (s_j − μ)/σ² ].

    With a `constraint`, tokens t of a group share η, for which `Σ_t w_t KL(q_t ‖ p_t) = ε`, and their gradient is

        ∂L/∂s_tj = τ [ g_tj − q_tj Σ_j g_tj − w_t q_tj (s_tj − μ_t) · Σ_t Σ_j g_tj (s_tj − μ_t) / Σ_t w_t σ_t² ].

    Probabilities below 1e-12 are floored first, so that −inf logits stay feasible. Half precision is computed in
    float32.

    Args:
        new_log_probs: p̃: (..., V) log-probabilities or logits (both are log-softmaxed), or a policy on a support.
        old_log_probs: p, in the same form; two policies share one support: `log_probs_at(logits, old.token_ids)`.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (...). Infinity never projects. In float32 the
            bound is met to 1e-3 · ε for ε ≥ 1e-3; use float64 inputs for smaller bounds.
        constraint: Groups of the tokens (...) that share one η and one bound, the weighted mean of their bounds; None
            gives each token its own.

    Raises:
        ValueError: If shapes do not fit, or ε ≤ 0 or NaN.
    """
    new, old, present = _on_common_outcomes(new_log_probs, old_log_probs)
    shape = new.shape[:-1]
    outcomes = CommonOutcomes(floored(new, present), floored(old, present), present)
    # No token was sampled here: `found.log_ratio`, which is all that depends on this argument, is not used.
    found = project_tokens(outcomes, new.new_zeros(shape), kl_bound, constraint)
    # Tokens that are not projected are not floored either.
    new = torch.where(found.broken.unsqueeze(-1), torch.nan, new.reshape(-1, new.shape[-1]))
    return Projection(
        new.index_copy(0, found.row_index, found.log_q).view(*shape, new.shape[-1]),
        found.multiplier.view(shape),
        found.kl_before.view(shape),
        found.kl_after.view(shape),
        found.projected.view(shape),
        found.iterations.view(shape),
    )


def _on_common_outcomes(
    new: Tensor | PolicyOnSupport | SparsePolicy, old: Tensor | PolicyOnSupport | SparsePolicy
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the arguments of `project`, and which outcomes are present, each (..., M); not floored."""
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.shape != old.shape or new.dim() == 0 or new.shape[-1] == 0:
            raise ValueError(
                "new_log_probs and old_log_probs must have one shape (..., V), "
                f"got {shape_text(new.shape)} and {shape_text(old.shape)}"
            )
        dtype = torch.promote_types(as_float(new).dtype, as_float(old).dtype)
        # 0 times the NaN of such a row would reach all weights.
        known = torch.logsumexp(as_float(new.detach()), dim=-1, keepdim=True).isfinite()
        new = torch.where(known, new, new.detach())
        log_new, log_old = (torch.log_softmax(x.to(dtype), dim=-1) for x in (new, old.detach()))
        return log_new, log_old, torch.ones_like(log_new, dtype=torch.bool)
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        raise ValueError("new_log_probs and old_log_probs must both be tensors or both be policies on a support")
    if isinstance(new, PolicyOnSupport) and isinstance(old, SparsePolicy) and old.truncated:
        new = new.without_tail()  # outside a kept set nothing is compared
    check_one_support(new, old)
    return as_float(new.outcomes), as_float(old.outcomes), present_outcomes(new, old)


class CommonOutcomes(NamedTuple):
    """Log-probabilities of two policies on the same M outcomes, in nats, floored and renormalised.

    Each is (..., M), and −inf where an outcome is not present.
    """

    new: Tensor
    """log p̃, differentiable."""
    old: Tensor
    """log p."""
    present: Tensor
    """bool."""


class TokenProjection(NamedTuple):
    """The projection of N tokens; `log_q` and `log_ratio` are differentiable."""

    log_q: Tensor
    """log q of the N' tokens that are projected, (N', M)."""
    log_ratio: Tensor
    """`τ s_o − A(τ)`, (N,): s_o itself where nothing is projected."""
    row_index: Tensor
    """The indices of the projected tokens, (N',)."""
    broken: Tensor
    """(N,) bool: the tokens without a projection, because they or others of their group are not distributions."""
    multiplier: Tensor
    kl_before: Tensor
    kl_after: Tensor
    projected: Tensor
    iterations: Tensor
    """This and the four before it: (N,), as in `Projection`."""


def project_tokens(
    outcomes: CommonOutcomes,
    sampled_s: Tensor,
    kl_bound: float | Tensor,
    constraint: Constraint | None,
) -> TokenProjection:
    """Projects policies on the same outcomes, (..., M); the other arguments are those of [project][troll.project].

    `sampled_s`, (...), is log p̃ − log p of the sampled tokens before any flooring; their entries in `outcomes` are
    floored. Only `log_ratio` depends on it.

    Raises:
        ValueError: If the bound or the constraint does not fit.
    """
    shape = outcomes.new.shape[:-1]
    bound = broadcast_bound(kl_bound, shape, outcomes.new).reshape(-1)
    new, old, present = (x.reshape(-1, x.shape[-1]) for x in outcomes)
    old, sampled_s = old.detach().to(new.dtype), sampled_s.reshape(-1)

    s = (new.detach() - old).masked_fill(~present, 0.0)
    kl_before = divergence(s, old).clamp(min=0)
    kl_before = kl_before.masked_fill(bound.isnan(), torch.nan)
    outside = outside_ball(kl_before, bound, None if constraint is None else constraint.flat(shape))
    row_index, broken = outside.row_index, outside.broken
    log_ratio = torch.where(broken, torch.nan, sampled_s)
    kl_after = kl_before.masked_fill(broken, torch.nan)
    projected = torch.zeros_like(kl_before, dtype=torch.bool)
    multiplier = torch.zeros_like(kl_before)
    iterations = torch.zeros_like(kl_before, dtype=torch.int64)
    log_q = new[row_index]
    # If there are roots, not tokens: a process without tokens outside must still join the sums of a shared constraint.
    if outside.root_bound.numel():
        log_q, ratio, tau, kl, evaluations = _OntoBall.apply(
            log_q, old[row_index], s[row_index], sampled_s[row_index], outside
        )
        log_ratio = log_ratio.index_copy(0, row_index, ratio)
        projected[row_index], multiplier[row_index] = True, (1 - tau) / tau
        kl_after[row_index], iterations[row_index] = kl, evaluations
    return TokenProjection(log_q, log_ratio, row_index, broken, multiplier, kl_before, kl_after, projected, iterations)


def broadcast_bound(bound: float | Tensor, shape: torch.Size, like: Tensor, name: str = "kl_bound") -> Tensor:
    """A bound at each of the positions `shape`, without gradient, in the dtype and on the device of `like`.

    It needs no host sync: a bound on a GPU that is not above 0 becomes NaN.

    Raises:
        ValueError: If the bound, the argument `name`, is NaN or not above 0, or a tensor does not broadcast.
    """
    if isinstance(bound, Tensor):
        values = bound.detach().to(like)
        positive = values > 0
        if bound.device.type == "cpu" and not bool(positive.all()):
            raise ValueError(f"{name} must be above 0 everywhere, got {bound}")
        values = torch.where(positive, values, torch.nan)
    else:
        if not bound > 0:
            raise ValueError(f"{name} must be above 0, got {bound}")
        values = like.new_full((), bound)  # filled in on the device: no wait for it
    return expanded(name, values, shape)


class OutsideBall(NamedTuple):
    """The tokens outside their ball, among N."""

    row_index: Tensor
    """The indices of the tokens to project, (N',)."""
    root_bound: Tensor
    """ε of the R roots to find, (R,): one for each of these tokens, or for each of their groups."""
    constraint: Constraint | None
    """The constraint on these tokens and groups only."""
    broken: Tensor
    """(N,) bool: the tokens without a projection, because they or others of their group are not distributions."""

    def curve(self, log_p: Tensor, s: Tensor) -> TokenCurve:
        """The roots' KL(τ), from the log-probabilities and `s = log p̃ − log p` of these tokens, (N', M)."""
        return TokenCurve(log_p, s) if self.constraint is None else SharedCurve(log_p, s, self.constraint)


def outside_ball(kl_before: Tensor, bound: Tensor, constraint: Constraint | None) -> OutsideBall:
    """Finds the tokens that a projection moves, from their KL(p̃ ‖ p), (N,), their ε, (N,), and a constraint."""
    if constraint is None:
        row_index = (kl_before > bound).nonzero().squeeze(-1)
        return OutsideBall(row_index, bound[row_index], None, kl_before.isnan())
    # From sums over all processes, so that all processes get the same groups.
    kl, weighted_bound, weight = constraint.weighted_total(kl_before, bound, torch.ones_like(bound))
    group_bound = weighted_bound / weight  # NaN, which nothing exceeds, for a group without weight
    groups = (kl > group_bound).nonzero().squeeze(-1)
    row_index, projected = constraint.narrowed(groups)
    finite = ~kl_before[row_index].isnan()  # in a projected group, an invalid token has no weight
    broken = kl_before.isnan() | kl.isnan()[constraint.group]
    return OutsideBall(row_index[finite], group_bound[groups].to(bound.dtype), projected[finite], broken)


class _OntoBall(torch.autograd.Function):
    """log q of the N' tokens outside their ball, (N', M), from normalised, floored log-probabilities.

    It also gives `τ s_o − A(τ)`, (N',), from s_o of the sampled token, which differs from its entry in s if that entry
    is floored. All is computed from `old` and `s`, which is `new − old` without gradient: `new` only receives the
    gradient with respect to s.
    """

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, old: Tensor, s: Tensor, sampled_s: Tensor, outside: OutsideBall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        curve, constraint = outside.curve(old, s), outside.constraint
        root = newton(curve, outside.root_bound)
        tau, evaluations = root.tau, root.evaluations
        if constraint is not None:
            tau, evaluations = tau[constraint.group], evaluations[constraint.group]
        at = tilt(old, s, tau, curve.mean)
        variance = at.variance if constraint is None else constraint.weighted_total(at.variance)[0]
        log_q = old + at.log_ratio
        log_ratio = tau * (sampled_s - curve.mean) - at.log_normaliser
        ctx.constraint = constraint
        # A sampled token that the new policy excludes has ratio 0, and no gradient through it.
        sampled_centered = (sampled_s - at.mean).nan_to_num(0.0, 0.0, 0.0)
        ctx.save_for_backward(log_q, s - at.mean.unsqueeze(-1), sampled_centered, tau, variance)
        ctx.mark_non_differentiable(tau, at.kl, evaluations)
        return log_q, log_ratio, tau, at.kl, evaluations

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_ratio: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        log_q, centered, sampled_centered, tau, variance = ctx.saved_tensors
        constraint: Constraint | None = ctx.constraint
        q = log_q.exp()
        present = q > 0
        grad = grad.masked_fill(~present, 0)
        along = (grad * centered).sum(-1) + grad_ratio * sampled_centered
        if constraint is None:
            along = along / variance
        else:
            along = constraint.weight * (constraint.total(along)[0] / variance)[constraint.group]
        # With σ² = 0, nothing moves on the surface of the ball.
        along = along.nan_to_num(0.0, 0.0, 0.0).to(grad.dtype).unsqueeze(-1)
        total = (grad.sum(-1) + grad_ratio).unsqueeze(-1)
        grad_s = tau.unsqueeze(-1) * (grad - q * (total + along * centered))
        return grad_s, None, None, tau * grad_ratio, None
