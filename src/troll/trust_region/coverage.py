"""How much of the old policy its support holds."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.trust_region.policy.outcomes import sparse_entropy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.values import as_float
from troll.trust_region.tally import Tally, check_shapes, distribution, mean

#: The δ by which policies are judged that were captured with `mass_threshold=0`, which always keeps K tokens.
USUAL_MASS_THRESHOLD = 1e-5


@torch.no_grad()
def coverage(old: SparsePolicy, mask: Tensor) -> Tally:
    """How much of the old policy's mass its support holds.

    Args:
        old: The old policy as captured, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.

    Returns:
        `kept_tokens` and `covered_mass` (1 − tail), the means over tokens, and their 5, 50 and 95 % quantiles under
        `_p5`, `_p50` and `_p95` (of each call, averaged over calls); `uncovered_fraction`, the fraction of tokens that
        use all K slots and leave more than δ outside; and `old_entropy`, the mean of `entropy` over the K + 1 outcomes.

    Raises:
        ValueError: If the positions are not those of the mask.
    """
    check_shapes(mask, old=old.tail_log_prob)
    old = old[mask.bool() & old.log_probs[..., 0].isfinite()]
    kept = old.used.sum(-1)
    totals = distribution("kept_tokens", as_float(kept), (5, 50, 95))
    outside = old.tail_log_prob.exp()
    totals |= distribution("covered_mass", 1 - outside, (5, 50, 95))
    return Tally(
        totals | {"uncovered_fraction": mean(uncovered(old).to(outside)), "old_entropy": mean(sparse_entropy(old))}
    )


def support_statistics(old: SparsePolicy, mask: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of the mask, 0-d, by the names of their means: slots, mass outside, [uncovered][].

    Args:
        old: The old policy, at the positions of the mask.
        mask: (...), true (or 1) where a token counts.
    """
    counted, dtype = mask.bool(), old.log_probs.dtype
    return {
        "support_size": torch.where(counted, old.used.sum(-1), 0).sum().to(dtype),
        "tail_mass": torch.where(counted, old.tail_log_prob.exp(), 0.0).sum(),
        "uncovered_fraction": (counted & uncovered(old)).sum().to(dtype),
    }


def uncovered(old: SparsePolicy) -> Tensor:
    """(...) bool, true where all K slots are used and more than δ of the mass is outside."""
    threshold = old.mass_threshold or USUAL_MASS_THRESHOLD
    return old.used.all(-1) & (old.tail_log_prob.exp() > threshold)


def support_too_small(
    uncovered_fraction: float, *, top_k: int, mass_threshold: float, threshold: float = 0.1, setting: str = "top_k"
) -> str | None:
    """A warning for users if K is too small for the distributions, as it may be for creative text; else None.

    Args:
        uncovered_fraction: From [coverage][troll.coverage], in [0, 1].
        top_k: K of the capture.
        mass_threshold: δ of the capture.
        threshold: The largest fraction that is fine, in [0, 1).
        setting: The name of the setting by which users get a larger K; the warning names it.

    Returns:
        The warning in a sentence or two; None where the fraction is fine.

    Raises:
        ValueError: On a threshold out of its range.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    if not uncovered_fraction > threshold:
        return None
    return (
        f"at {uncovered_fraction:.0%} of the tokens the old policy has more than "
        f"{mass_threshold or USUAL_MASS_THRESHOLD:g} of its mass outside the {top_k} tokens that are kept: it is "
        "flatter than the support is made for, and the trust region does not see changes within the tail. Raise "
        f"{setting} (to {2 * top_k}, for a start), and watch tail_gap"
    )
