"""Capturing a policy: the largest logits of every token, from any source."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.trust_region.kernels import MAX_SELECTED
from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, check_capture
from troll.trust_region.policy.top import Top, check_tokens_in, keep, largest_with_sampled
from troll.trust_region.policy.values import check_integers, check_shape, float_dtype
from troll.trust_region.reading.fold import Outside, rows_of
from troll.trust_region.reading.logits import Logits
from troll.trust_region.reading.source import Source
from troll.trust_region.reading.vocabulary import Vocabulary


@torch.no_grad()
def capture(
    source: Source | Outcomes | Tensor, token_ids: Tensor, *, top_k: int = 64, mass_threshold: float = 1e-5
) -> SparsePolicy:
    """Captures the old policy, the network when a rollout is scored, without gradient.

    It keeps the `top_k` most likely tokens, fewer where they already cover `1 − mass_threshold` of the mass, and always
    the sampled token, which takes the last used slot if the others lack it.

    Args:
        source: Logits (..., V) that are aligned with `token_ids` and divided by the sampling temperature; or any
            source: [Logits][troll.Logits], [LMHead][troll.LMHead], or outcomes that have been read and hold the sampled
            tokens. Outcomes that are dropped count with the precision with which they were read.
        token_ids: The sampled tokens, (...), integers in [0, V). A GPU is not waited for: a position with an id outside
            the vocabulary becomes NaN there, and the metrics count it as "nonfinite".
        top_k: K, the tokens to keep at most, at least 1; V if it is larger than V.
        mass_threshold: δ in [0, 1); 0 always keeps K tokens.

    Raises:
        ValueError: If a shape or dtype is wrong, an id is outside the vocabulary, a parameter is out of its range, or
            slices of the vocabulary differ in size.
    """
    source = Logits(source) if isinstance(source, Tensor) else source
    vocab_size = source.vocab_size if isinstance(source, Outcomes) else source.vocabulary.size
    sampled = _checked(token_ids, source.shape, vocab_size, top_k, mass_threshold)
    top = _given(source, sampled, top_k) if isinstance(source, Outcomes) else _top(source, sampled, top_k)[0]
    return keep(top, sampled, vocab_size, mass_threshold).view(token_ids.shape)


@torch.no_grad()
def capture_with_entropy(
    source: Source, token_ids: Tensor, *, top_k: int, mass_threshold: float
) -> tuple[SparsePolicy, Tensor]:
    """[capture][troll.capture], and the entropy over the whole vocabulary, (...), in nats, in the same pass.

    Args:
        source: Logits of any source, as in `capture`, but not outcomes.
        token_ids: The sampled tokens, (...), as in `capture`.
        top_k: K, at least 1.
        mass_threshold: δ in [0, 1).

    Raises:
        ValueError: As `capture`.
    """
    vocab_size = source.vocabulary.size
    sampled = _checked(token_ids, source.shape, vocab_size, top_k, mass_threshold)
    top, entropy = _top(source, sampled, top_k, entropy=True)
    assert entropy is not None
    return keep(top, sampled, vocab_size, mass_threshold).view(token_ids.shape), entropy.view(token_ids.shape)


def _checked(token_ids: Tensor, shape: torch.Size, vocab_size: int, top_k: int, mass_threshold: float) -> Tensor:
    """The sampled tokens, (N,) int64, after checking all arguments."""
    check_capture(top_k, mass_threshold)
    check_integers("token_ids", token_ids)
    check_shape("token_ids", token_ids, shape)
    sampled = token_ids.long().reshape(-1)
    if sampled.device.type == "cpu":
        check_tokens_in("token_ids", sampled, vocab_size)
    return sampled


def _top(source: Source, sampled: Tensor, top_k: int, entropy: bool = False) -> tuple[Top, Tensor | None]:
    """The largest logits of a source, the sampled tokens' and the log-sum-exp of all others; and the entropy, (N,)."""
    with source.opened(top_k, MAX_SELECTED) as reading:
        k = min(top_k, reading.vocabulary.width)
        logits = sampled.new_full((len(sampled), k + 1), -torch.inf, dtype=float_dtype(reading.dtype))
        outside, tiles = Outside.empty(logits, entropy), []
        for rows, _, tile in reading.parts(whole_rows=True):
            support = reading.functions.select(tile, sampled[rows], k)
            reading.functions.fold_support(tile, support, logits[rows], rows_of(outside, rows))
            tiles.append(support.ids)
        ids = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        exact, log_rest = reading.exact(ids), outside.log_sum
        precise = logits if exact is None else exact
        # The sampled token is in the last slot, or among the others.
        top = Top(ids[:, :k], precise[:, :k], logits[:, :k], precise[:, k], log_rest)
        merged = reading.vocabulary.merge_top(top, sampled, min(top_k, reading.vocabulary.size))
        own = Outcomes(ids, precise, log_rest, reading.vocabulary.width, outside.entropy)
        return merged, _entropy(own, reading.vocabulary) if entropy else None


def _entropy(own: Outcomes, vocabulary: Vocabulary) -> Tensor:
    """The entropy over the vocabulary, (N,), from the outcomes of this process's slice of it."""
    total, entropy = torch.logsumexp(torch.cat([own.logits, own.tail_logit.unsqueeze(-1)], -1), -1), own.entropy
    assert entropy is not None
    _, totals, entropies = vocabulary.merge_support(own.logits[:, :0], own.token_ids[:, :0], total, entropy)
    log_weight = torch.log_softmax(totals, -1)
    # A slice without mass, of padding, has no entropy of its own.
    return torch.where(log_weight == -torch.inf, 0.0, log_weight.exp() * (entropies - log_weight)).sum(-1)


def _given(policy: Outcomes, sampled: Tensor, top_k: int) -> Top:
    """As `_top`, from a policy that has been read already."""
    slots = policy.token_ids.shape[-1]
    ids, z = policy.token_ids.long().reshape(-1, slots), policy.logits.reshape(-1, slots)
    is_sampled = ids == sampled.unsqueeze(-1)
    if not bool(is_sampled.any(-1).all()):
        token = sampled[~is_sampled.any(-1)][0].item()
        raise ValueError(f"token_ids must be among the tokens that the source was read at, got {token}")
    return largest_with_sampled(ids, z, sampled, policy.tail_logit.reshape(-1, 1), policy.vocab_size, min(top_k, slots))
