"""Ten surrogates from other papers and libraries, and a KL penalty with a bounded ratio.

They are registered when this file is imported, as a user's own are. Most of them drop tokens: the ratio stays raw, and
a dropped token has no policy term, but still counts in the normalisation of the loss. docs/reference/lab-trl.md has the
formulas side by side.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from troll.trl import TrollConfig, register_surrogate
from troll.trl.surrogates import (
    KLPenaltySettings,
    ScoredTokens,
    Surrogate,
    Terms,
    common_outcomes,
    divergence,
    floored,
    kl_penalty,
    number,
)

_OUTCOMES = ("support_top_k", "mass_threshold")


@dataclass(frozen=True)
class DPPOTVSettings:
    """The settings of "dppo_tv".

    Attributes:
        threshold: δ, the total variation above which a token is dropped.
        outcomes: The outcomes of the total variation: "binary", the sampled token and all others; or "top_k",
            `support_top_k` tokens and all others.
    """

    threshold: float = number(0.15, "in (0, 1]")
    outcomes: Literal["binary", "top_k"] = "binary"


@dataclass(frozen=True)
class DPPOKLSettings:
    """The settings of "dppo_kl".

    Attributes:
        threshold: δ, the KL divergence (nats) above which a token is dropped.
        outcomes: The outcomes of the divergence, as for "dppo_tv".
    """

    threshold: float = number(0.05, "finite and above 0")
    outcomes: Literal["binary", "top_k"] = "binary"


def dppo_tv(tokens: ScoredTokens, args: TrollConfig, own: DPPOTVSettings) -> Terms:
    """DPPO's mask by total variation (arXiv 2602.04879): `½ Σ |p̃ − p|` over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, own.outcomes)
    variation = 0.5 * (new.exp() - old.exp()).abs().sum(-1)
    return _mask(tokens, variation > own.threshold)


def dppo_kl(tokens: ScoredTokens, args: TrollConfig, own: DPPOKLSettings) -> Terms:
    """DPPO's mask by KL(p ‖ p̃) (arXiv 2602.04879) over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, own.outcomes)
    kl = divergence((old - new).masked_fill(new == -torch.inf, 0.0), new)
    return _mask(tokens, kl > own.threshold)


def _on_top_k(own: DPPOTVSettings | DPPOKLSettings) -> bool:
    return own.outcomes == "top_k"


register_surrogate("dppo_tv", Surrogate(dppo_tv, DPPOTVSettings, _OUTCOMES, reads_policies=_on_top_k))
register_surrogate("dppo_kl", Surrogate(dppo_kl, DPPOKLSettings, _OUTCOMES, reads_policies=_on_top_k))


@dataclass(frozen=True)
class DRPOSettings:
    """The settings of "drpo".

    Attributes:
        threshold: ε: a token's gradient has the weight 1 − sign(A)(p̃(o) − p(o))/ε.
    """

    threshold: float = number(12.5, "finite and above 0")


def drpo(tokens: ScoredTokens, args: TrollConfig, own: DRPOSettings) -> Terms:
    """DRPO (arXiv 2606.09821): the loss `−A r + |A| p(o) (r − 1)² / 2ε` with the raw ratio r, with both gradients."""
    growth = torch.expm1(tokens.log_ratio)
    moved = tokens.old_log_probs.exp() * growth  # p̃(o) − p(o); by itself (r − 1)² could overflow
    return Terms(penalty=tokens.advantages.abs() * moved * growth / (2 * own.threshold))


register_surrogate("drpo", Surrogate(drpo, DRPOSettings))


@dataclass(frozen=True)
class IPOSettings:
    """The settings of "ipo".

    Attributes:
        threshold: The change of its probability above which a token is dropped.
        kl_weight: λ, the weight of (log ratio)² in the loss.
    """

    threshold: float = number(0.3, "in (0, 1]")
    kl_weight: float = number(0.0, "finite and at least 0")


def ipo(tokens: ScoredTokens, args: TrollConfig, own: IPOSettings) -> Terms:
    """prime-rl's IPO: drops tokens with `|p̃(o) − p(o)|` above the threshold, and adds the penalty λ (log r)²."""
    moved = tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()
    # Where λ is 0, an infinite log ratio must not make NaN.
    penalty = own.kl_weight * tokens.log_ratio.square() if own.kl_weight else None
    return Terms(keep=moved.abs() <= own.threshold, penalty=penalty)


register_surrogate("ipo", Surrogate(ipo, IPOSettings))


@dataclass(frozen=True)
class IcePopSettings:
    """The settings of "icepop".

    Attributes:
        lower: α, the ratio below which a token is dropped.
        upper: β, the ratio above which a token is dropped.
    """

    lower: float = number(0.5, "in (0, 1]")
    upper: float = number(5.0, "at least 1")


def icepop(tokens: ScoredTokens, args: TrollConfig, own: IcePopSettings) -> Terms:
    """IcePop (arXiv 2510.18855): drops tokens whose ratio is outside [α, β], with either sign of the advantage.

    In areal-project/AReaL, `areal/utils/functional/functional.py` (cbff54d645d2; `metric: ratio`), the ratio is that of
    the trainer's old policy to the sampler. Here it is p̃(o)/p(o), as in NovaSky-AI/SkyRL,
    `skyrl/backends/skyrl_train/utils/ppo_utils.py` (a9564572eb8e; `rollout_is`), where p is the sampler.
    """
    log_ratio = tokens.log_ratio.detach()
    return Terms(keep=(log_ratio >= math.log(own.lower)) & (log_ratio <= math.log(own.upper)))


register_surrogate("icepop", Surrogate(icepop, IcePopSettings))


@dataclass(frozen=True)
class KPopSettings:
    """The settings of "kpop".

    Attributes:
        threshold: φ, the KL divergence (nats) above which a token is dropped.
    """

    threshold: float = number(0.1, "finite and above 0")


def kpop(tokens: ScoredTokens, args: TrollConfig, own: KPopSettings) -> Terms:
    """KPop: drops tokens where KL(p̃ ‖ p) or KL(p ‖ p̃), on the sampled token and the rest, is above φ.

    In areal-project/AReaL, `areal/utils/functional/functional.py` (cbff54d645d2; `metric: binary_kl`), the policies are
    the trainer's old one and the sampler. Here they are p̃ and p, as in PrimeIntellect-ai/prime-rl,
    `src/prime_rl/trainer/rl/loss.py` (b9ba0608ddf1, on a branch; `kpop_loss_fn`), where p is the sampler.
    """
    new, old = _outcomes(tokens, "binary")
    kl = torch.maximum(divergence(new - old, old), divergence(old - new, new))
    return Terms(keep=kl <= own.threshold)


register_surrogate("kpop", Surrogate(kpop, KPopSettings))


@dataclass(frozen=True)
class TRMSettings:
    """The settings of "trm".

    Attributes:
        threshold: δ, the largest estimate (nats) of a token's KL divergence that keeps its sequence.
        estimator: The estimate from the sampled token's ratio r: "k2", (log r)²/2; or "k3", r − 1 − log r.
    """

    threshold: float = number(2.5, "finite and above 0")
    estimator: Literal["k2", "k3"] = "k2"


def trm(tokens: ScoredTokens, args: TrollConfig, own: TRMSettings) -> Terms:
    """Trust region masking (arXiv 2512.23075): drops every sequence in which one token is further than δ.

    This follows verl-project/verl, `verl/trainer/ppo/rollout_corr_helper.py` (1dda039b9c63; `seq_max_k2`,
    `seq_max_k3`), to which the paper's first author added it. There r is the ratio of the trainer's old policy to the
    sampler, and in bypass mode that of the new policy to the sampler. Here it is p̃(o)/p(o).
    """
    log_ratio, keep = tokens.log_ratio.detach(), torch.ones_like(tokens.counts)
    kl = log_ratio.square() / 2 if own.estimator == "k2" else torch.expm1(log_ratio) - log_ratio
    for sequence in tokens.by_sequence():
        keep[sequence] = kl[sequence].max() <= own.threshold
    return Terms(keep=keep)


register_surrogate("trm", Surrogate(trm, TRMSettings))


@dataclass(frozen=True)
class M2POSettings:
    """The settings of "m2po".

    Attributes:
        threshold: The largest second moment of the log ratio, over the tokens that the gradient moves away.
    """

    threshold: float = number(0.04, "finite and above 0")


def m2po(tokens: ScoredTokens, args: TrollConfig, own: M2POSettings) -> Terms:
    """M2PO (arXiv 2510.01161): PPO's clip whose width τ brings the second moment of the log ratio to a threshold.

    The second moment is the mean of min((log r)², τ²) over the tokens that the gradient moves away from p. This follows
    the authors' code, Infini-AI-Lab/M2PO, `verl/trainer/ppo/core_algos.py` (af54a3e8feff; `compute_m2po_policy_loss`):
    the mean is over a micro-batch of one process, and p is the policy that sampled.
    """
    log_ratio = tokens.log_ratio.detach()
    leaving = tokens.counts & (tokens.advantages.sign() * log_ratio > 0)
    square, order = torch.where(leaving, log_ratio.double().square(), torch.inf).sort()
    above = leaving.sum() - torch.arange(1, len(square) + 1, device=square.device)
    # The second moment, by ascending |log r|, if τ were that of this token.
    moment = (square.cumsum(0) + above * square) / leaving.sum()
    return Terms(keep=~leaving | torch.empty_like(leaving).scatter(0, order, moment <= own.threshold))


register_surrogate("m2po", Surrogate(m2po, M2POSettings))


@dataclass(frozen=True)
class CPPOSettings:
    """The settings of "cppo".

    Attributes:
        threshold: δ, the largest weighted change of a token's probability.
        last_weight: The weight of a sequence's last token; the first one has 1, and weights fall linearly.
        budget: The weighted change that the tokens so far may have on average, in addition to δ; up to twice as much
            where the 0.9 quantile of the sequence's changes is larger.
    """

    threshold: float = number(0.2, "in (0, 1]")
    last_weight: float = number(0.8, "in (0, 1]")
    budget: float = number(0.02, "finite and at least 0")


def cppo(tokens: ScoredTokens, args: TrollConfig, own: CPPOSettings) -> Terms:
    """CPPO (arXiv 2606.10968): DPPO's mask, stricter for early tokens and with a budget for the tokens so far.

    A token is far if its weighted change z = w |p̃(o) − p(o)| is above δ, or if the sum of z up to it is above
    δ + δ_b Σ w, where the sum of w ends before it. This follows the authors' code, Tencent-Hunyuan/UniRL,
    `unirl/algorithms/cppo.py` (30899fcf229b), where p is the sampler.
    """
    moved = (tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()).abs()
    far = torch.zeros_like(tokens.counts)
    for sequence in tokens.by_sequence():
        change = moved[sequence]
        weight = torch.linspace(1, own.last_weight, len(change), dtype=change.dtype, device=change.device)
        budget = change.quantile(0.9).clamp(own.budget, 2 * own.budget)
        spent, allowed = (weight * change).cumsum(0), own.threshold + budget * (weight.cumsum(0) - weight)
        far[sequence] = (weight * change > own.threshold) | (spent > allowed)
    return _mask(tokens, far)


register_surrogate("cppo", Surrogate(cppo, CPPOSettings))


@dataclass(frozen=True)
class GMPOSettings:
    """The settings of "gmpo".

    Attributes:
        range: The largest absolute log ratio of a token.
    """

    range: float = number(0.4, "finite and above 0")


def gmpo(tokens: ScoredTokens, args: TrollConfig, own: GMPOSettings) -> Terms:
    """GMPO (arXiv 2507.20673): clips log ratios in the direction of the advantage; TRL averages over a sequence."""
    log_ratio, bound = tokens.log_ratio, own.range
    return Terms(log_ratio=torch.where(tokens.advantages > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound)))


_PER_SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
register_surrogate("gmpo", Surrogate(gmpo, GMPOSettings, sets=_PER_SEQUENCE))


@dataclass(frozen=True)
class BoundedKLPenaltySettings(KLPenaltySettings):
    """The settings of "bounded_kl_penalty": those of "kl_penalty", and the bounds of the ratio.

    Attributes:
        clip: ε of PPO's clip; from 1 on without a lower end. None: no clip.
        cap: c, the largest ratio. Infinity: no cap.
    """

    clip: float | None = number(None, "finite and above 0")
    cap: float = number(5.0, "above 1")


def bounded_kl_penalty(tokens: ScoredTokens, args: TrollConfig, own: BoundedKLPenaltySettings) -> Terms:
    """A KL penalty, with each token's ratio r limited to min(r, c), with either sign of the advantage, and by a clip.

    With a clip, `−A r` becomes `−min(A r, A clip(r, 1 − ε, 1 + ε))`. A ratio has no gradient where it is limited.
    """
    log_ratio = tokens.log_ratio
    if own.clip is not None:
        low = math.log1p(-own.clip) if own.clip < 1 else -math.inf
        clipped = log_ratio.clamp(max=math.log1p(own.clip)), log_ratio.clamp(min=low)
        log_ratio = torch.where(tokens.advantages > 0, *clipped)
    return dataclasses.replace(kl_penalty(tokens, args, own), log_ratio=log_ratio.clamp(max=math.log(own.cap)))


_PER_TOKEN = {"importance_sampling_level": "token"}
register_surrogate(
    "bounded_kl_penalty",
    Surrogate(bounded_kl_penalty, BoundedKLPenaltySettings, _OUTCOMES, sets=_PER_TOKEN, reads_policies=True),
)


def _outcomes(tokens: ScoredTokens, outcomes: str) -> tuple[Tensor, Tensor]:
    """Both policies' floored log-probabilities: of the sampled token and the rest, or of the top K and the tail."""
    if outcomes == "top_k":
        assert tokens.old is not None and tokens.new is not None
        new, old, _ = common_outcomes(tokens.new, tokens.old)
        return new.detach(), old
    return _sampled_or_not(tokens.new_log_probs.detach()), _sampled_or_not(tokens.old_log_probs)


def _sampled_or_not(log_probs: Tensor) -> Tensor:
    # Rounding lets a log-probability rise above 0 by an ulp.
    log_probs = log_probs.clamp(max=0.0)
    outcomes = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], -1)
    return floored(outcomes, torch.ones_like(outcomes, dtype=torch.bool))


def _mask(tokens: ScoredTokens, far: Tensor) -> Terms:
    """Drops the tokens that are `far` from the old policy and that the gradient would move further away."""
    log_ratio = tokens.log_ratio.detach()
    leaving = torch.where(tokens.advantages > 0, log_ratio > 0, log_ratio < 0)
    return Terms(keep=~(leaving & far))
