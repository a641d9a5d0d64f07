"""From the largest entries of a distribution to the slots of a policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_distinct, check_floating, check_integers, check_shape, check_tokens_in, shape_text
from ..kernels import MAX_SELECTED, use_triton
from ..probabilities import PROBABILITY_FLOOR, as_float
from .on_support import PolicyOnSupport
from .sparse import SparsePolicy, check_capture

#: Entries in a block. The K blocks with the largest maxima contain the K largest entries, so only those are sorted.
BLOCK = 64

#: The largest sum of probabilities that rounding in an engine can explain; numbers with a larger sum are an error.
LARGEST_TOTAL = 1.01
#: The smallest sum of probabilities of a complete kept set; a smaller sum is an error.
SMALLEST_TOTAL = 0.99


class Top(NamedTuple):
    """The largest entries of N distributions, and the rest of each for normalisation."""

    ids: Tensor
    """(N, K) int64, of equal logits the smaller id first; −1 in unused slots, which come last."""
    logits: Tensor
    """(N, K); −inf in unused slots."""
    tail_logits: Tensor
    """(N, K), the logits with which these entries count in the tail if they are dropped: `logits`, or a tile's less
    precise numbers, as a step reads them outside the support."""
    sampled_logit: Tensor
    """(N,), the sampled token's logit; may be −inf where the token is one of the K."""
    log_rest: Tensor
    """Log-sum-exp of all entries except the K and the sampled one, (N,); −inf if none are left."""


def top_ids(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries, (..., V) to (..., k): larger value first, then smaller id.

    The same as a stable descending sort; torch's `topk` does not define which of equal values it returns.
    """
    blocks = z.shape[-1] // BLOCK
    if blocks > 2 * k:
        maxima = z[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1)
        chosen = top_ids(maxima, k).sort(dim=-1).values  # ascending: the smaller position is the smaller id
        candidates = (chosen.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(-2)
        beyond = torch.arange(blocks * BLOCK, z.shape[-1], device=z.device).expand(*z.shape[:-1], -1)
        candidates = torch.cat([candidates, beyond], dim=-1)
        return candidates.gather(-1, top_ids(z.gather(-1, candidates), k))
    if z.dtype == torch.float64:
        return z.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One integer a token that orders like (value, −id). Adding 0 makes −0 equal to 0.
    bits = (z + 0.0).view(torch.int32)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    minus_id = torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    return z.shape[-1] - 1 - (((value.long() << 32) | minus_id).topk(k, dim=-1).values & 0xFFFFFFFF)


def largest(
    ids: Tensor,
    logits: Tensor,
    tail_logits: Tensor,
    sampled: Tensor,
    sampled_logit: Tensor,
    log_rest: Tensor,
    k: int,
) -> Top:
    """The k largest of M entries, in the order of slots; they make whole distributions together with the rest.

    Args:
        ids: (N, M), in ascending order; −1 in unused entries, which come last.
        logits: (N, M); −inf in unused entries.
        tail_logits: (N, M), the logits with which the entries are added to the rest if they are not among the k.
        sampled: The sampled tokens, (N,), among the entries or not.
        sampled_logit: (N,), the sampled tokens' logits; where they are among the entries, the same or −inf.
        log_rest: (N, m), the log-sum-exp of m parts of everything except for the entries and the sampled token.
        k: The entries to keep, at most M.
    """
    position = top_ids(logits, k)
    others = tail_logits.scatter(-1, position, -torch.inf).masked_fill(ids == sampled.unsqueeze(-1), -torch.inf)
    sampled_logit = _sampled_logit(ids, logits, sampled, sampled_logit)
    ids, logits, tail_logits = (x.gather(-1, position) for x in (ids, logits, tail_logits))
    return Top(ids, logits, tail_logits, sampled_logit, torch.logsumexp(torch.cat([log_rest, others], -1), -1))


def _sampled_logit(ids: Tensor, logits: Tensor, sampled: Tensor, elsewhere: Tensor) -> Tensor:
    """The sampled tokens' logits, (N,): from the entries (N, M), or from `elsewhere`."""
    among = torch.where(ids == sampled.unsqueeze(-1), logits, -torch.inf).amax(-1)
    return torch.maximum(among, elsewhere)


def sorted_by_id(ids: Tensor, logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Puts entries (N, M) into the order that `largest` takes."""
    ids, order = ids.masked_fill(ids < 0, vocab_size).sort(-1)
    return ids.masked_fill(ids == vocab_size, -1), logits.gather(-1, order)


def largest_of_policy(policy: PolicyOnSupport, sampled: Tensor, k: int) -> Top:
    """The k largest entries, or all if there are fewer, of a policy that has been read at N positions.

    Raises:
        ValueError: If a sampled token is not among the tokens that were read.
    """
    slots = policy.token_ids.shape[-1]
    ids, z = policy.token_ids.long().reshape(-1, slots), policy.logits.reshape(-1, slots)
    is_sampled = ids == sampled.unsqueeze(-1)
    if not bool(is_sampled.any(-1).all()):
        token = sampled[~is_sampled.any(-1)][0].item()
        raise ValueError(f"token_ids must be among the tokens that the source was read at, got {token}")
    ids, z = sorted_by_id(ids, z, policy.vocab_size)
    tail, nowhere = policy.tail_logit.reshape(-1, 1), torch.full_like(z[:, 0], -torch.inf)
    return largest(ids, z, z, sampled, nowhere, tail, min(k, slots))


def policy_from_top(top: Top, sampled: Tensor, vocab_size: int, mass_threshold: float) -> SparsePolicy:
    """The policies of N tokens: entries until they cover `1 − mass_threshold`, and always the sampled token.

    A threshold of 0 keeps all entries. A row that is not a distribution, or whose sampled token is outside the
    vocabulary, has NaN in its used slots and in its tail; in the latter case token 0 replaces the sampled one.
    """
    if use_triton(top.logits, top.logits.shape[-1], MAX_SELECTED):
        from . import top_triton

        slots = top_triton.slots(top, sampled, vocab_size, mass_threshold)
    else:
        slots = _slots(top, sampled, vocab_size, mass_threshold)
    return SparsePolicy(*slots, vocab_size, mass_threshold)


def _slots(top: Top, sampled: Tensor, vocab_size: int, mass_threshold: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and log-probabilities (N, K), the tail's (N,), and the slot of the sampled token (N,), int64."""
    order = top_ids(top.logits, top.logits.shape[-1])
    ids, logits, tail_logits = (x.gather(-1, order) for x in (top.ids, top.logits, top.tail_logits))
    top = top._replace(ids=ids, logits=logits, tail_logits=tail_logits)
    return slots_in_order(top, sampled, vocab_size, mass_threshold)


def slots_in_order(
    top: Top, sampled: Tensor, vocab_size: int, mass_threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The slots of `policy_from_top`, from a `top` whose entries are in the order of slots: larger ones first.

    Returns:
        Ids and log-probabilities (N, K), the tail's (N,), and the slot of the sampled token (N,), int64.
    """
    valid = (sampled >= 0) & (sampled < vocab_size)
    sampled, rest = torch.where(valid, sampled, 0), torch.where(valid, top.log_rest, torch.nan)
    sampled_logit = _sampled_logit(top.ids, top.logits, sampled, top.sampled_logit)
    sampled, sampled_logit, rest = (x.unsqueeze(-1) for x in (sampled, sampled_logit, rest))
    ids, logits, tail_logits = top.ids, top.logits, top.tail_logits
    in_top = (ids == sampled).any(-1, keepdim=True)
    outside = torch.where(in_top, rest, torch.logaddexp(rest, sampled_logit))

    # A slot is used while it and everything after it hold more than the threshold, summed from the smallest up.
    probs = torch.softmax(torch.cat([logits, outside], -1), -1)
    remaining = probs.flip(-1).cumsum(-1).flip(-1)[..., :-1]
    used = (remaining > mass_threshold) if mass_threshold > 0 else torch.ones_like(remaining, dtype=torch.bool)
    used &= ids >= 0

    slots = torch.arange(ids.shape[-1], device=ids.device)
    last = used.sum(-1, keepdim=True).clamp(max=ids.shape[-1] - 1)
    takes_last = ~(used & (ids == sampled)).any(-1, keepdim=True) & (slots == last)
    dropped = (~used | takes_last) & (ids != sampled)
    tail = torch.logsumexp(torch.cat([rest, tail_logits.masked_fill(~dropped, -torch.inf)], -1), -1, keepdim=True)

    ids = torch.where(takes_last, sampled, ids.masked_fill(~used, -1))
    logits = torch.where(takes_last, sampled_logit, logits.masked_fill(~used, -torch.inf))
    # Normalised with the operations of a step, so that equal policies are equal to the last digit.
    outcomes = torch.log_softmax(torch.cat([logits, tail], -1), -1)
    log_probs = outcomes[..., :-1].masked_fill(ids < 0, -torch.inf)
    return ids, log_probs, outcomes[..., -1], (ids == sampled).to(torch.uint8).argmax(-1)


@torch.no_grad()
def capture_top(
    token_ids: Tensor,
    log_probs: Tensor,
    sampled_ids: Tensor,
    sampled_log_probs: Tensor,
    vocab_size: int,
    *,
    top_k: int = 64,
    mass_threshold: float = 1e-5,
    truncated: bool = False,
    temperature: float | None = None,
) -> SparsePolicy:
    """Makes the old policy from an inference engine's largest log-probabilities, without gradient.

    The result is the policy that `capture` would make from the engine's logits. The tail's mass is 1 minus the sum of
    the entries, since an engine does not report it: at least 1e-12, so that rounding never makes it 0, and absent if
    the entries are the whole vocabulary. Entries whose sum exceeds 1 by rounding are renormalised.

    Args:
        token_ids: (..., M) integers in [0, V), different in a row and in any order; −1 in unused entries.
        log_probs: Their log-probabilities, (..., M), in nats, under the distribution that was sampled from: at its
            temperature, and truncated only with `truncated`. Unused entries may hold anything.
        sampled_ids: The sampled tokens, (...); they may be among the entries or not.
        sampled_log_probs: Their log-probabilities, (...), in nats. If a token is among the entries, its entry counts.
        vocab_size: V, the tokens in the vocabulary.
        top_k: K, at least 1: entries beyond the K largest count only for the tail.
        mass_threshold: δ in [0, 1): fewer tokens are kept where they already cover 1 − δ of the mass.
        truncated: Whether the sampler could draw only the entries with finite log-probabilities, because of top-p or
            similar settings. The policy is then on these, without a tail, and δ has no effect.
        temperature: The engine's sampling temperature, which the step is compared with; None compares nothing.

    Raises:
        ValueError: If shapes or dtypes are wrong, ids are outside the vocabulary, a token occurs twice, parameters are
            out of their range, the entries are NaN or add up to more than 1.01 and so cannot be log-probabilities, or,
            with `truncated`, there are more than K or they add up to less than 0.99.
    """
    _check_entries(token_ids, log_probs, sampled_ids, sampled_log_probs, vocab_size)
    check_capture(top_k, mass_threshold)
    shape, entries = sampled_ids.shape, token_ids.shape[-1]
    ids, sampled = token_ids.long().reshape(-1, entries), sampled_ids.long().reshape(-1)
    z, sampled_z = as_float(log_probs).reshape(-1, entries), as_float(sampled_log_probs).reshape(-1, 1)
    # The sampled token becomes one of the entries.
    if truncated:
        ids = ids.masked_fill(z == -torch.inf, -1)
    known = (ids == sampled.unsqueeze(-1)).any(-1)
    ids = torch.cat([ids, sampled.masked_fill(known, -1).unsqueeze(-1)], -1)
    used = ids >= 0
    z = torch.cat([z, sampled_z], -1).masked_fill(~used, -torch.inf)
    # In float64, since with a sum close to 1 in float32 the rest would have an error of 1e-7.
    covered = torch.logsumexp(z.double(), -1, keepdim=True)
    ids, z = sorted_by_id(ids, z, vocab_size)
    check_distinct("token_ids", ids, are_sorted=True)
    if bool((~(covered.exp() <= LARGEST_TOTAL)).any()):  # also NaN
        total = covered.exp().max().item()
        raise ValueError(f"log_probs must be log-probabilities, got some that add up to {total:.3g}")
    kept = used.sum(-1, keepdim=True)
    if truncated and bool(((covered.exp() < SMALLEST_TOTAL) | (kept > top_k)).any()):
        total, most = covered.exp().min().item(), int(kept.max())
        raise ValueError(
            f"log_probs must be all that the sampler could draw, at most top_k={top_k} tokens (in a trainer "
            f"support_top_k: raise it, or truncate more), got up to {most} tokens, and some that add up to {total:.3g}"
        )
    left = (-torch.expm1(covered)).clamp(min=PROBABILITY_FLOOR).log().to(z.dtype)
    left = left.masked_fill(kept == vocab_size, -torch.inf)
    if truncated:
        left, mass_threshold = torch.full_like(left, -torch.inf), 0.0

    k = min(top_k, vocab_size)
    nowhere = torch.full_like(z[:, 0], -torch.inf)
    top = largest(ids, z, z, sampled, nowhere, left, min(k, entries + 1))
    empty = (0, k - top.ids.shape[-1])
    logits = torch.nn.functional.pad(top.logits, empty, value=-torch.inf)
    top = top._replace(ids=torch.nn.functional.pad(top.ids, empty, value=-1), logits=logits, tail_logits=logits)
    slots = slots_in_order(top, sampled, vocab_size, mass_threshold)
    return SparsePolicy(*slots, vocab_size, mass_threshold, truncated, temperature).view(shape)


def _check_entries(
    token_ids: Tensor, log_probs: Tensor, sampled_ids: Tensor, sampled_log_probs: Tensor, vocab_size: int
) -> None:
    for name, ids in (("token_ids", token_ids), ("sampled_ids", sampled_ids)):
        check_integers(name, ids)
    for name, values in (("log_probs", log_probs), ("sampled_log_probs", sampled_log_probs)):
        check_floating(name, values)
    check_shape("sampled_log_probs", sampled_log_probs, sampled_ids.shape)
    for name, tensor in (("token_ids", token_ids), ("log_probs", log_probs)):
        if tensor.dim() == 0 or tensor.shape[-1] == 0 or tensor.shape != (*sampled_ids.shape, token_ids.shape[-1]):
            expected = shape_text((*sampled_ids.shape, "M"))
            raise ValueError(f"{name} must be {expected}, with one M of at least 1, got {shape_text(tensor.shape)}")
    check_tokens_in("sampled_ids", sampled_ids, vocab_size)
    check_tokens_in("token_ids", token_ids, vocab_size, or_unused=True)
