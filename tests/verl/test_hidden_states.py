"""Hidden states in the place of logits, on a model that ends as Megatron's.

It is written after `GPTModel._postprocess` of megatron-core 0.18 (`megatron/core/models/gpt/gpt_model.py`), which wants
Python 3.12; before, the logits have no multiplier. test_megatron runs the model that is installed.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from troll.verl.megatron import hidden_states_for_logits

VOCABULARY, WIDTH = 11, 6


class Head(torch.nn.Module):
    """As Megatron's column-parallel layer is called."""

    sequence_parallel = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return input_ @ (self.weight if weight is None else weight).T, None


class Model(torch.nn.Module):
    """Embedding and head.

    Args:
        tied: Whether the head has the embedding's weight.
        multiplier: Of the logits, in maximal update parametrisation.
    """

    def __init__(self, tied: bool, multiplier: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.output_layer = Head()
        self.tied, self.multiplier = tied, multiplier

    def decoded(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states (L, B, H), and the weight of the head where it is not the head's own."""
        return self.embedding(input_ids).transpose(0, 1).tanh(), self.embedding.weight if self.tied else None

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states, output_weight = self.decoded(input_ids)
        logits, _ = self.output_layer(hidden_states, weight=output_weight, runtime_gather_output=None)
        return (logits * self.multiplier).transpose(0, 1).contiguous()


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@pytest.mark.parametrize("tied", [False, True])
def test_hidden_states_and_weight_give_the_logits(tied: bool, multiplier: float) -> None:
    torch.manual_seed(0)
    model, waited = Model(tied, multiplier), []
    # As Megatron waits for the weight, where it is gathered while other layers compute.
    model.output_layer.register_forward_pre_hook(lambda *_: waited.append(True))
    head: Any = model.output_layer
    head.forward = calls = mock.Mock(wraps=head.forward)
    ids = torch.randint(VOCABULARY, (2, 5))
    with hidden_states_for_logits(model) as weights:
        hidden = model(ids)
    (weight,) = weights
    assert hidden.shape == (2, 5, WIDTH) and calls.call_count == 0 and waited == [True]
    assert weight is (model.embedding.weight if tied else model.output_layer.weight)
    # Afterwards it is the model that it was.
    torch.testing.assert_close(hidden @ weight.T, model(ids))
    assert calls.call_count == 1


def test_a_stage_without_a_head_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    with hidden_states_for_logits(model) as weights:
        assert model(torch.ones(2)).shape == (2,)
    assert weights == []
