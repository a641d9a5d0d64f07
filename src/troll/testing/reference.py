"""The correct update of a case, and the updates that common mistakes of adapters lead to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from troll import Logits, TrustRegionStep, capture, troll_loss, trust_region_step
from troll.testing.case import UNREACHABLE, VOCAB_SIZE, Case, Update

#: How far the solver may be from the bound in float32, relative to it.
SOLVER = 1e-3


@dataclass(frozen=True, eq=False)
class Expected:
    """An update, and the size of its loss with all terms positive, to which rounding is relative."""

    loss: float
    gradient: Tensor
    size: float
    step: TrustRegionStep
    mask: Tensor


def reference(
    case: Case,
    normalisation: Mapping[str, Any],
    *,
    regression_normalisation: Mapping[str, Any] | None = None,
    old_temperature: float | None = None,
    shift: int = 1,
    prompts_count: bool = False,
    ratio_is_raw: bool = False,
    clip: float | None = None,
) -> Expected:
    """The update by the core's public functions, dense and in float64; the keywords make common mistakes."""
    ids = torch.nn.utils.rnn.pad_sequence([x.token_ids for x in case.samples], batch_first=True)
    # If a sample's last position is read, there has to be a token after it.
    labels = torch.nn.functional.pad(ids, (0, 1))[:, shift : shift + ids.shape[1] - 1]
    parts = [
        torch.cat([torch.full((len(x.prompt) - 1,), prompts_count), x.counts]).to(torch.bool) for x in case.samples
    ]
    mask = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    advantages = torch.tensor([x.advantage for x in case.samples], dtype=torch.float64)
    at = ids[:, :-1]

    old_table, new_table = case.old_table.double(), case.new_table.double().clone().requires_grad_()
    old = capture(
        old_table[at] / (old_temperature or case.temperature),
        labels,
        top_k=case.top_k,
        mass_threshold=case.mass_threshold,
    )
    step = trust_region_step(Logits(new_table[at], temperature=case.temperature), old, case.kl_bound)
    if ratio_is_raw:
        step = dataclasses.replace(step, log_ratio=step.log_prob - old.log_prob)
    if clip is not None:
        # PPO's: the smaller of r·A and clipped r·A.
        ratio, positive = step.log_ratio.exp(), advantages.unsqueeze(-1) >= 0
        clipped = torch.where(positive, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip))
        step = dataclasses.replace(step, log_ratio=clipped.log())
    policy_term, _ = troll_loss(step, advantages, mask, regression_weight=0.0, **normalisation)
    regression, _ = troll_loss(
        step,
        torch.zeros_like(advantages),
        mask,
        regression_weight=case.regression_weight,
        **(regression_normalisation or normalisation),
    )
    size, _ = troll_loss(step, -advantages.abs(), mask, regression_weight=case.regression_weight, **normalisation)
    loss = policy_term + regression
    (gradient,) = torch.autograd.grad(loss, new_table)
    return Expected(float(loss.detach()), gradient, float(size.detach()), step, mask)


def tolerance_of(case: Case) -> float:
    """The largest error that rounding and the solver explain, relative to the loss's size or the largest gradient."""
    dtype = case.old_table.dtype
    largest = float(torch.maximum(case.old_table.abs().max(), case.new_table.abs().max())) / case.temperature
    rounding = torch.finfo(dtype).eps * VOCAB_SIZE * largest
    solver = SOLVER if dtype == torch.float32 else 1e-9 / case.kl_bound
    none_projected = case.kl_bound == UNREACHABLE or torch.equal(case.old_table, case.new_table)
    return rounding if none_projected else rounding + solver


def errors_of(update: Update, expected: Expected) -> tuple[float, float]:
    """The errors of the loss, relative to its size, and of the gradient, relative to its largest entry; or infinity."""
    gradient = update.gradient.detach().cpu().double()
    # An update that should be zero is compared absolutely.
    loss = abs(float(update.loss) - expected.loss) / (expected.size or 1.0)
    worst = float((gradient - expected.gradient).abs().max()) / (float(expected.gradient.abs().max()) or 1.0)
    return math.inf if math.isnan(loss) else loss, math.inf if math.isnan(worst) else worst


def mistakes(case: Case, normalisation: Mapping[str, Any]) -> dict[str, Callable[[], Expected]]:
    """Common mistakes of adapters, in words, and the updates that they lead to."""

    def with_case(**changes: Any) -> Callable[[], Expected]:
        return partial(reference, dataclasses.replace(case, **changes), normalisation)

    def with_option(**option: Any) -> Callable[[], Expected]:
        return partial(reference, case, normalisation, **option)

    everything = tuple(dataclasses.replace(x, counts=torch.ones_like(x.counts)) for x in case.samples)
    found = {
        "the temperature is never applied": with_case(temperature=1.0),
        "the temperature is applied twice": with_case(temperature=case.temperature**2),
        "the mask of the response is ignored": with_case(samples=everything),
        "the regression is left out": with_case(regression_weight=0.0),
        "the regression is not multiplied by its weight": with_case(regression_weight=1.0),
        "the old policy is captured from the network that is updated": with_case(old_table=case.new_table),
        "the clip is still on": with_option(clip=0.2),
        "top_k is not that of the case": with_case(top_k=VOCAB_SIZE),
        "mass_threshold is not that of the case": with_case(mass_threshold=0.0),
        "the temperature is applied in the update and not in the capture": with_option(old_temperature=1.0),
        "labels are not shifted: a position's logits are about the next token": with_option(shift=0),
        "tokens of the prompt count": with_option(prompts_count=True),
        "the ratio is taken from raw log-probabilities and not from step.log_ratio": with_option(ratio_is_raw=True),
    }
    for name, other in (
        ("sequence_mean", {"aggregation": "sequence_mean"}),
        ("token_mean", {"aggregation": "token_mean"}),
        ("sum", {"aggregation": "token_mean", "num_tokens": 1.0}),
    ):
        regression = f"the regression is not aggregated like the policy term, but by its {name}"
        found[regression] = with_option(regression_normalisation=other)
        whole = f"the aggregation is {name}, and check_adapter was told {normalisation['aggregation']}"
        found[whole] = partial(reference, case, other)
    if len(case.micro_batches) > 1:
        for text, share in (("summed", 1.0), ("averaged", 1 / len(case.micro_batches))):
            one_by_one = partial(_one_by_one, case, normalisation, share)
            found[f"micro-batches are normalised one by one and then {text}"] = one_by_one
    return found


def _one_by_one(case: Case, normalisation: Mapping[str, Any], share: float) -> Expected:
    """The sum of the updates of micro-batches, each normalised as if it were the mini-batch."""
    parts = [
        reference(dataclasses.replace(case, samples=tuple(case.samples[i] for i in numbers)), normalisation)
        for numbers in case.micro_batches
    ]
    return dataclasses.replace(
        parts[0],
        loss=share * sum(x.loss for x in parts),
        gradient=share * sum((x.gradient for x in parts[1:]), parts[0].gradient),
        size=share * sum(x.size for x in parts),
    )
