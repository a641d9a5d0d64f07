"""How much of the old policy its support holds."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.trust_region.policy.outcomes import sparse_entropy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.values import as_float
from troll.trust_region.tally import Tally, check_shapes, distribution, mean


@torch.no_grad()
def coverage(old: SparsePolicy, mask: Tensor) -> Tally:
    """How much of the old policy's mass its support holds.

    Args:
        old: The old policy as captured, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.

    Returns:
        `kept_tokens` and `covered_mass` (1 − tail), the means over tokens, and their 5, 50 and 95 % quantiles under
        `_p5`, `_p50` and `_p95` (of each call, averaged over calls); and `old_entropy`, the mean of the entropy over
        the K + 1 outcomes.

    Raises:
        ValueError: If the positions are not those of the mask.
    """
    check_shapes(mask, old=old.tail_log_prob)
    old = old[mask.bool() & old.log_probs[..., 0].isfinite()]
    kept = old.used.sum(-1)
    totals = distribution("kept_tokens", as_float(kept), (5, 50, 95))
    outside = old.tail_log_prob.exp()
    totals |= distribution("covered_mass", 1 - outside, (5, 50, 95))
    return Tally(totals | {"old_entropy": mean(sparse_entropy(old))})


def support_statistics(old: SparsePolicy, mask: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of the mask, 0-d, by the names of their means: slots that are used, and the mass outside.

    Args:
        old: The old policy, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.
    """
    counted, dtype = mask.bool(), old.log_probs.dtype
    return {
        "support_size": torch.where(counted, old.used.sum(-1), 0).sum().to(dtype),
        "tail_mass": torch.where(counted, old.tail_log_prob.exp(), 0.0).sum(),
    }


def support_too_small(tail_mass: float, *, top_k: int, threshold: float = 0.1, setting: str = "top_k") -> str | None:
    """A warning for users if K is too small for the distributions, as it is for flat ones; else None.

    The bucket does not see changes within the tail, and the share of KL(p̃ ‖ p) that it misses is usually about the
    tail's mass: docs/diagnostics.md has figures. That δ is exceeded, as at most tokens of a small model, says little.

    Args:
        tail_mass: The mean mass outside the support, in [0, 1]: `1 − covered_mass` of [coverage][troll.coverage].
        top_k: K of the capture.
        threshold: The largest mass that is fine, in [0, 1).
        setting: The name of the setting by which users get a larger K; the warning names it.

    Returns:
        The warning in a sentence or two; None where the mass is fine.

    Raises:
        ValueError: On a threshold out of its range.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    if not tail_mass > threshold:
        return None
    return (
        f"{tail_mass:.0%} of the old policy's mass is outside the {top_k} tokens that are kept, and the trust region "
        "does not see changes within it, usually about the same share of the divergence. Raise "
        f"{setting} to {4 * top_k}, or sample at a lower temperature; tail_gap measures what is missed"
    )
