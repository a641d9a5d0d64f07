"""A policy on a given support: the new policy on the old one's outcomes, a student on its teacher's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..probabilities import as_float, entropy_of
from .sparse import SparsePolicy


@dataclass(frozen=True, eq=False)
class PolicyOnSupport:
    """Next-token distributions on K given tokens and a tail for all others, read by [log_probs_at][troll.log_probs_at].

    The logits are stored as they were read; the log-probabilities are normalised when they are accessed.

    Attributes:
        token_ids: (..., K) int64; −1 in unused slots.
        logits: (..., K), these tokens' logits; −inf in unused slots.
        tail_logit: (...), log-sum-exp of all other logits; −inf where there are none.
        vocab_size: V, the tokens in the vocabulary.
        tail_entropy: (...), the entropy of the distribution within the tail, in nats; None unless it was requested.
        temperature: The sampling temperature of the source; None if it is not known.
    """

    token_ids: Tensor
    logits: Tensor
    tail_logit: Tensor
    vocab_size: int
    tail_entropy: Tensor | None = None
    temperature: float | None = None

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.tail_logit.shape

    @property
    def log_mass(self) -> Tensor:
        """Log-probability of the K tokens together, (...), in nats: the mass outside the tail."""
        return torch.nn.functional.logsigmoid(torch.logsumexp(self.logits, -1) - self.tail_logit)

    def without_tail(self) -> PolicyOnSupport:
        """The policy restricted to its K tokens; its log-probabilities are renormalised.

        It is invalid wherever the whole policy is, even if only logits outside its tokens are NaN or +inf.
        """
        return dataclasses.replace(self, tail_logit=self.tail_logit.detach() - torch.inf)

    def at(self, positions: Tensor) -> PolicyOnSupport:
        """The policy at some of its flattened token positions, (n,)."""
        count = len(self.shape)
        tensors: dict[str, Any] = {
            name: x.reshape(-1, *x.shape[count:])[positions] for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **tensors)

    @property
    def used(self) -> Tensor:
        """(..., K) bool, true in slots that hold a token."""
        return self.token_ids >= 0

    @property
    def outcomes(self) -> Tensor:
        """Log-probabilities of all K + 1 outcomes, the tail last, (..., K + 1); NaN where the logits are invalid."""
        return torch.log_softmax(torch.cat([self.logits, self.tail_logit.unsqueeze(-1)], -1), -1)

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the tokens, (..., K), in nats; −inf in unused slots."""
        return self.outcomes[..., :-1]

    @property
    def tail_log_prob(self) -> Tensor:
        """Log-probability of everything else, (...), in nats; −inf where there is nothing else."""
        return self.outcomes[..., -1]

    @property
    def entropy(self) -> Tensor | None:
        """Entropy over the vocabulary, (...), in nats; None unless the tail's own was read."""
        if self.tail_entropy is None:
            return None
        outcomes = self.outcomes
        return entropy_of(outcomes) + outcomes[..., -1].exp() * self.tail_entropy


def check_one_support(
    first: PolicyOnSupport | SparsePolicy, second: PolicyOnSupport | SparsePolicy, *, wait: bool = True
) -> None:
    """Raises ValueError unless two policies share one support and one vocabulary.

    Without `wait` only the shapes are compared on a GPU, since comparing the ids would wait for it.
    """
    if first.vocab_size != second.vocab_size:
        raise ValueError(
            f"two policies must have one vocabulary, got {first.vocab_size} and {second.vocab_size} tokens"
        )
    same = first.token_ids is second.token_ids or (not wait and first.token_ids.device.type != "cpu")
    if first.token_ids.shape != second.token_ids.shape or not (same or torch.equal(first.token_ids, second.token_ids)):
        raise ValueError("two policies must share one support: read the new one with log_probs_at(_, old.token_ids)")


def present_outcomes(first: PolicyOnSupport | SparsePolicy, second: PolicyOnSupport | SparsePolicy) -> Tensor:
    """(..., K + 1) bool: the outcomes of one support on which two policies are compared.

    Unused slots are not among them, nor is the tail where neither policy has mass in it.
    """
    tails = [x.tail_logit if isinstance(x, PolicyOnSupport) else x.tail for x in (first, second)]
    tail_present = (tails[0] > -torch.inf) | (tails[1] > -torch.inf)
    return torch.cat([first.used, tail_present.unsqueeze(-1)], dim=-1)


def sparse_kl(new: PolicyOnSupport | SparsePolicy, old: PolicyOnSupport | SparsePolicy) -> Tensor:
    """KL(new ‖ old) on common outcomes, including the tail, (...), in nats; differentiable in both.

    This is the divergence over the vocabulary minus `new(tail) · KL(new(·|tail) ‖ old(·|tail))`, so a lower bound of
    it. Nothing is floored: the result is inf where `new` has mass and `old` has none. For distillation from a teacher's
    largest log-probabilities, read the student on the teacher's tokens: `sparse_kl(teacher, student)` is then the
    forward divergence, and `sparse_kl(student, teacher)` the reverse one.

    Args:
        new: The policy under which the mean is taken, (...).
        old: The other policy, on the same tokens. For one that a sampler truncated, give `new.without_tail()`.

    Raises:
        ValueError: If the two do not share one support.
    """
    check_one_support(new, old)
    present = present_outcomes(new, old)
    log_new, log_old = as_float(new.outcomes), as_float(old.outcomes)
    # Where new has no mass only old's part of the term is left: the difference would be −inf there, and 0 · −inf NaN.
    # NaN stays NaN.
    counts = present & (log_new != -torch.inf)
    x = torch.where(counts, log_new, 0.0) - torch.where(counts, log_old, 0.0)
    # Σ new x + old − new: no term is negative, so that nothing cancels where the two are close.
    a, b = torch.where(counts, log_new, -torch.inf).exp(), torch.where(present, log_old, -torch.inf).exp()
    difference = torch.where(x >= 0, a * torch.expm1(-x.clamp(min=0)), -b * torch.expm1(x.clamp(max=0)))
    return torch.where(counts, a * x + difference, b).sum(-1)


def sparse_entropy(policy: PolicyOnSupport | SparsePolicy) -> Tensor:
    """Entropy over the K + 1 outcomes, in nats.

    It is a lower bound of the entropy over the vocabulary: since the tail counts as one outcome, its mass times the
    entropy within it is missing, at most `tail mass · log V`.

    Args:
        policy: At token positions (...).

    Returns:
        (...), at least 0 up to rounding; differentiable where the policy is.
    """
    return entropy_of(as_float(policy.outcomes))
