"""Makes the record of a response's old policies from an inference engine's rows of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

import numpy as np
import torch
from torch import Tensor

from troll import PackedPolicy, SparsePolicy
from troll.trust_region.checks import check_tokens_in
from troll.trust_region.policy.sparse import check_capture
from troll.trust_region.policy.top import LARGEST_TOTAL, SMALLEST_TOTAL, Top, slots_in_order
from troll.trust_region.probabilities import PROBABILITY_FLOOR
from troll.verl.records import from_records, to_record, without_policies


def old_policy_record(
    token_ids: Tensor,
    log_probs: Tensor,
    *,
    vocab_size: int,
    top_k: int,
    mass_threshold: float,
    truncated: bool = False,
    temperature: float | None = None,
) -> Tensor:
    """Makes the record of one completion's old policies, for the extra field `old_policies` of a rollout's output.

    These are the policies of [capture_top][troll.capture_top], without its sort, since the entries are already in
    order. Of tokens with equal log-probabilities, those that come first in the engine's order are among the K, and
    then δ keeps the smaller ids.

    Args:
        token_ids: (T, 1 + M) integers, in vLLM's order: the sampled token, then the M most likely ones, most likely
            first. The sampled token may be among those.
        log_probs: (T, 1 + M) float32, their log-probabilities in nats, under the distribution that was sampled from.
        vocab_size: V, the size of the vocabulary.
        top_k: K, the most tokens that are kept; M may be smaller or larger.
        mass_threshold: δ, in [0, 1): fewer than K tokens are kept where they hold 1 − δ of the mass.
        truncated: Whether the finite log-probabilities are those of all tokens that the sampler could draw, after top-p
            or top-k. The policy is then on these, without a tail, and δ has no effect.
        temperature: The temperature of the sampler, which an update compares with its own; None compares nothing.

    Returns:
        The record, (R,) int32: its length depends on how many tokens are kept.

    Raises:
        ValueError: If the shapes differ, the numbers are not log-probabilities in descending order, kept tokens are
            outside the vocabulary, or, with `truncated`, there are more than K or they add up to less than 0.99.
    """
    check_capture(top_k, mass_threshold)
    if token_ids.dim() != 2 or token_ids.shape != log_probs.shape or token_ids.shape[1] < 2:
        raise ValueError(
            f"token_ids and log_probs must be (T, 1 + M) with one M of at least 1, got {tuple(token_ids.shape)} and "
            f"{tuple(log_probs.shape)}"
        )
    check_tokens_in("token_ids", token_ids[:, 0], vocab_size)
    top_k, mass_threshold = min(top_k, vocab_size), 0.0 if truncated else mass_threshold
    sampled = token_ids[:, 0].long()
    top = _top(token_ids[:, 1:].long(), log_probs[:, 1:].float(), sampled, log_probs[:, 0].float(), vocab_size, top_k)
    if truncated:
        top = _complete(top, sampled, top_k)
    slots = slots_in_order(top, sampled, vocab_size, mass_threshold)
    policy = PackedPolicy.of(SparsePolicy(*slots, vocab_size, mass_threshold, truncated, temperature))
    check_tokens_in("token_ids", policy.token_ids, vocab_size)
    return to_record(policy)


def _top(ids: Tensor, log_probs: Tensor, sampled: Tensor, own: Tensor, vocab_size: int, top_k: int) -> Top:
    """The first K of M reported entries in the order of slots, in which equally likely tokens are in that of their ids.

    Args:
        ids: (T, M), the most likely tokens, most likely first.
        log_probs: (T, M), their log-probabilities.
        sampled: (T,), the sampled tokens.
        own: (T,), their log-probabilities.
        vocab_size: V.
        top_k: K.
    """
    ids, log_probs = ids[:, :top_k], log_probs[:, :top_k]
    falls = log_probs[:, 1:] < log_probs[:, :-1]
    if bool((log_probs[:, 1:] > log_probs[:, :-1]).any()):
        raise ValueError("log_probs must be in descending order after the sampled token's")
    among = (ids == sampled.unsqueeze(-1)).any(-1)
    own = own.masked_fill(among, -torch.inf)
    # In float64, since with a sum close to 1 in float32 the rest would have an error of 1e-7.
    total = log_probs.double().exp().sum(-1) + own.double().exp()
    if not bool((total <= LARGEST_TOTAL).all()):
        raise ValueError(f"log_probs must be log-probabilities, got some that add up to {total.max().item():.3g}")
    rest = (1 - total).clamp(min=PROBABILITY_FLOOR).log().float()
    rest = rest.masked_fill(ids.shape[1] + (~among).int() == vocab_size, -torch.inf)
    keys = torch.nn.functional.pad(falls, (1, 0)).cumsum(-1) << 32 | ids
    ids = torch.from_numpy(np.sort(keys.numpy(), axis=-1)) & 0xFFFFFFFF  # NumPy's sort of integers is the faster one
    empty = (0, top_k - ids.shape[1])
    ids, log_probs = (torch.nn.functional.pad(x, empty, value=fill) for x, fill in ((ids, -1), (log_probs, -torch.inf)))
    return Top(ids, log_probs, log_probs, own, rest)


def _complete(top: Top, sampled: Tensor, top_k: int) -> Top:
    """The entries of a truncated rollout, which have no tail.

    Raises:
        ValueError: If these are not all tokens that it could sample.
    """
    kept = top.logits > -torch.inf
    added = ~((top.ids == sampled.unsqueeze(-1)) & kept).any(-1)  # the sampled token takes a slot, too
    total = torch.cat([top.logits, top.sampled_logit.unsqueeze(-1)], -1).double().exp().sum(-1)
    most = int((kept.sum(-1) + added).max()) if len(kept) else 0
    if not bool((total >= SMALLEST_TOTAL).all()) or most > top_k:
        raise ValueError(
            f"log_probs must be of all tokens that a truncated rollout could sample, at most top_k={top_k}, got up to "
            f"{most} tokens, and some that add up to {total.min().item():.3g}"
        )
    none = torch.full_like(top.log_rest, -torch.inf)
    return top._replace(ids=top.ids.masked_fill(~kept, -1), log_rest=none)


@dataclass(frozen=True)
class Turn:
    """One call of the inference engine for a sample.

    Attributes:
        prompt_ids: The tokens that the engine was given: the prompt, and everything after it so far.
        token_ids: The tokens that it sampled.
        record: The old policies of the sampled tokens.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    record: Tensor


def response_record(prompt_ids: Sequence[int], response_ids: Sequence[int], turns: Sequence[Turn]) -> Tensor:
    """Makes the record of a whole response, in which an engine sampled some tokens in one or more turns.

    A turn is used as far as the response has the sampled tokens after the tokens that the engine was given; tokens that
    were cut off or tokenised again are not used. Positions that no turn reports have no slots.

    Args:
        prompt_ids: The tokens of the sample's prompt.
        response_ids: The tokens of its response, T.
        turns: The calls of the engine that reported.

    Returns:
        A record of T positions.
    """
    sequence, edge = [*prompt_ids, *response_ids], len(prompt_ids)
    matches = []
    for turn in turns:
        start = len(turn.prompt_ids)
        if start >= edge and sequence[:start] == turn.prompt_ids:
            # The length of the longest common beginning.
            length = sum(takewhile(bool, map(eq, turn.token_ids, sequence[start:])))
            matches.append((start - edge, length, turn.record))
    # Of turns that begin at the same token, the longest.
    matches.sort(key=lambda match: (match[0], -match[1]))
    parts, end = [], 0
    for start, length, record in matches:
        if start < end or not length:
            continue
        policy = from_records([record])
        if length == len(response_ids) == policy.shape[0]:
            return record
        parts += [without_policies(start - end), to_record(policy[:length])]
        end = start + length
    return to_record(from_records([*parts, without_policies(len(response_ids) - end)]))
