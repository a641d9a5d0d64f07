"""Reading policies where TRL reads log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from troll.trl.fused_head import PolicyOutput


@dataclass
class PolicyScoring:
    """Stands in for the model inside ``GRPOTrainer._get_per_token_logps_and_entropies``.

    TRL calls the model for a few sequences at a time and keeps what it knows of the outputs. This asks the fused head
    for policies too (see `troll.trl.fused_head.add_policy_head`), and keeps the outputs.

    Attributes:
        request: What the model is called with in addition.
        finish: Called with the outputs and TRL's log-probabilities (B, T) of all sequences, before TRL goes on.
        model: What TRL would have called.
        outputs: In order of the sequences.
    """

    request: dict[str, Any]
    finish: Callable[[list[PolicyOutput], Tensor], None]
    model: Any = None
    outputs: list[PolicyOutput] = field(default_factory=list)

    def __call__(self, **inputs: Any) -> PolicyOutput:
        """The forward pass of some sequences."""
        self.outputs.append(self.model(**inputs, **self.request))
        return self.outputs[-1]
