"""What is done with a tile of logits, some tokens' for a slice of the vocabulary: fold it, or make it a gradient.

A tile comes as the raw product of hidden states and the head's weights, and its memory may be used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from troll.trust_region.support import BLOCK, as_float

#: Where something as large as its operand has to be allocated, so many tokens go at once: memory of that size is kept
#: for the next time, while a whole tile's goes back to the system and returns page by page.
ROWS = 64


class Transform(NamedTuple):
    """From the product to logits, ``softcap · tanh(logit_scale · product / softcap) / temperature``."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """Logits in float32 (float64 for float64); may reuse the product's memory."""
        z = as_float(product)
        if self.logit_scale != 1.0:
            z = z.mul_(self.logit_scale)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """The derivative of the logits with respect to the product, at logits z."""
        factor = self.logit_scale / self.temperature
        if self.softcap is None:
            return factor
        return (1 - (z * (self.temperature / self.softcap)).square_()).mul_(factor)


class Outside(NamedTuple):
    """Running sums over the logits outside a support, relative to their running maximum m. Each (N,).

    Never a difference of two sums: what is taken out is taken out before it is added.
    """

    maximum: Tensor
    exp_sum: Tensor
    """``Σ e^{z − m}``."""
    weighted_sum: Tensor | None = None
    """``Σ e^{z − m} (z − m)``, for the entropy; all its terms have one sign."""

    @classmethod
    def empty(cls, like: Tensor, rows: int, entropy: bool) -> Outside:
        """Before the first tile."""
        zeros = like.new_zeros(rows)
        return cls(torch.full_like(zeros, -torch.inf), zeros, zeros.clone() if entropy else None)

    def rows(self, rows: slice) -> Outside:
        """Some tokens' sums, sharing memory."""
        return Outside(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    @property
    def log_sum(self) -> Tensor:
        """``log Σ e^z``, (N,); −inf where nothing is outside."""
        return self.maximum + self.exp_sum.log()


def fold_support(
    tile: Tensor, first: int, transform: Transform, token_ids: Tensor, on_support: Tensor, outside: Outside
) -> None:
    """Reads a support's logits from a tile and adds all others to the running sums, in place.

    Args:
        tile: Raw products, (N, W); used up.
        first: The vocabulary entry of the first column.
        transform: From products to logits.
        token_ids: (N, K), different ids; −1 in unused slots.
        on_support: (N, K), where the logits of the tokens of this tile are written.
        outside: Of N tokens.
    """
    z = transform(tile)
    at, slot, column = entries(token_ids, first, z.shape[-1])
    on_support[at, slot] = z[at, column]
    z[at, column] = -torch.inf

    maximum = torch.maximum(outside.maximum, z.amax(-1))
    center = maximum.masked_fill(maximum == -torch.inf, 0)
    rescale = torch.exp(outside.maximum - center)
    z.sub_(center.unsqueeze(-1))
    if outside.weighted_sum is None:
        exp_sum = z.exp_().sum(-1)
    else:
        exp_sum, weighted_sum = map(torch.cat, zip(*map(_entropy_sums, z.split(ROWS)), strict=True))
        moved = torch.where(rescale > 0, outside.maximum - center, 0)
        outside.weighted_sum.add_(outside.exp_sum * moved).mul_(rescale).add_(weighted_sum)
    outside.exp_sum.mul_(rescale).add_(exp_sum)
    outside.maximum.copy_(maximum)


def _entropy_sums(z: Tensor) -> tuple[Tensor, Tensor]:
    z.clamp_(min=_log_of_zero(z.dtype))  # −inf · 0 would be NaN
    exp = z.exp()
    with torch.autocast(z.device.type, enabled=False):  # it would compute in half precision
        return exp.sum(-1), torch.bmm(exp.unsqueeze(1), z.unsqueeze(2)).flatten()


def fold_blocks(
    tile: Tensor, first: int, width: int, transform: Transform, token_ids: Tensor, sampled_logit: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Sets the sampled tokens aside and summarises every block of 64 logits.

    Args:
        tile: Raw products, (N, W), W a multiple of 64; used up.
        first: The vocabulary entry of the first column.
        width: Columns that belong to the vocabulary; whatever stands in those after them counts as −inf.
        transform: From products to logits.
        token_ids: The sampled tokens, (N,).
        sampled_logit: (N,), where the logits of those of this tile are written.

    Returns:
        What gives the logits of some columns, (N, M) to (N, M), −inf at the sampled token, as long as the tile's memory
        is left alone; and the blocks' maxima and log-sum-exps, (N, W / 64).
    """
    z = transform(tile)
    z[:, width:] = -torch.inf
    local = token_ids - first
    inside = (local >= 0) & (local < width)
    local = local.clamp(0, width - 1).unsqueeze(-1)
    here = z.gather(-1, local)
    sampled_logit.copy_(torch.where(inside, here.squeeze(-1), sampled_logit))
    z.scatter_(-1, local, here.masked_fill(inside.unsqueeze(-1), -torch.inf))
    blocks = z.unflatten(-1, (-1, BLOCK))
    log_sums = torch.cat([torch.logsumexp(part, dim=-1) for part in blocks.split(ROWS)])
    return lambda columns: z.gather(-1, columns), blocks.amax(-1), log_sums


class TileGradient(NamedTuple):
    """What the gradient with respect to the logits takes per token.

    Outside the support, ``∂L/∂z_v = p̃(v | tail) · outside − entropy_gradient · p̃_v (log p̃_v + H)``.
    """

    log_outside: Tensor
    """(N,), 0 instead of −inf."""
    outside: Tensor
    """(N,), ``a_T − p̃_T Σa``."""
    on_support: Tensor
    """(N, K), the gradient with respect to the support's products, written over the rest."""
    log_total: Tensor
    """(N,)."""
    entropy: Tensor | None
    """H, (N,); None where no gradient arrives through it."""
    entropy_gradient: Tensor | None
    """∂L/∂H, (N,)."""

    def rows(self, rows: slice) -> TileGradient:
        """Some tokens', sharing memory."""
        return TileGradient(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def gradient(tile: Tensor, first: int, transform: Transform, token_ids: Tensor, of: TileGradient) -> Tensor:
    """Turns a tile of products into the gradient with respect to them, (N, W); may reuse its memory.

    Rows that are no distribution, whose `log_total` is NaN, get 0.

    Args:
        tile: Raw products, (N, W); used up.
        first: The vocabulary entry of the first column.
        transform: From products to logits.
        token_ids: (N, K), −1 in unused slots.
        of: See there.
    """
    z = transform(tile)
    slope = transform.slope(z)
    if of.entropy is not None and of.entropy_gradient is not None:
        log_p = (z - of.log_total.unsqueeze(-1)).clamp_(min=_log_of_zero(z.dtype))
        through_entropy = log_p.exp().mul_(log_p.add_(of.entropy.unsqueeze(-1))).mul_(of.entropy_gradient.unsqueeze(-1))
    grad = z.sub_(of.log_outside.unsqueeze(-1)).exp_().mul_(of.outside.unsqueeze(-1))
    if of.entropy is not None:
        grad.sub_(through_entropy)
    grad.mul_(slope)
    at, slot, column = entries(token_ids, first, grad.shape[-1])
    grad[at, column] = of.on_support[at, slot]
    grad[of.log_total.isnan()] = 0
    return grad


def entries(token_ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, slot and local column of every support token that lies in a tile."""
    at, slot = ((token_ids >= max(first, 0)) & (token_ids < first + width)).nonzero(as_tuple=True)
    return at, slot, token_ids[at, slot] - first


def _log_of_zero(dtype: torch.dtype) -> float:
    # Below this the exponential is 0 in float32, and for the entropy as good as 0 in float64.
    return math.log(torch.finfo(dtype).smallest_normal) - 20
