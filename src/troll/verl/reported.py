"""Makes the record of a response's old policies from an inference engine's rows of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq

import numpy as np
import torch
from torch import Tensor

from troll import PackedPolicy
from troll.trust_region.checks import check_tokens_in
from troll.trust_region.policy.sparse import check_capture
from troll.trust_region.policy.top import LARGEST_TOTAL, SMALLEST_TOTAL
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
    order. Of tokens with equal log-probabilities, those that come first in the engine's order are kept.

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
    top_k, mass_threshold = min(top_k, vocab_size), 0.0 if truncated else mass_threshold
    policy = _packed(token_ids.int(), log_probs.float(), vocab_size, top_k, mass_threshold, truncated)
    return to_record(replace(policy, temperature=temperature))


def _packed(
    token_ids: Tensor, log_probs: Tensor, vocab_size: int, top_k: int, mass_threshold: float, truncated: bool
) -> PackedPolicy:
    """The policies that `capture_top` would make: keeps tokens until they cover 1 − δ, and the sampled one."""
    sampled, own = token_ids[:, :1], log_probs[:, :1]
    ids, logs = token_ids[:, 1 : 1 + top_k], log_probs[:, 1 : 1 + top_k]
    if bool((logs[:, 1:] > logs[:, :-1]).any()):
        raise ValueError("log_probs must be in descending order after the sampled token's")
    probs, is_sampled = logs.double().exp(), ids == sampled
    among = is_sampled.any(-1, keepdim=True)
    covered = probs.cumsum(-1)
    total = covered[:, -1:] + own.double().exp().masked_fill(among, 0)
    if not bool((total <= LARGEST_TOTAL).all()):
        raise ValueError(f"log_probs must be log-probabilities, got some that add up to {total.max().item():.3g}")
    everything = ids.shape[1] + (~among).int() == vocab_size
    left = (1 - total).clamp(min=PROBABILITY_FLOOR).masked_fill(everything | truncated, 0)
    whole = total + left

    if truncated:
        used = logs > -torch.inf
    elif mass_threshold > 0:  # a slot is used while it and everything after it hold more than the threshold
        used = whole - covered + probs > mass_threshold * whole
    else:
        used = torch.ones_like(is_sampled)
    counts = used.sum(-1, keepdim=True)
    # The sampled token's own slot, where it is not among the used ones: after them, or the last one's.
    added = ~(used & is_sampled).any(-1, keepdim=True)
    if truncated and not bool(((total >= SMALLEST_TOTAL) & (counts + added.int() <= top_k)).all()):
        raise ValueError(
            f"log_probs must be of all tokens that a truncated rollout could sample, at most top_k={top_k}, got up to "
            f"{int((counts + added.int()).max())} tokens, and some that add up to {total.min().item():.3g}"
        )
    last = counts.clamp(max=top_k - 1)
    kept = used & ~(added & (torch.arange(ids.shape[1]) == last))
    tail = left + probs.masked_fill(kept | is_sampled, 0).sum(-1, keepdim=True)

    own_column = torch.arange(ids.shape[1] + 1) == last.masked_fill(~added, -1)
    kept = torch.nn.functional.pad(kept, (0, 1)) | own_column
    ids = torch.where(own_column, sampled, torch.nn.functional.pad(ids, (0, 1)))[kept]
    logs = torch.where(own_column, own, torch.nn.functional.pad(logs, (0, 1)))[kept]
    counts = kept.sum(-1, dtype=torch.int32)
    check_tokens_in("token_ids", ids, vocab_size)
    starts = counts.cumsum(0) - counts
    ids = _ties_by_id(ids, logs, starts, own_column[kept])
    row = torch.arange(len(counts)).repeat_interleave(counts, output_size=len(ids))
    slot = torch.empty_like(counts)
    (at,) = (ids == sampled.squeeze(-1)[row]).nonzero(as_tuple=True)
    slot[row[at]] = (at - starts[row[at]]).int()
    return PackedPolicy(
        token_ids=ids,
        log_probs=(logs - whole.log().squeeze(-1)[row]).float(),
        counts=counts,
        tail_log_prob=(tail / whole).log().squeeze(-1).float(),
        slot=slot,
        top_k=top_k,
        vocab_size=vocab_size,
        mass_threshold=mass_threshold,
        truncated=truncated,
    )


def _ties_by_id(ids: Tensor, logs: Tensor, starts: Tensor, separate: Tensor) -> Tensor:
    """Ids of packed slots, in ascending order where log-probabilities of one position are equal.

    Args:
        ids: The tokens of the slots, (S,) int32.
        logs: Their log-probabilities, (S,), in descending order within a position.
        starts: The first slot of each position, (T,).
        separate: (S,) bool, slots that stay where they are.
    """
    new = torch.ones_like(separate)
    new[1:] = (logs[1:] != logs[:-1]) | separate[1:]
    new[starts] = True
    if bool((new[1:] | (ids[1:] > ids[:-1])).all()):
        return ids
    keys = (new.cumsum(0) << 32) | ids.long()
    return torch.from_numpy(np.sort(keys.numpy())).int()  # NumPy's sort of integers is the faster one


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
