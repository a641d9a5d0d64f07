"""Truncated sampling: the part of a policy that top-k, top-p and min-p leave for a sampler to draw from.

A sampler with these settings draws from p restricted to a *kept set* S of tokens and renormalised. The importance ratio
is then

    (p̃(o) / p̃(S)) / (p(o) / p(S)) ,

not `p̃(o) / p(o)`. A kept set is a support without a tail: everything outside has probability 0 when it is sampled, and
is absent, not floored. So ratio, KL divergence and projection are computed on S. No quantity on S limits `p̃(S)`, so
the pull also acts on the two outcomes S and its complement.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..checks import check_choice
from .on_support import PolicyOnSupport
from .sparse import SparsePolicy

Ties = Literal["all", "exact"]


@dataclass(frozen=True)
class Truncation:
    """The settings of truncated sampling, applied in transformers' order: first top-k, then top-p, then min-p.

    The order matters only for top-p, whose mass is a share of what the settings before it keep.

    Logits in bf16 have many *ties*, tokens with equal probabilities. `ties` says which of them are kept where an edge
    runs through a tie. Their number and their mass are always the sampler's. Which ones they are may differ, since an
    unstable sort, such as torch's on a CPU, puts ties in any order. `restrict` therefore exchanges one of them for the
    sampled token, whose probability is then right in any case.

    Args:
        top_k: Keeps the k most likely tokens; 0 keeps all.
        top_p: Keeps the most likely tokens, as few as have this mass together, in (0, 1]; 1 keeps all.
        min_p: Keeps tokens with at least this share of the most likely token's probability, in [0, 1]; 0 keeps all.
        min_p_first: Whether min-p comes before the other two, as in vLLM.
        ties: "all": top-k keeps every token that is as likely as the k-th, and top-p the larger ids of a tie, like the
            stable ascending sort of transformers and of vLLM on a CPU. "exact": top-k keeps k tokens, and both keep the
            smaller ids of a tie, like vLLM's Triton kernels.

    Raises:
        ValueError: If a value is out of its range.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_p_first: bool = False
    ties: Ties = "all"

    def __post_init__(self) -> None:
        check_choice("ties", self.ties, get_args(Ties))
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is truncated."""
        return not self.top_k and self.top_p == 1 and not self.min_p

    def kept(self, policy: SparsePolicy) -> Tensor:
        """The slots of a policy that a sampler keeps, (..., K) bool; not more than the policy's own.

        Args:
            policy: At token positions (...), over the whole vocabulary.
        """
        kept = self._first_slots(policy)
        if self.ties == "exact":  # equal probabilities are in the order of their ids
            return kept
        tied = self._at_edge(policy, kept)
        place, first = tied.cumsum(-1), (tied & ~kept).sum(-1, keepdim=True)
        return torch.where(tied, place > first, kept)

    def _first_slots(self, policy: SparsePolicy) -> Tensor:
        """As many slots as a sampler keeps, (..., K) bool, the first ones of a tie."""
        log_probs, kept = policy.log_probs, policy.used
        slots = torch.arange(policy.top_k, device=kept.device)
        likely = torch.ones_like(kept)
        if self.min_p:
            likely = log_probs >= log_probs[..., :1] + math.log(self.min_p)
        if self.min_p_first:
            kept = kept & likely
        if self.top_k and self.ties == "exact":
            kept = kept & (slots < self.top_k)
        elif self.top_k:
            last = min(self.top_k, policy.top_k) - 1
            kept = kept & (log_probs >= log_probs[..., last : last + 1])
        if self.top_p < 1:
            tail = policy.tail_log_prob.unsqueeze(-1)
            if self.top_k:
                tail = torch.full_like(tail, -torch.inf)
            elif self.min_p_first:  # if a slot fails, so does every token of the tail
                tail = tail.where(likely.all(-1, keepdim=True), -torch.inf)
            outcomes = torch.cat([log_probs.masked_fill(~kept, -torch.inf), tail], -1)
            # A token is kept unless it and everything after it hold at most 1 − top_p, summed from the smallest up.
            remaining = torch.softmax(outcomes, -1).flip(-1).cumsum(-1).flip(-1)[..., :-1]
            kept = kept & ((remaining > 1 - self.top_p) | (slots == 0))
        return kept & likely

    @staticmethod
    def _at_edge(policy: SparsePolicy, kept: Tensor) -> Tensor:
        """The slots that are as likely as the least likely of the kept ones, (..., K) bool."""
        edge = policy.log_probs.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        return (policy.log_probs == edge) & policy.used

    def restrict(self, policy: SparsePolicy) -> tuple[SparsePolicy, Tensor]:
        """Restricts a policy to its kept set and renormalises it, without a tail.

        The sampled token always belongs to the kept set. If the other tokens of a tie were kept, it takes the place of
        one of them; if rounding left it outside, it is added. The result has as many slots as the largest kept set
        needs; finding their number waits for the device.

        Args:
            policy: At token positions (...), with all tokens that the sampler keeps.

        Returns:
            The policy, (...); and where the sampled token was added, (...) bool.
        """
        kept = self.kept(policy)
        place = torch.arange(policy.top_k, device=kept.device)
        sampled = place == policy.slot.unsqueeze(-1)
        tied = self._at_edge(policy, kept)
        exchanged = (sampled & tied & ~kept).any(-1, keepdim=True)
        # The one that the rule keeps last.
        last = (tied & kept).to(torch.uint8)
        last = last.argmax(-1, keepdim=True) if self.ties == "all" else last.cumsum(-1).argmax(-1, keepdim=True)
        kept = kept & ~(exchanged & (place == last))
        added, kept = (sampled & ~kept).any(-1) & ~exchanged.squeeze(-1), kept | sampled
        order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
        token_ids, log_probs, used = (x.gather(-1, order) for x in (policy.token_ids, policy.log_probs, kept))
        slots = max(1, int(used.reshape(-1, policy.top_k).any(0).sum()))
        token_ids, log_probs, used = (x[..., :slots] for x in (token_ids, log_probs, used))
        cut = torch.cat([policy.log_probs.masked_fill(kept, -torch.inf), policy.tail_log_prob.unsqueeze(-1)], -1)
        # Invalid rows stay NaN.
        log_probs = torch.log_softmax(log_probs.masked_fill(~used, -torch.inf), -1).masked_fill(~used, -torch.inf)
        restricted = dataclasses.replace(
            policy,
            token_ids=token_ids.masked_fill(~used, -1),
            log_probs=log_probs,
            tail_log_prob=torch.logsumexp(cut, -1),
            slot=kept.cumsum(-1).gather(-1, policy.slot.unsqueeze(-1)).squeeze(-1) - 1,
            truncated=True,
        )
        return restricted, added

    def exceeds(self, policy: SparsePolicy) -> Tensor:
        """(...) bool, true where the kept set, or the tie at its edge, may need more slots.

        It may where fewer than two slots are left over: the last one may hold a sampled token that is less likely
        than tokens outside.
        """
        truncation = self
        if self.top_p < 1 and (self.top_k or self.min_p_first):  # the mass that top-p takes a share of has to be there
            truncation = dataclasses.replace(self, top_p=1.0, min_p=self.min_p if self.min_p_first else 0.0)
        needed = truncation._first_slots(policy)
        if self.ties == "all":
            needed = needed | self._at_edge(policy, needed)
        return (needed.sum(-1) >= policy.used.sum(-1) - 1) & (policy.tail_log_prob > -torch.inf)


def kept_or_not(new: PolicyOnSupport, old: SparsePolicy) -> tuple[PolicyOnSupport, SparsePolicy]:
    """Both policies on two outcomes, each (...): the kept set, in one slot, and everything else.

    If the old policy's mass on the kept set is not known, both policies have all their mass on it.

    Args:
        new: The new policy, read at the old one's tokens.
        old: The old policy, truncated.
    """
    slot, cut = torch.zeros_like(old.slot), old.tail_log_prob
    ids = slot.unsqueeze(-1)
    rest = torch.where(cut > -torch.inf, new.tail_logit, -torch.inf)
    log_kept = torch.log(-torch.expm1(cut)).unsqueeze(-1)
    return (
        PolicyOnSupport(ids, torch.logsumexp(new.logits, -1, keepdim=True), rest, new.vocab_size),
        SparsePolicy(ids, log_kept, cut, slot, old.vocab_size, old.mass_threshold),
    )
