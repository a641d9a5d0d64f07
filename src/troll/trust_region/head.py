"""The LM head, from hidden states to what a sparse policy needs, in tiles: never a (tokens x vocabulary) tensor.

A tile is the logits of some tokens for a slice of the vocabulary. Forward and backward make each tile, fold it into
per-token numbers, and drop it; the backward makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from troll.trust_region.support import Top, nan_unless_finite, top_ids

#: Tokens and vocabulary entries of a tile.
TOKEN_TILE, VOCABULARY_TILE = 4096, 32768

#: The K blocks with the largest maxima contain the K largest logits, so only those are sorted.
BLOCK = 64


@dataclass(frozen=True)
class Head:
    """An LM head, ``logits = softcap · tanh(logit_scale · (hidden @ weight.T + bias) / softcap) / temperature``.

    Attributes:
        weight: (V, H).
        bias: (V,), or None.
        temperature: The sampling temperature.
        logit_scale: 1 for most models; Cohere's and Granite's multiply or divide their logits.
        softcap: None for most models; Gemma 2 has one.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.weight.shape[0]

    def check(self, hidden: Tensor, positions: Tensor) -> None:
        """Raises ValueError unless the head fits hidden states (..., H) of the given token positions (...)."""
        if self.weight.dim() != 2 or not len(self.weight):
            raise ValueError(f"lm_head_weight must be (V, H), got {tuple(self.weight.shape)}")
        expected = (*positions.shape, self.weight.shape[1])
        if hidden.shape != expected or not hidden.is_floating_point():
            raise ValueError(f"hidden must be floating point {expected}, got {hidden.dtype} {tuple(hidden.shape)}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias must be {tuple(self.weight.shape[:1])}, got {tuple(self.bias.shape)}")
        for name in ("temperature", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    def logits(self, product: Tensor) -> Tensor:
        """Logits in float32 (float64 for float64) from ``hidden @ weight.T + bias``; may reuse its memory."""
        z = product if product.dtype == torch.float64 else product.float()
        if self.logit_scale != 1.0:
            z = z.mul_(self.logit_scale)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def product_grad_(self, grad: Tensor, z: Tensor) -> Tensor:
        """The gradient with respect to the product, in place, from that with respect to the logits z."""
        if self.softcap is not None:
            grad.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        factor = self.logit_scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


def _tiles(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _product(hidden: Tensor, head: Head, columns: slice) -> Tensor:
    product = hidden @ head.weight[columns].to(hidden.dtype).t()
    return product if head.bias is None else product.add_(head.bias[columns].to(product.dtype))


def top_from_hidden(hidden: Tensor, head: Head, token_ids: Tensor, k: int) -> Top:
    """The K largest logits of each token, the sampled one's, and the log-sum-exps that normalise them.

    The same as a stable descending sort of the full logits, ties included. Whatever leaves the running top K is
    added to the log-sum-exp of the rest, so that no mass is ever the difference of two.

    Args:
        hidden: (N, H).
        head: With V entries.
        token_ids: The sampled tokens, (N,).
        k: At most V.
    """
    parts = [_top_of_tile_row(hidden[rows], head, token_ids[rows], k) for rows in _tiles(len(hidden), TOKEN_TILE)]
    if not parts:
        parts = [_top_of_tile_row(hidden, head, token_ids, k)]
    return Top(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _top_of_tile_row(hidden: Tensor, head: Head, token_ids: Tensor, k: int) -> Top:
    values = hidden.new_empty((len(hidden), 0), dtype=_float_dtype(hidden))
    ids = token_ids.new_empty((len(hidden), 0), dtype=torch.int64)
    sampled = token_ids.long().unsqueeze(-1)
    sampled_logit = rest = values.new_full((len(hidden), 1), -torch.inf)
    for columns in _tiles(len(head.weight), VOCABULARY_TILE):
        z = head.logits(_product(hidden, head, columns))
        # The sampled token is set aside, and the k largest of the others found.
        local = sampled - columns.start
        inside, local = (local >= 0) & (local < z.shape[-1]), local.clamp(0, z.shape[-1] - 1)
        here = z.gather(-1, local)
        sampled_logit = torch.where(inside, here, sampled_logit)
        z.scatter_(-1, local, torch.where(inside, -torch.inf, here))

        best = _top_of_tile(z, min(k, z.shape[-1]))
        values = torch.cat([values, z.gather(-1, best)], dim=-1)
        ids = torch.cat([ids, best + columns.start], dim=-1)
        rest = torch.logaddexp(rest, torch.logsumexp(z.scatter_(-1, best, -torch.inf), dim=-1, keepdim=True))
        # Earlier tiles have smaller ids, so a stable sort keeps the order among equals.
        values, order = values.sort(dim=-1, descending=True, stable=True)
        ids, evicted = ids.gather(-1, order)[:, :k], values[:, k:]
        values = values[:, :k]
        if evicted.shape[-1]:
            rest = torch.logaddexp(rest, torch.logsumexp(evicted, dim=-1, keepdim=True))

    # The sampled token was masked out of its tile and may stand among the k as −inf: it returns with its own logit.
    values = torch.where(ids == sampled, sampled_logit, values)
    known = (ids == sampled).any(-1, keepdim=True)
    ids = torch.cat([ids, torch.where(known, len(head.weight), sampled)], dim=-1)
    values = torch.cat([values, sampled_logit.masked_fill(known, -torch.inf)], dim=-1)
    total = torch.logsumexp(torch.cat([rest, values], dim=-1), dim=-1, keepdim=True)

    by_id = ids.argsort(dim=-1)
    by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids, values = ids.gather(-1, by_id).gather(-1, by_value.indices), by_value.values
    last = values[:, k:].masked_fill(ids[:, k:] == sampled, -torch.inf)
    return Top(ids[:, :k], values[:, :k], sampled_logit, nan_unless_finite(total), torch.logaddexp(rest, last))


def _top_of_tile(z: Tensor, k: int) -> Tensor:
    """Like `top_ids`, by way of the blocks with the largest maxima."""
    blocks = z.shape[-1] // BLOCK
    if blocks <= 2 * k:
        return top_ids(z, k)
    maxima = z[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1)
    # Candidates in the order of their ids, so that the smaller position is the smaller id.
    chosen = top_ids(maxima, k).sort(dim=-1).values
    candidates = (chosen.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(-2)
    beyond = torch.arange(blocks * BLOCK, z.shape[-1], device=z.device)
    candidates = torch.cat([candidates, beyond.expand(len(z), -1)], dim=-1)
    return candidates.gather(-1, top_ids(z.gather(-1, candidates), k))


def _float_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def log_probs_on_support_from_hidden(hidden: Tensor, head: Head, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`log_probs_on_support` of the head's logits, differentiable in the hidden states and the head.

    The tail is the log-sum-exp over the support's complement, folded tile by tile with the support taken out: it
    resolves any mass that float32 can hold (1e-38), however close to 1 the rest is. Gradients accumulate in float32.

    Args:
        hidden: (N, H).
        head: With V entries.
        token_ids: (N, K), different ids; −1 in unused slots.

    Returns:
        (N, K), −inf in unused slots, and (N,), −inf where no other token is left.
    """
    log_probs, tail_log_prob = _OnSupportFromHidden.apply(
        hidden, head.weight, head.bias, token_ids, head.temperature, head.logit_scale, head.softcap
    )
    return log_probs, tail_log_prob


class _OnSupportFromHidden(torch.autograd.Function):
    """Forward in one pass over the tiles; backward in another, with the gradient of `_OnSupport` on each tile."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        logit_scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, temperature, logit_scale, softcap)
        used = token_ids >= 0
        on_support = hidden.new_full(token_ids.shape, -torch.inf, dtype=_float_dtype(hidden))
        outside = on_support.new_full((len(hidden), 1), -torch.inf)
        for rows in _tiles(len(hidden), TOKEN_TILE):
            for columns in _tiles(len(weight), VOCABULARY_TILE):
                z = head.logits(_product(hidden[rows], head, columns))
                at, slot, column = _entries(token_ids[rows], columns)
                on_support[rows][at, slot] = z[at, column]
                z[at, column] = -torch.inf
                outside[rows] = torch.logaddexp(outside[rows], torch.logsumexp(z, dim=-1, keepdim=True))
        total = torch.logsumexp(torch.cat([on_support, outside], dim=-1), dim=-1, keepdim=True)
        total = nan_unless_finite(total)
        log_probs = (on_support - total).masked_fill(~used, -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_probs, total, outside)  # type: ignore[arg-type]
        ctx.transform = (temperature, logit_scale, softcap)  # type: ignore[attr-defined]
        return log_probs, (outside - total).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_tail: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, log_probs, total, outside = ctx.saved_tensors
        head = Head(weight, bias, *ctx.transform)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = _float_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if wants_bias and bias is not None else None

        broken = total.isnan()  # no distribution, and no gradient
        grad_log_probs = grad_log_probs.masked_fill((token_ids < 0) | broken, 0)
        grad_tail = grad_tail.unsqueeze(-1).masked_fill((outside == -torch.inf) | broken, 0)
        sum_of_grads = grad_log_probs.sum(-1, keepdim=True) + grad_tail
        on_support = grad_log_probs - log_probs.exp().masked_fill(broken, 0) * sum_of_grads
        in_tail = outside.masked_fill(outside == -torch.inf, 0)

        for rows in _tiles(len(hidden), TOKEN_TILE):
            for columns in _tiles(len(weight), VOCABULARY_TILE):
                z = head.logits(_product(hidden[rows], head, columns))
                at, slot, column = _entries(token_ids[rows], columns)
                grad = torch.exp(z - total[rows]).mul_(-sum_of_grads[rows])
                grad.addcmul_(torch.exp(z - in_tail[rows]), grad_tail[rows])
                grad[at, column] = on_support[rows][at, slot]
                grad.masked_fill_(broken[rows], 0)
                grad = head.product_grad_(grad, z)
                if grad_hidden is not None:
                    grad_hidden[rows].addmm_(grad, weight[columns].to(dtype))
                if grad_weight is not None:
                    grad_weight[columns].addmm_(grad.t(), hidden[rows].to(dtype))
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _entries(token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Row, slot and local column of every support token that lies in a tile."""
    local = token_ids - columns.start
    at, slot = ((local >= 0) & (token_ids < columns.stop) & (token_ids >= 0)).nonzero(as_tuple=True)
    return at, slot, local[at, slot]
