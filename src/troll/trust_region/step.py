"""The trust region of one optimisation step: the new policy is read, projected, and reduced to a few numbers per token.

With Triton, everything after the reading is one program for each token: `step_triton`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .checks import check_choice
from .constraint import Constraint
from .kernels import use_triton
from .policy.on_support import PolicyOnSupport, check_one_support, present_outcomes
from .policy.sparse import SparsePolicy
from .policy.truncation import kept_or_not
from .probabilities import as_float, divergence, floored
from .projection import CommonOutcomes, TokenProjection, project_tokens
from .reading.logits import Logits
from .reading.read import read
from .reading.source import LogitsSource

Pull = Literal["projection", "proximal"]
PULLS: tuple[Pull, ...] = get_args(Pull)


@dataclass(frozen=True, eq=False)
class TrustRegionStep:
    """The trust region in one optimisation step, each (...); log-probabilities and divergences in nats.

    Attributes:
        log_ratio: log q(o)/p(o) of the sampled token, differentiable; log p̃(o)/p(o) where not projected.
        regression: The pull, differentiable: KL(p̃ ‖ ⌊q⌋), where ⌊q⌋ is the projection without gradient (0 where not
            projected); or, with the proximal pull, KL(p ‖ p̃). With a truncated old policy, the sum of the pull on the
            kept set and the pull of the kept set's mass.
        log_prob: log p̃(o) of the sampled token under the network's policy, differentiable; over the whole vocabulary,
            even with a truncated old policy: subtract `kept_log_mass` to compare it with the old `log_prob`.
        kl_before: KL(p̃ ‖ p). Where the logits are not a distribution, this and all other fields except `projected`
            are NaN.
        kl_after: KL(q ‖ p): ε where projected, to the precision of the search. Where tokens share a constraint, the
            bound is on their weighted sum.
        multiplier: η; 0 where not projected.
        projected: bool, true where q differs from p̃.
        entropy: The entropy of p̃ over the whole vocabulary or, with a truncated old policy, on the kept set,
            differentiable; None unless it was requested.
        kept_log_mass: log p̃(S), the new policy's mass on the kept set, differentiable; None unless the old policy is
            truncated.
        scored: bool, true at the tokens that this step is about; None for all. Other tokens have 0 in every field.
    """

    log_ratio: Tensor
    regression: Tensor
    log_prob: Tensor
    kl_before: Tensor
    kl_after: Tensor
    multiplier: Tensor
    projected: Tensor
    entropy: Tensor | None = None
    kept_log_mass: Tensor | None = None
    scored: Tensor | None = None


def trust_region_step(
    source: LogitsSource | PolicyOnSupport | Tensor,
    old: SparsePolicy,
    kl_bound: float | Tensor = 0.05,
    *,
    constraint: Constraint | None = None,
    pull: Pull = "projection",
    entropy: bool = False,
) -> TrustRegionStep:
    """Computes the ratio of each sampled token, and the pull, for one optimisation step.

    Use `step.log_ratio` where a trainer would use the difference of log-probabilities, switch the clip off, and add
    `regression_weight * step.regression`; [troll_loss][troll.troll_loss] does all three.

    With a truncated old policy, both policies are restricted to its tokens and renormalised, as for sampling. Only the
    pull limits the new policy's mass on these tokens, as if they and all others were two outcomes with a separate
    bound.

    The ratio of a projected token is `τ s_o − A(τ)`, where τ and A come from the floored and renormalised outcomes, and
    s_o from both policies' raw log-probabilities: so the ratio is continuous at KL = ε, even for a token below the
    floor.

    Args:
        source: The new policy: logits (..., V), aligned with the tokens and divided by the sampling temperature; or any
            source: [Logits][troll.Logits], [LMHead][troll.LMHead], or a policy that has been read at the old tokens.
        old: The old policy, (...), as captured.
        kl_bound: ε > 0, in nats; a float, or a tensor that broadcasts to (...). See [project][troll.project].
        constraint: Groups of the tokens (...) that share one multiplier and one bound; None gives each token its own.
        pull: The form of `step.regression`: "projection", the paper's KL(p̃ ‖ ⌊q⌋), which acts outside the ball only;
            or "proximal", KL(p ‖ p̃), which keeps the network near the old policy at every token. With an infinite
            bound nothing is projected, and the proximal pull is a KL penalty.
        entropy: Whether the step's `entropy` is computed. It is ignored for a policy that has been read, which has its
            own entropy or none.

    Raises:
        ValueError: If the positions, the vocabulary or the temperature do not fit, ε ≤ 0, or `pull` is unknown.
    """
    check_choice("pull", pull, PULLS)
    source = Logits(source, temperature=None) if isinstance(source, Tensor) else source
    if not isinstance(old, SparsePolicy):
        raise ValueError(f"old must be a SparsePolicy, got {type(old).__name__}: unpack() a packed one")
    old.check_temperature(source.temperature)
    new = source
    if not isinstance(new, PolicyOnSupport):
        old.check_positions(new.shape)
        if new.vocabulary.size != old.vocab_size:
            raise ValueError(f"source must have the old policy's {old.vocab_size} tokens, got {new.vocabulary.size}")
        new = read(new, old.token_ids, entropy=entropy)
    check_read_at(new, old)
    if not old.truncated:
        return step_of_policies(new, old, kl_bound, constraint, pull)
    # A policy that excludes the whole kept set has no distribution on it, and must not send NaN to all weights.
    excludes = (new.logits == -torch.inf).all(-1, keepdim=True)
    new = dataclasses.replace(new, logits=torch.where(excludes, new.logits.detach(), new.logits))
    # Within the kept set, where both policies are renormalised; and between it and all other tokens.
    kept, log_mass = dataclasses.replace(old, tail_log_prob=old.tail, truncated=False), new.log_mass
    step = step_of_policies(new.without_tail(), kept, kl_bound, constraint, pull)
    of_mass = step_of_policies(*kept_or_not(new, old), kl_bound, None, pull)
    return dataclasses.replace(
        step,
        regression=step.regression + of_mass.regression,
        log_prob=step.log_prob + log_mass,
        kept_log_mass=log_mass,
    )


def step_of_policies(
    new: PolicyOnSupport, old: SparsePolicy, kl_bound: float | Tensor, constraint: Constraint | None, pull: Pull
) -> TrustRegionStep:
    """The step of two policies on one support, the old one not truncated; arguments as for `trust_region_step`."""
    # The Triton program solves for one token at a time, without a constraint.
    if constraint is None and use_triton(new.logits, new.logits.shape[-1] + 1):
        from . import step_triton

        fields = step_triton.step(new, old, kl_bound, proximal=pull == "proximal")
        return TrustRegionStep(*fields)  # type: ignore[arg-type]

    new_raw = as_float(new.outcomes)
    outcomes = common_outcomes(new, old)
    at = old.slot.unsqueeze(-1)
    log_prob, old_log_prob = (x.gather(-1, at).squeeze(-1) for x in (new_raw, old.log_probs.to(new_raw.dtype)))
    # A token that the old policy excludes cannot have been sampled from it. Its s is 0, so its ratio is finite.
    sampled_s = torch.where(old_log_prob == -torch.inf, 0.0, log_prob - old_log_prob)

    found = project_tokens(outcomes, sampled_s, kl_bound, constraint)
    regression = pull_to_old(outcomes).reshape(-1) if pull == "proximal" else pull_to_projection(outcomes, found)
    shape, broken, new_entropy = new.shape, found.broken.view(new.shape), new.entropy
    return TrustRegionStep(
        log_ratio=found.log_ratio.view(shape),
        regression=torch.where(broken, torch.nan, regression.view(shape)),
        log_prob=torch.where(broken, torch.nan, log_prob),
        kl_before=found.kl_before.view(shape),
        kl_after=found.kl_after.view(shape),
        multiplier=torch.where(broken, torch.nan, found.multiplier.view(shape)),
        projected=found.projected.view(shape),
        entropy=None if new_entropy is None else torch.where(broken, torch.nan, new_entropy),
    )


def pull_to_projection(outcomes: CommonOutcomes, found: TokenProjection) -> Tensor:
    """KL(p̃ ‖ ⌊q⌋) of N tokens, (N,), differentiable in p̃: 0 where nothing is projected."""
    log_new, present = (x.reshape(-1, x.shape[-1])[found.row_index] for x in (outcomes.new, outcomes.present))
    log_q = found.log_q.detach()
    difference = torch.where(present, log_new - log_q, 0.0)
    pull = divergence(difference, log_q.masked_fill(~present, -torch.inf))
    return torch.zeros_like(found.kl_before).index_copy(0, found.row_index, pull)


def pull_to_old(outcomes: CommonOutcomes) -> Tensor:
    """KL(p ‖ p̃) of common outcomes in nats, (...), differentiable in p̃.

    The gradient with respect to the logits is `p̃ − p`, at every token.
    """
    # An old policy of NaN, for example at padding, gives NaN without gradient: 0 times NaN would reach all weights.
    known = ~outcomes.old.isnan().any(-1)
    apart = torch.where(outcomes.present & known.unsqueeze(-1), outcomes.old - outcomes.new, 0.0)
    return torch.where(known, divergence(apart, outcomes.new), torch.nan)


def common_outcomes(new: PolicyOnSupport, old: SparsePolicy) -> CommonOutcomes:
    """Both policies' floored log-probabilities on the same K + 1 outcomes, the tail last, and which are present.

    Args:
        new: The new policy at the tokens of `old`, differentiable.
        old: The old policy. If it is truncated, the tail is absent.

    Returns:
        The log-probabilities `new` and `old` in nats, and `present`, each (..., K + 1).

    Raises:
        ValueError: If `new` was not read at the tokens of `old`.
    """
    check_read_at(new, old)
    new = new.without_tail() if old.truncated else new
    log_new, present = as_float(new.outcomes), present_outcomes(new, old)
    return CommonOutcomes(floored(log_new, present), floored(old.outcomes.to(log_new.dtype), present), present)


def check_read_at(new: PolicyOnSupport, old: SparsePolicy) -> None:
    """Raises ValueError unless a new policy was read at the tokens of the old one."""
    old.check_positions(new.shape)
    if new.token_ids.shape[-1] != old.top_k:
        raise ValueError(f"new must be read at the old policy's {old.top_k} slots, got {new.token_ids.shape[-1]}")
    check_one_support(new, old, wait=False)
