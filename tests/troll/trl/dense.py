"""The TROLL loss of a micro-batch in float64, from full logits: plain code that shares nothing with the library.

One token at a time: choose the outcomes, find the multiplier by bisection, differentiate through it by the implicit
function theorem, which is one Newton step with a constant slope.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.troll.trl import tiny
from troll.trl import TrollConfig

LOG_FLOOR = math.log(1e-12)


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


def support(log_probs: Tensor, sampled: int, top_k: int, mass_threshold: float) -> list[int]:
    """The most likely tokens until they cover the mass, at most top_k; the sampled one in the last place if need be."""
    order = sorted(range(len(log_probs)), key=lambda v: (-float(log_probs[v]), v))
    chosen: list[int] = []
    for v in order[:top_k]:
        if mass_threshold > 0 and 1 - float(log_probs[chosen].exp().sum()) <= mass_threshold:
            break
        chosen.append(v)
    if sampled not in chosen:
        if len(chosen) == top_k:
            chosen.pop()
        chosen.append(sampled)
    return chosen


def log_sum_exp(values: Tensor) -> Tensor:
    return torch.logsumexp(values, dim=-1, keepdim=True)


def outcomes(new: Tensor, old: Tensor, sampled: int, args: TrollConfig) -> tuple[Tensor, Tensor, Tensor, int]:
    """log p̃ and log p over the outcomes, log p̃/p of the sampled token, and how many tokens the old policy kept."""
    ids = support(old, sampled, args.support_top_k, args.mass_threshold)
    rest = [v for v in range(len(old)) if v not in ids]
    pair = [torch.cat([x[ids], log_sum_exp(x[rest])]) if rest else x[ids] for x in (new, old)]
    log_new, log_old = (log_probs.clamp(min=LOG_FLOOR).log_softmax(-1) for log_probs in pair)
    return log_new, log_old, new[sampled] - old[sampled], len(ids)


def tilted(log_old: Tensor, s: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    log_q = (log_old + tau * s).log_softmax(-1)
    return log_q, (log_q.exp() * (log_q - log_old)).sum()


def token(new: Tensor, old: Tensor, sampled: int, args: TrollConfig) -> Token:
    raw = new.log_softmax(-1)
    log_new, log_old, log_ratio, kept = outcomes(raw, old.detach().log_softmax(-1), sampled, args)
    s = log_new - log_old
    kl_before = float((log_new.exp() * s).sum())
    to_old = (log_old.exp() * (log_old - log_new)).sum()
    if kl_before <= args.kl_bound:
        pull = to_old if args.pull == "proximal" else raw.sum() * 0
        return Token(log_ratio, pull, kl_before, kl_before, 0.0, kept)

    low, high = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float(tilted(log_old, s.detach(), middle)[1]) < args.kl_bound else (low, middle)
    tau = low
    log_q, kl = tilted(log_old, s, tau)
    q = log_q.detach().exp()
    slope = tau * (q * (s.detach() - (q * s.detach()).sum()).square()).sum()
    tau = tau - (kl - kl.detach()) / slope
    log_q, kl_after = tilted(log_old, s, tau)
    log_ratio = tau * log_ratio - torch.logsumexp(log_old + tau * s, -1)
    to_q = (log_new.exp() * (log_new - log_q.detach())).sum()
    regression = to_old if args.pull == "proximal" else to_q
    return Token(log_ratio, regression, kl_before, float(kl_after), float(1 / tau - 1), kept)


def tokens(new_logits: Tensor, old_logits: Tensor, inputs: dict[str, Any], args: TrollConfig) -> list[list[Token]]:
    """Every scored token, by sequence."""
    return [
        [token(new_logits[b, t], old_logits[b, t], sampled, args) for t, sampled in row]
        for b, row in enumerate(scored(inputs))
    ]


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
