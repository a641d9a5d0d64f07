"""Measurements of the trust region beyond the metrics of every step: docs/diagnostics.md explains the numbers."""

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
