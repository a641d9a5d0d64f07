"""Capturing a policy: the largest logits of every token, from any source."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_integers, check_shape, check_tokens_in
from ..kernels import MAX_SELECTED
from ..policy.on_support import PolicyOnSupport
from ..policy.sparse import SparsePolicy, check_capture
from ..policy.top import Top, largest_of_policy, policy_from_top
from ..policy.truncation import Truncation
from ..probabilities import float_dtype
from .logits import Logits
from .source import LogitsSource
from .tiles import TailSums, rows_of
from .vocabulary import Vocabulary


def capture(
    source: LogitsSource | PolicyOnSupport | Tensor,
    token_ids: Tensor,
    *,
    top_k: int = 64,
    mass_threshold: float = 1e-5,
    truncation: Truncation | None = None,
) -> SparsePolicy:
    """Captures the old policy, that of the network when a rollout is scored, without gradient.

    The `top_k` most likely tokens are kept, fewer where they already cover `1 − mass_threshold` of the mass, and always
    the sampled token, which takes the last used slot if it is not among the most likely ones.

    Args:
        source: Logits (..., V) that are aligned with `token_ids` and divided by the sampling temperature; or any
            source: [Logits][troll.Logits], [LMHead][troll.LMHead], or a policy that has been read and contains the
            sampled tokens. Its tokens that are dropped count with the precision of their reading.
        token_ids: The sampled tokens, (...), integers in [0, V). On a GPU, where checking would need a host sync, a
            position with an id outside the vocabulary becomes NaN, and the metrics count it as "nonfinite".
        top_k: K ≥ 1, the largest number of tokens to keep; V if it is larger than V.
        mass_threshold: δ in [0, 1); 0 always keeps K tokens.
        truncation: The sampler's truncation, or None. The policy is then on the sampler's kept set, renormalised and
            without a tail. It has as many slots as the largest kept set, regardless of K and δ; finding that size needs
            a host sync. See [Truncation][troll.Truncation].

    Raises:
        ValueError: If a shape or dtype is wrong, an id is outside the vocabulary, a parameter is out of its range,
            slices of the vocabulary differ in size, or a policy that has been read lacks tokens that the sampler keeps.
    """
    source = Logits(source, temperature=None) if isinstance(source, Tensor) else source
    if truncation is None:  # one call fewer to the kernels
        return _one_pass(source, token_ids, top_k, mass_threshold, entropy=False)[0]
    return captured(source, token_ids, top_k=top_k, mass_threshold=mass_threshold, truncation=truncation).policy


class CaptureResult(NamedTuple):
    """What a capture finds at token positions (...)."""

    policy: SparsePolicy
    """The old policy, as `capture` returns it."""
    entropy: Tensor | None
    """The entropy over the whole vocabulary, (...), in nats; None unless it was requested."""
    added: Tensor | None
    """(...) bool, true where the sampled token was added to the sampler's kept set; None without a truncation."""


@torch.no_grad()
def captured(
    source: LogitsSource | PolicyOnSupport,
    token_ids: Tensor,
    *,
    top_k: int,
    mass_threshold: float,
    truncation: Truncation | None = None,
    entropy: bool = False,
) -> CaptureResult:
    """Captures as `capture` does, with its arguments and errors; with `entropy`, computes that in the same pass.

    A source that is a policy that has been read gives no entropy.
    """
    if truncation is None:
        policy, entropies = _one_pass(source, token_ids, top_k, mass_threshold, entropy)
        return CaptureResult(policy, entropies, None)
    # One slot may hold a sampled token that is less likely than others outside, and one more shows that there is room.
    first, entropies = _one_pass(source, token_ids, max(top_k, truncation.top_k + 2), 0.0, entropy)
    policy, sampled = first.view((first.shape.numel(),)), token_ids.reshape(-1)
    full = truncation.exceeds(policy).nonzero().squeeze(-1)
    while len(full):  # where the kept set may need more slots
        larger, _ = _one_pass(source.at(full), sampled[full], 4 * policy.top_k, 0.0, entropy=False)
        if larger.used.sum() == policy[full].used.sum():
            raise ValueError("source must hold all tokens that the sampler keeps, and was read at fewer")
        policy = policy.with_positions(full, larger)
        full = full[truncation.exceeds(larger)]
    policy, added = truncation.restrict(policy.view(first.shape))
    return CaptureResult(policy, entropies, added)


@torch.no_grad()
def _one_pass(
    source: LogitsSource | PolicyOnSupport, token_ids: Tensor, top_k: int, mass_threshold: float, entropy: bool
) -> tuple[SparsePolicy, Tensor | None]:
    """The whole policy, in K slots; and the entropy, (...), if it is requested."""
    check_capture(top_k, mass_threshold)
    check_integers("token_ids", token_ids)
    check_shape("token_ids", token_ids, source.shape)
    vocab_size = source.vocab_size if isinstance(source, PolicyOnSupport) else source.vocabulary.size
    sampled = token_ids.long().reshape(-1)
    if sampled.device.type == "cpu":
        check_tokens_in("token_ids", sampled, vocab_size)
    if isinstance(source, PolicyOnSupport):
        top, entropies = largest_of_policy(source, sampled, top_k), None
    else:
        top, entropies = _largest_of_source(source, sampled, top_k, entropy)
    old = policy_from_top(top, sampled, vocab_size, mass_threshold).view(token_ids.shape)
    old = dataclasses.replace(old, temperature=None if source.temperature is None else float(source.temperature))
    return old, None if entropies is None else entropies.view(token_ids.shape)


def _largest_of_source(source: LogitsSource, sampled: Tensor, top_k: int, entropy: bool) -> tuple[Top, Tensor | None]:
    """The largest logits of a source, the sampled tokens' and the log-sum-exp of all others; and the entropy, (N,)."""
    with source.reading(source.tile_class(top_k, MAX_SELECTED)) as reading:
        k = min(top_k, reading.vocabulary.width)
        logits = sampled.new_full((len(sampled), k + 1), -torch.inf, dtype=float_dtype(reading.dtype))
        outside, selected = TailSums.empty(logits, entropy), []
        for tile in reading.tiles(whole_rows=True):
            sums = rows_of(outside, tile.rows)
            selected.append(tile.select(sampled[tile.rows], k, logits[tile.rows], sums))
        ids = selected[0] if len(selected) == 1 else torch.cat(selected)
        exact, log_rest = reading.exact(ids), outside.log_sum
        precise = logits if exact is None else exact
        # The sampled token is in the last slot, or among the others.
        top = Top(ids[:, :k], precise[:, :k], logits[:, :k], precise[:, k], log_rest)
        merged = reading.vocabulary.merge_top(top, sampled, min(top_k, reading.vocabulary.size))
        own = PolicyOnSupport(ids, precise, log_rest, reading.vocabulary.width, outside.entropy)
        return merged, _entropy(own, reading.vocabulary) if entropy else None


def _entropy(own: PolicyOnSupport, vocabulary: Vocabulary) -> Tensor:
    """The entropy over the vocabulary, (N,), from the outcomes of this process's slice of it."""
    total, entropy = torch.logsumexp(torch.cat([own.logits, own.tail_logit.unsqueeze(-1)], -1), -1), own.entropy
    assert entropy is not None
    # Only the two numbers of each slice are exchanged, so the support has no slots.
    _, totals, entropies = vocabulary.merge_support(own.logits[:, :0], own.token_ids[:, :0], total, entropy)
    log_weight = torch.log_softmax(totals, -1)
    # A slice with only padding has no mass and no entropy.
    return torch.where(log_weight == -torch.inf, 0.0, log_weight.exp() * (entropies - log_weight)).sum(-1)
