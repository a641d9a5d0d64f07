"""A trainer whose network has moved since its rollout, next to a copy of that network for the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trl import dense, tiny


class Moved:
    """A trainer with a rollout, a network that has moved since, and a copy of that network.

    `batches` are the inputs and the old logits, (B, T, V), of each micro-batch.
    """

    def __init__(
        self, make: tiny.Maker, model: str = "llama", change: Callable[..., Any] = dict, **settings: Any
    ) -> None:
        self.trainer = make(model=model, **settings)
        self.args = self.trainer.args
        self.model = make.model(model)
        with torch.no_grad():
            self.batches = [(change(inputs), self.logits(inputs)) for inputs in tiny.rollout(self.trainer)]
        tiny.move(self.trainer.model, 0.1)
        self.model.load_state_dict(self.trainer.model.state_dict())

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """The copy's, (B, T, V), differentiable."""
        return dense.completion_logits(self.model, inputs, self.args.temperature)

    def assert_loss(
        self, inputs: dict[str, Any], expected: Tensor, tolerance: float = tiny.GRADIENT_ERROR, rel: float = 2e-5
    ) -> None:
        """The trainer's loss of a micro-batch is this one of the copy, and so is its gradient."""
        loss, found = tiny.loss_and_gradients(self.trainer, inputs)
        self.model.zero_grad()
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=rel, abs=rel / 10)
        tiny.assert_same_gradients(found, tiny.gradients(self.model), tolerance)
