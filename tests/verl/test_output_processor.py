"""Megatron's own hook in the LM head's place, which megatron-core has from 0.18 on, with Python 3.12 or newer.

Here stands a model with its contract, written after `GPTModel.forward` and `GPTModel._postprocess` of megatron-core
0.18.2 (`megatron/core/models/gpt/gpt_model.py`). Where that is installed, test_megatron runs the real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from troll.verl.megatron import hidden_states_for_logits
from troll.verl.seam.training import takes_output_processor

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


class OldModel(torch.nn.Module):
    """Up to megatron-core 0.17: logits and nothing else.

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

    def logits(self, hidden_states: Tensor, output_weight: Tensor | None) -> Tensor:
        logits, _ = self.output_layer(hidden_states, weight=output_weight, runtime_gather_output=None)
        return self._scale_logits(logits).transpose(0, 1).contiguous()

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return logits * self.multiplier

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        return self.logits(*self.decoded(input_ids))


class NewModel(OldModel):
    """From megatron-core 0.18 on: a function may take the place of the head, the multiplier and the transposition."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
    ) -> Tensor:
        hidden_states, output_weight = self.decoded(input_ids)
        if output_processor is None:
            return self.logits(hidden_states, output_weight)
        result: Tensor = output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=output_weight,
            labels=labels,
            loss_mask=loss_mask,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            decoder_input=decoder_input,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
            runtime_gather_output=runtime_gather_output,
            context=output_processor_context,
            compute_language_model_loss=None,
            scale_logits=self._scale_logits,
            config=None,
        )
        return result


def test_only_the_new_model_takes_a_function() -> None:
    assert takes_output_processor(NewModel(False, 1.0)) and not takes_output_processor(OldModel(False, 1.0))


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [OldModel, NewModel])
def test_hidden_states_and_weight_give_the_logits(kind: Any, tied: bool, multiplier: float) -> None:
    torch.manual_seed(0)
    model = kind(tied, multiplier)
    model.output_layer.forward = calls = Counting(model.output_layer.forward)
    ids = torch.randint(VOCABULARY, (2, 5))
    with hidden_states_for_logits(model) as weights:
        hidden = model(ids, None, None)
    (weight,) = weights
    assert hidden.shape == (2, 5, WIDTH) and calls.number == 0
    assert weight is (model.embedding.weight if tied else model.output_layer.weight)
    # Afterwards it is the model that it was.
    torch.testing.assert_close(hidden @ weight.T, model(ids, None, None))
    assert calls.number == 1


class Counting:
    """A function that knows how often it was called."""

    def __init__(self, function: Any) -> None:
        self.function, self.number = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return self.function(*args, **kwargs)


def test_a_stage_without_a_head_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    with hidden_states_for_logits(model) as weights:
        assert model(torch.ones(2)).shape == (2,)
    assert weights == []
