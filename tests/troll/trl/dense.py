"""The TROLL loss of a micro-batch in float64, from full logits: the reference's steps, in TRL's aggregations.

The reference knows values and gradients; `differentiable` makes functions of a network's logits of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.troll.trl import tiny
from tests.troll.trust_region import reference
from troll.trl import TrollConfig

LOG_FLOOR = math.log(reference.FLOOR)


@dataclass
class Token:
    """One position: log q/p of the sampled token, the pull, and the metrics."""

    log_ratio: Tensor
    regression: Tensor
    kl_before: float
    kl_after: float
    multiplier: float
    support: int


def completion_logits(model: Any, inputs: dict[str, Any], temperature: float) -> Tensor:
    """(B, T, V) float64 logits that predict the completion's tokens."""
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    return logits[:, -inputs["completion_ids"].shape[1] - 1 : -1].double() / temperature


def completion_log_probs(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """(B, T) float64 log-probabilities of the completion's tokens."""
    log_probs = completion_logits(model, inputs, temperature).log_softmax(-1)
    return log_probs.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def outcomes(new: Tensor, old: Tensor, sampled: int, args: TrollConfig) -> tuple[Tensor, Tensor, Tensor, int]:
    """log p̃ and log p over the outcomes, log p̃/p of the sampled token, and how many tokens the old policy kept."""
    new_row, old_row = (log_probs.detach().numpy() for log_probs in (new, old))
    kept = reference.capture(old_row, sampled, args.support_top_k, args.mass_threshold)
    members = reference.bucket_outcomes(new_row, kept).tokens
    pair = [torch.stack([x[part].logsumexp(-1) for part in members]) for x in (new, old)]
    log_new, log_old = (log_probs.clamp(min=LOG_FLOOR).log_softmax(-1) for log_probs in pair)
    return log_new, log_old, new[sampled] - old[sampled], len(kept.ids)


def differentiable(value: float, gradient: reference.Array, logits: Tensor) -> Tensor:
    """A number of which value and gradient are known, as a function of the logits."""
    return value + (torch.from_numpy(gradient) * (logits - logits.detach())).sum()


def of_step(step: reference.StepRow, log_ratio: Tensor, new: Tensor, support: int) -> Token:
    """The token of a step of the reference, whose pull moves only its own logits."""
    regression = differentiable(step.regression, step.regression_gradient, new)
    return Token(log_ratio, regression, step.kl_before, step.kl_after, step.multiplier, support)


def sharing(new: Tensor, old: Sequence[reference.OldRow], weight: float, args: TrollConfig) -> list[Token]:
    """The tokens, (t, V) new logits, that share one multiplier, with which every ratio depends on all of them."""
    rows, found = list(zip(new.detach().numpy(), old, strict=True)), []
    for t, upstream in enumerate(np.eye(len(rows))):
        steps = reference.shared_step(rows, [weight] * len(rows), args.kl_bound, upstream, args.pull)
        to_all = np.array([step.log_ratio_gradient for step in steps])
        log_ratio = differentiable(steps[t].log_ratio, to_all, new)
        found.append(of_step(steps[t], log_ratio, new[t], len(old[t].ids)))
    return found


def token_on(kept: list[int], new: Tensor, old: reference.Array, sampled: int, args: TrollConfig) -> Token:
    """The token on what a sampler kept, whose pull is also of the kept tokens and all others as two outcomes."""
    tail = reference.on_support(old, kept)[1]
    log_probs, slot = reference.log_softmax(old[kept]), kept.index(sampled)
    row = reference.OldRow(kept, log_probs, tail, slot, len(kept), 0.0, len(old))
    step = reference.truncated_step(new.detach().numpy(), row, args.kl_bound, args.pull).step
    return of_step(step, differentiable(step.log_ratio, step.log_ratio_gradient, new), new, len(kept))


def tokens(
    new_logits: Tensor,
    old_logits: Tensor,
    inputs: dict[str, Any],
    args: TrollConfig,
    kept: list[list[list[int]]] | None = None,
) -> list[list[Token]]:
    """Every scored token, by sequence; on the tokens that a sampler kept of each position, where they are given."""
    found: list[list[Token]] = []
    for b, places in enumerate(scored(inputs)):
        new, old = new_logits[b], old_logits[b].numpy()
        if kept is not None:
            found.append([token_on(kept[b][t], new[t], old[t], sampled, args) for t, sampled in places])
            continue
        rows = [reference.capture(old[t], sampled, args.support_top_k, args.mass_threshold) for t, sampled in places]
        at = [t for t, _ in places]
        if args.constraint == "sequence" and places:
            weight = 1 / len(places) if args.constraint_reduction == "mean" else 1.0
            found.append(sharing(new[at], rows, weight, args))
        else:
            found.append([sharing(new[t : t + 1], [row], 1.0, args)[0] for t, row in zip(at, rows, strict=True)])
    return found


def with_tools(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same micro-batch, every third token written by a tool."""
    tool_mask = torch.ones_like(inputs["completion_mask"])
    tool_mask[:, 1::3] = 0
    return inputs | {"tool_mask": tool_mask}


def scored_mask(inputs: dict[str, Any]) -> Tensor:
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def scored(inputs: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Places and ids of the scored tokens of each sequence."""
    rows = zip(inputs["completion_ids"].tolist(), scored_mask(inputs), strict=True)
    return [[(t, ids[t]) for t in mask.nonzero().flatten().tolist()] for ids, mask in rows]


def loss(rows: list[list[Token]], inputs: dict[str, Any], args: TrollConfig) -> Tensor:
    """−ratio·A + α·regression, aggregated as TRL documents its loss types, for one micro-batch of one process."""
    per_sequence: list[list[Tensor]] = []
    for row, advantage in zip(rows, inputs["advantages"].double(), strict=True):
        log_ratios = [one.log_ratio for one in row]
        if args.importance_sampling_level == "sequence" and row:
            log_ratios = [torch.stack(log_ratios).mean()] * len(row)
        losses = zip(log_ratios, [args.regression_weight * one.regression for one in row], strict=True)
        per_sequence.append([-log_ratio.exp() * advantage + pull for log_ratio, pull in losses])
    return aggregate(per_sequence, inputs, args)


def aggregate(per_sequence: list[list[Tensor]], inputs: dict[str, Any], args: TrollConfig) -> Tensor:
    total = torch.stack([value for row in per_sequence for value in row]).sum()
    accumulation, sequences = args.gradient_accumulation_steps, len(per_sequence)
    if args.loss_type in ("grpo", "sapo"):
        means = [torch.stack(row).mean() for row in per_sequence if row]
        return torch.stack(means).sum() / sequences / accumulation
    if args.loss_type == "bnpo":
        return total / sum(len(row) for row in per_sequence) / accumulation
    if args.loss_type == "dr_grpo":
        assert args.max_completion_length is not None
        return total / (sequences * args.max_completion_length) / accumulation
    assert args.loss_type in ("dapo", "cispo", "vespo")
    assert args.steps_per_generation is not None
    return total / (float(inputs["num_items_in_batch"]) * accumulation / args.steps_per_generation)


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
        return completion_logits(self.model, inputs, self.args.temperature)

    def assert_loss(
        self, inputs: dict[str, Any], expected: Tensor, tolerance: float = tiny.GRADIENT_ERROR, rel: float = 2e-5
    ) -> None:
        """The trainer's loss of a micro-batch is this one of the copy, and so is its gradient."""
        loss, found = tiny.loss_and_gradients(self.trainer, inputs)
        self.model.zero_grad()
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=rel, abs=rel / 10)
        tiny.assert_same_gradients(found, tiny.gradients(self.model), tolerance)
