"""What the trust region did, beyond the metrics of every step: docs/diagnostics.md says what the numbers mean."""

from troll.trust_region.diagnostics import (
    coverage,
    dual_report,
    old_to_new_kl,
    ratio_report,
    sequence_report,
    support_too_small,
    tail_gap,
    tail_report,
)
from troll.trust_region.metrics import Tally

__all__ = [
    "Tally",
    "coverage",
    "dual_report",
    "old_to_new_kl",
    "ratio_report",
    "sequence_report",
    "support_too_small",
    "tail_gap",
    "tail_report",
]
