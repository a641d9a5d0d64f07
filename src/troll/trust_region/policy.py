"""The sparse policy: the few outcomes of a token's distribution that carry its mass, and a tail for the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from troll.trust_region.dual import divergence
from troll.trust_region.head import Head, OnSupport, OwnSupport, log_probs_on_support_from_hidden, top_from_hidden
from troll.trust_region.kernels.tile import Transform
from troll.trust_region.logits import LogitRows, log_probs_on_support, top_of_logits
from troll.trust_region.support import (
    PROBABILITY_FLOOR,
    TAILS,
    Tail,
    Top,
    as_float,
    check_capture,
    check_logits,
    check_tokens,
    check_tokens_in,
    check_top_log_probs,
    floored,
    keep,
    log_count,
    missing_from,
    shape_text,
    top_of_log_probs,
)
from troll.trust_region.vocab_parallel import held_vocabulary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from troll.trust_region.packed import PackedPolicy

__all__ = ["TAILS", "SparsePolicy", "Tail", "common_outcomes", "present_outcomes"]


@dataclass(frozen=True)
class SparsePolicy:
    """Next-token distributions on at most K tokens each, and the mass of all others.

    Make one with :meth:`from_logits` or its siblings. Used slots come first, in the order of larger probability first,
    then smaller id.

    Attributes:
        token_ids: (..., K) int64; −1 in unused slots.
        log_probs: (..., K) float32 (float64 for float64 logits), in nats; −inf in unused slots.
        tail_log_prob: (...), log of the mass outside the slots; −inf where nothing is outside.
        vocab_size: V of the logits it was captured from.
        tail: "bucket", the tail is one more outcome with its exact mass; or "floor" (the paper's code), every token
            outside has probability 1e-12 and the whole is renormalised.
        mass_threshold: δ with which the policy was captured.
    """

    token_ids: Tensor
    log_probs: Tensor
    tail_log_prob: Tensor
    vocab_size: int
    tail: Tail = "bucket"
    mass_threshold: float = 1e-5

    @classmethod
    @torch.no_grad()
    def from_logits(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        *,
        top_k: int = 64,
        mass_threshold: float = 1e-5,
        tail: Tail = "bucket",
        rows: Tensor | None = None,
        vocab_group: ProcessGroup | None = None,
    ) -> SparsePolicy:
        """Captures a policy, without gradient.

        Keeps the `top_k` most likely tokens, fewer where they already cover ``1 − mass_threshold`` of the mass, and
        always the sampled token, which takes the last used slot if the others lack it.

        Args:
            logits: (..., V), aligned with `token_ids` and divided by the sampling temperature.
            token_ids: The sampled tokens, (...), integers in [0, V).
            top_k: K, at least 1; more than V is taken as V.
            mass_threshold: δ in [0, 1); 0 keeps K tokens always.
            tail: See the class.
            rows: Which rows of (L, V) logits are the positions (N,): spares the copy of an indexing. All different and
                at least 0, which is not checked: of a row that is there twice, one position's gradient would be lost.
            vocab_group: The n processes over which the vocabulary is spread; each then passes its slice of the logits,
                (..., V/n), with the same `token_ids`, and gets the same policy. See
                :mod:`~troll.trust_region.vocab_parallel`: one all-gather of 2 min(K, V/n) + 3 numbers a token.

        Raises:
            ValueError: On a wrong shape or dtype, an id outside the vocabulary, a parameter out of its range, or slices
                of different sizes.
        """
        check_logits(logits, token_ids, rows)
        vocabulary = held_vocabulary(logits.shape[-1], vocab_group)
        check_tokens_in(token_ids, vocabulary.size)
        check_capture(top_k, mass_threshold, tail)
        sampled = token_ids.long().reshape(-1, 1)
        top = top_of_logits(LogitRows.of(logits, rows), sampled, min(top_k, vocabulary.size), vocabulary)
        return cls._from_top(top, sampled, token_ids.shape, vocabulary.size, mass_threshold, tail)

    @classmethod
    @torch.no_grad()
    def from_hidden(
        cls,
        hidden: Tensor,
        lm_head_weight: Tensor,
        token_ids: Tensor,
        *,
        top_k: int = 64,
        mass_threshold: float = 1e-5,
        tail: Tail = "bucket",
        bias: Tensor | None = None,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        vocab_group: ProcessGroup | None = None,
    ) -> SparsePolicy:
        """The same as :meth:`from_logits` of the LM head's logits, without ever holding them.

        Args:
            hidden: Hidden states, (..., H), aligned with `token_ids`.
            lm_head_weight: (V, H).
            token_ids: The sampled tokens, (...), integers in [0, V).
            top_k: As in `from_logits`.
            mass_threshold: As in `from_logits`.
            tail: As in `from_logits`.
            bias: (V,), of the LM head.
            temperature: The sampling temperature.
            logit_scale: What the model multiplies its logits by.
            softcap: The model's final logit softcap.
            vocab_group: As in `from_logits`; each process then passes its rows of `lm_head_weight` and `bias`.

        Raises:
            ValueError: As `from_logits`, and on parts of the head that do not fit each other.
        """
        head = Head(lm_head_weight, bias, Transform(temperature, logit_scale, softcap), vocab_group=vocab_group)
        return cls.from_head(hidden, head, token_ids, top_k=top_k, mass_threshold=mass_threshold, tail=tail)

    @classmethod
    @torch.no_grad()
    def from_head(
        cls, hidden: Tensor, head: Head, token_ids: Tensor, *, top_k: int, mass_threshold: float, tail: Tail
    ) -> SparsePolicy:
        """:meth:`from_hidden` with the head as one argument."""
        head.check(hidden, token_ids)
        check_tokens(token_ids, token_ids.shape)
        check_tokens_in(token_ids, head.vocab_size)
        check_capture(top_k, mass_threshold, tail)
        shape, sampled = token_ids.shape, token_ids.long().reshape(-1)
        top = top_from_hidden(hidden.reshape(-1, hidden.shape[-1]), head, sampled, min(top_k, head.vocab_size))
        return cls._from_top(top, sampled.unsqueeze(-1), shape, head.vocab_size, mass_threshold, tail)

    @classmethod
    @torch.no_grad()
    def from_top_log_probs(
        cls,
        top_token_ids: Tensor,
        top_log_probs: Tensor,
        token_ids: Tensor,
        *,
        vocab_size: int,
        top_k: int = 64,
        mass_threshold: float = 1e-5,
        tail: Tail = "bucket",
    ) -> SparsePolicy:
        """The same as :meth:`from_logits` of the logits behind them, from the top log-probs of an inference engine.

        The tail is what the entries leave of 1, since an engine says nothing else of it: at least 1e-12, so that
        rounding never makes it impossible, and absent where the entries are the whole vocabulary. Entries that rounding
        lets exceed 1 are renormalised.

        Args:
            top_token_ids: (..., M) integers in [0, V), different in a row and in any order; −1 in unused entries. The
                sampled token is always among them. More than K are used for the tail alone.
            top_log_probs: (..., M), in nats, of the distribution that was sampled from (at its temperature, and
                truncated by nothing); whatever in unused entries.
            token_ids: The sampled tokens, (...).
            vocab_size: V.
            top_k: K, as in `from_logits`.
            mass_threshold: As in `from_logits`.
            tail: As in `from_logits`.

        Raises:
            ValueError: As `from_logits`; on a sampled token that is not among its entries, a token that is there twice,
                or entries that hold more than 1.01 in all, which are no log-probabilities.
        """
        check_top_log_probs(top_token_ids, top_log_probs, token_ids, vocab_size)
        check_capture(top_k, mass_threshold, tail)
        sampled = token_ids.long().unsqueeze(-1)
        top = top_of_log_probs(top_token_ids, top_log_probs, sampled, min(top_k, vocab_size), vocab_size)
        return cls._from_top(top, sampled, token_ids.shape, vocab_size, mass_threshold, tail)

    @classmethod
    def _from_top(
        cls, top: Top, sampled: Tensor, shape: torch.Size, vocab_size: int, mass_threshold: float, tail: Tail
    ) -> SparsePolicy:
        ids, log_probs, tail_log_prob = keep(top, sampled, mass_threshold)
        ids, log_probs = (x.view(*shape, x.shape[-1]) for x in (ids, log_probs))
        policy = cls(ids, log_probs, tail_log_prob.view(shape), vocab_size, tail, mass_threshold)
        return policy if tail == "bucket" else policy.floored()

    def floored(self) -> SparsePolicy:
        """A capture with its exact tail, as one with ``tail="floor"``: every token outside has probability 1e-12."""
        used = self.used
        outside = log_count(self.vocab_size - used.sum(-1), self.log_probs.dtype) + math.log(PROBABILITY_FLOOR)
        outcomes = torch.cat([self.log_probs, outside.unsqueeze(-1)], -1)
        outcomes = floored(outcomes, torch.cat([used, outside.unsqueeze(-1) > -torch.inf], -1))
        # A row of NaN is renormalised to NaN everywhere, its unused slots included.
        log_probs = outcomes[..., :-1].masked_fill(~used, -torch.inf)
        return dataclasses.replace(self, log_probs=log_probs, tail_log_prob=outcomes[..., -1])

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.tail_log_prob.shape

    @property
    def used(self) -> Tensor:
        """Which slots hold a token, (..., K) bool."""
        return self.token_ids >= 0

    @property
    def outcomes(self) -> Tensor:
        """Log-probabilities of all K + 1 outcomes, the tail last, (..., K + 1)."""
        return torch.cat([self.log_probs, self.tail_log_prob.unsqueeze(-1)], dim=-1)

    def check_positions(self, token_ids: Tensor) -> None:
        """Raises ValueError unless the policy holds the positions of these tokens."""
        if self.shape != token_ids.shape:
            raise ValueError(f"old must hold the positions {tuple(token_ids.shape)}, got {tuple(self.shape)}")

    def slot(self, token_ids: Tensor) -> Tensor:
        """The slot that holds each token, (...) int64.

        Raises:
            ValueError: If a token is outside the support, or the shape or dtype does not fit.
        """
        check_tokens(token_ids, self.shape)
        matches = self.token_ids == token_ids.unsqueeze(-1)
        found = matches.any(-1) & (token_ids >= 0)
        if not bool(found.all()):
            example = token_ids[~found].reshape(-1)[0].item()
            raise ValueError(
                f"token_ids holds {int((~found).sum())} tokens outside the policy's support, {example} for one; "
                "pass the sampled tokens with which the policy was captured"
            )
        return matches.to(torch.uint8).argmax(-1)

    def log_prob(self, token_ids: Tensor) -> Tensor:
        """Log-probability of one token per position, (...) to (...), in nats.

        With ``tail="floor"`` this is the renormalised distribution's, the denominator of the ratio.

        Raises:
            ValueError: If a token is outside the support.
        """
        return self.log_probs.gather(-1, self.slot(token_ids).unsqueeze(-1)).squeeze(-1)

    def on_support(
        self, logits: Tensor, *, rows: Tensor | None = None, vocab_group: ProcessGroup | None = None
    ) -> SparsePolicy:
        """Another policy on this one's outcomes, differentiable in its logits.

        Its log-probabilities are exact (``z − logsumexp z``), and its tail is the log-sum-exp over the support's
        complement, never ``1 − Σ``.

        Args:
            logits: (..., V).
            rows: As in :meth:`from_logits`.
            vocab_group: As in :meth:`from_logits`; one all-reduce of K + 2n numbers a token, and none in the backward.

        Raises:
            ValueError: If the shape does not fit the token positions and the vocabulary.
        """
        if rows is not None and rows.shape != self.shape:
            raise ValueError(f"rows must be {shape_text(self.shape)}, got {shape_text(rows.shape)}")
        vocabulary = held_vocabulary(logits.shape[-1] if logits.dim() else 0, vocab_group)
        positions = self.shape if rows is None else logits.shape[:1]
        expected = (*positions, vocabulary.share(self.vocab_size))
        if logits.shape != expected:
            raise ValueError(f"logits must be {shape_text(expected)}, got {shape_text(logits.shape)}")
        log_probs, tail_log_prob = log_probs_on_support(logits, self.token_ids, vocabulary, rows)
        return dataclasses.replace(self, log_probs=log_probs, tail_log_prob=tail_log_prob)

    def new_policy(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        rows: Tensor | None = None,
        vocab_group: ProcessGroup | None = None,
    ) -> SparsePolicy:
        """The new policy on the outcomes that this one's tail asks for, differentiable in its logits.

        ``bucket``: this policy's own. ``floor``: the union of both supports, this one's slots first; every other token
        counts as 1e-12.

        Args:
            logits: (..., V).
            token_ids: The sampled tokens, (...), the same with which this policy was captured.
            rows: As in :meth:`from_logits`.
            vocab_group: As in :meth:`on_support`; ``floor`` captures the new policy's support as well.

        Raises:
            ValueError: If a shape does not fit.
        """
        if self.tail == "bucket":
            return self.on_support(logits, rows=rows, vocab_group=vocab_group)
        top_k = self.token_ids.shape[-1]
        own = SparsePolicy.from_logits(
            logits, token_ids, top_k=top_k, mass_threshold=self.mass_threshold, rows=rows, vocab_group=vocab_group
        ).token_ids
        union = torch.cat([self.token_ids, missing_from(self.token_ids, own)], dim=-1)
        new = dataclasses.replace(self, token_ids=union).on_support(logits, rows=rows, vocab_group=vocab_group)
        return new._with_constant_tail()

    def new_policy_from_head(
        self, hidden: Tensor, head: Head, token_ids: Tensor, *, entropy: bool = False
    ) -> tuple[SparsePolicy, Tensor | None]:
        """:meth:`new_policy` of an LM head's logits, without ever holding them, and the entropy (...) if asked for.

        With ``floor``, the new policy's own support is left out where it holds no more than `mass_threshold` outside
        this one's: see :class:`~troll.trust_region.head.OwnSupport`.

        Args:
            hidden: (..., H).
            head: With V entries.
            token_ids: As there.
            entropy: Whether to compute it.
        """
        head.check(hidden, token_ids)
        rows = head.vocabulary.share(self.vocab_size)
        if len(head.weight) != rows:
            raise ValueError(f"lm_head_weight must have {rows} rows, got {len(head.weight)}")
        ids = self.token_ids.reshape(-1, self.token_ids.shape[-1])
        own = OwnSupport(token_ids.long().reshape(-1), self.mass_threshold) if self.tail == "floor" else None
        on_support = log_probs_on_support_from_hidden(
            hidden.reshape(-1, hidden.shape[-1]), head, ids, own_support=own, entropy=entropy
        )
        entropies = None if on_support.entropy is None else on_support.entropy.view(self.shape)
        return self.new_policy_from_support(on_support), entropies

    def new_policy_from_support(self, on_support: OnSupport) -> SparsePolicy:
        """:meth:`new_policy` from what an LM head said of this policy's support, at as many positions."""
        slots = on_support.token_ids.shape[-1]
        new = dataclasses.replace(
            self,
            log_probs=on_support.log_probs.view(*self.shape, slots),
            tail_log_prob=on_support.tail_log_prob.view(self.shape),
        )
        if self.tail == "bucket":
            return new
        return dataclasses.replace(new, token_ids=on_support.token_ids.view(*self.shape, slots))._with_constant_tail()

    def _with_constant_tail(self) -> SparsePolicy:
        outside = log_count(self.vocab_size - self.used.sum(-1), self.log_probs.dtype)
        return dataclasses.replace(self, tail_log_prob=outside + math.log(PROBABILITY_FLOOR))

    def extended(self, token_ids: Tensor) -> SparsePolicy:
        """This policy with a floored tail on more outcomes, its own slots first: (..., K') with K' ≥ K, −1 unused."""
        extra = token_ids[..., self.token_ids.shape[-1] :]
        dtype = self.log_probs.dtype
        # One token outside the support has the tail's mass, divided by how many share it. Where none is outside this
        # is −inf − (−inf), and nobody asks for it.
        outside = log_count(self.vocab_size - self.used.sum(-1), dtype)
        one_outside = (self.tail_log_prob - outside).unsqueeze(-1)
        on_extra = one_outside.expand(extra.shape).masked_fill(extra < 0, -torch.inf)
        left_out = log_count(self.vocab_size - (token_ids >= 0).sum(-1), dtype)
        return dataclasses.replace(
            self,
            token_ids=token_ids,
            log_probs=torch.cat([self.log_probs, on_extra], -1),
            tail_log_prob=one_outside.squeeze(-1) + left_out,
        )

    def on_outcomes_of(self, new: SparsePolicy) -> SparsePolicy:
        """This policy on the outcomes of a new one, which :meth:`new_policy` made: more than its own if floored."""
        return self.extended(new.token_ids) if self.tail == "floor" else self

    def kl(self, other: SparsePolicy) -> Tensor:
        """KL(self ‖ other) over the K + 1 outcomes, (...), in nats; both floored at 1e-12.

        Raises:
            ValueError: If the two do not share one support.
        """
        p, q, _ = common_outcomes(self, other)
        return divergence((p - q).masked_fill(q == -torch.inf, 0.0), q)

    def to(self, *args: Any, **kwargs: Any) -> SparsePolicy:
        """Moves devices and casts the log-probabilities, with the arguments of ``torch.Tensor.to``."""
        log_probs = self.log_probs.to(*args, **kwargs)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.to(log_probs.device),
            log_probs=log_probs,
            tail_log_prob=self.tail_log_prob.to(*args, **kwargs),
        )

    def __getitem__(self, index: Any) -> SparsePolicy:
        """Indexes the token positions, as a tensor of shape (...) would be."""
        rows = torch.arange(self.tail_log_prob.numel(), device=self.tail_log_prob.device).view(self.shape)[index]
        slots = self.token_ids.shape[-1]
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.reshape(-1, slots)[rows],
            log_probs=self.log_probs.reshape(-1, slots)[rows],
            tail_log_prob=self.tail_log_prob.reshape(-1)[rows],
        )

    @staticmethod
    def cat(policies: Sequence[SparsePolicy], dim: int = 0) -> SparsePolicy:
        """Concatenates along a dimension of the token positions.

        Raises:
            ValueError: If there is nothing to concatenate, the policies were captured differently, or there is no such
                dimension.
        """
        captures = {(p.tail, p.mass_threshold, p.vocab_size, p.token_ids.shape[-1]) for p in policies}
        if len(captures) != 1:
            raise ValueError(f"policies must share tail, mass threshold, vocabulary and K, got {sorted(captures)}")
        dims = len(policies[0].shape)
        if not -dims <= dim < dims:
            raise ValueError(f"dim must be a dimension of the token positions, in [{-dims}, {dims}), got {dim}")
        dim %= dims
        return dataclasses.replace(
            policies[0],
            token_ids=torch.cat([policy.token_ids for policy in policies], dim),
            log_probs=torch.cat([policy.log_probs for policy in policies], dim),
            tail_log_prob=torch.cat([policy.tail_log_prob for policy in policies], dim),
        )

    def pack(self) -> PackedPolicy:
        """Keeps the used slots alone: usually 6 to 12 times smaller. ``unpack`` restores a captured policy exactly."""
        # Not at the top of the file: the packed form unpacks to this class, so its file imports this one.
        from troll.trust_region.packed import pack

        return pack(self)


def common_outcomes(first: SparsePolicy, second: SparsePolicy) -> tuple[Tensor, Tensor, Tensor]:
    """Both policies' floored log-probabilities and :func:`present_outcomes`, each (..., K + 1)."""
    present = present_outcomes(first, second)
    return floored(as_float(first.outcomes), present), floored(as_float(second.outcomes), present), present


def present_outcomes(first: SparsePolicy, second: SparsePolicy) -> Tensor:
    """On which outcomes two policies are compared, (..., K + 1) bool: not on unused slots, nor on a tail of no mass.

    Raises:
        ValueError: If the two do not share one support.
    """
    same = first.token_ids is second.token_ids or torch.equal(first.token_ids, second.token_ids)
    if not same:
        raise ValueError("the two policies must share one support: make the new one with old.new_policy(...)")
    tail_present = (first.tail_log_prob > -torch.inf) | (second.tail_log_prob > -torch.inf)
    return torch.cat([first.used, tail_present.unsqueeze(-1)], dim=-1)
