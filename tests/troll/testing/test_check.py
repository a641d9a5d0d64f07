"""The conformance test passes adapters that are right, and names what is wrong with those that are not."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from troll import Logits, PackedPolicy, TrustRegionStep, capture, trust_region_step
from troll.testing import IGNORED, METRICS, Case, Update, make_case
from troll.testing import check_adapter as check
from troll.testing.reference import errors_of, mistakes, reference, tolerance_of

SEQUENCE_MEAN = {"aggregation": "sequence_mean", "max_length": None}


@dataclasses.dataclass(frozen=True)
class Plain:
    """An adapter of a trainer that is nothing but tensors; its fields are what it can get wrong."""

    case_as: Callable[[Case], Case] = lambda case: case
    #: Of the step of a micro-batch, with the advantages of its tokens.
    step_as: Callable[[TrustRegionStep, PackedPolicy, Tensor], TrustRegionStep] = lambda step, old, advantages: step
    update_as: Callable[[Update, Case], Update] = lambda update, case: update
    #: How far from a position the token is that its logits are taken to be about.
    labels: int = 1
    old_temperature: float | None = None
    prompts_count: bool = False
    by_position: bool = False
    #: Of the update that a micro-batch of its own would make; None for the mini-batch's normalisation.
    share: float | None = None
    regression: str | None = None
    aggregation: str = "sequence_mean"

    def __call__(self, case: Case, /) -> Update:
        case = self.case_as(case)
        new_table = case.new_table.requires_grad_()
        kept = []
        for sample in case.samples:
            at, labels, _ = self.positions(sample)
            logits = case.old_table[at] / (self.old_temperature or case.temperature)
            policy = capture(logits, labels, top_k=case.top_k, mass_threshold=case.mass_threshold)
            kept.append(PackedPolicy.of(policy))
        loss, sums = torch.zeros(()), dict.fromkeys(METRICS, 0.0)
        arrived = iter(kept)
        for numbers in case.micro_batches:
            terms = [self.terms(case, number, next(arrived) if self.by_position else kept[number], new_table, sums)
                     for number in numbers]  # fmt: skip
            loss = loss + self.aggregated(case, terms, len(numbers))
        (gradient,) = torch.autograd.grad(loss, new_table)
        tokens = sum(int(self.positions(sample)[2].sum()) for sample in case.samples)
        update = Update(loss.detach(), gradient, {name: value / tokens for name, value in sums.items()})
        return self.update_as(update, case)

    def positions(self, sample: Any) -> tuple[Tensor, Tensor, Tensor]:
        ids = sample.token_ids
        mask = torch.cat([torch.full((len(sample.prompt) - 1,), self.prompts_count), sample.counts])
        return ids[:-1], ids[1:] if self.labels else ids[:-1], mask

    def terms(
        self, case: Case, number: int, old: PackedPolicy, new_table: Tensor, sums: dict[str, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        sample = case.samples[number]
        at, _, mask = self.positions(sample)
        size = min(len(at), old.shape.numel())  # a policy of another sample's has another length
        at, mask = at[:size], mask[:size]
        step = trust_region_step(
            Logits(new_table[at], temperature=case.temperature), old.unpack()[:size], case.kl_bound
        )
        advantages = torch.full((size,), sample.advantage, dtype=new_table.dtype)
        step = self.step_as(step, old, advantages)
        observed = (step.kl_before, step.kl_after, step.projected.double(), step.regression)
        for name, value in zip(METRICS, observed, strict=True):
            sums[name] += float(value.detach()[mask].sum())
        policy_term = -step.log_ratio.exp() * advantages
        return policy_term, case.regression_weight * step.regression, mask

    def aggregated(self, case: Case, terms: list[tuple[Tensor, Tensor, Tensor]], samples: int) -> Tensor:
        samples, share = (len(case.samples), 1.0) if self.share is None else (samples, self.share)
        tokens = sum(int(self.positions(sample)[2].sum()) for sample in case.samples)

        def over(values: Tensor, mask: Tensor, how: str) -> Tensor:
            divisor = {"sequence_mean": samples * int(mask.sum()), "token_mean": tokens, "fixed_length": samples * 9}
            return torch.where(mask, values, 0.0).sum() / divisor.get(how, 1)

        total = [over(policy, mask, self.aggregation) + over(pull, mask, self.regression or self.aggregation)
                 for policy, pull, mask in terms]  # fmt: skip
        return share * torch.stack(total).sum()


class Averaged(Plain):
    """The mean over micro-batches, each normalised by itself."""

    def aggregated(self, case: Case, terms: list[tuple[Tensor, Tensor, Tensor]], samples: int) -> Tensor:
        own = dataclasses.replace(case, samples=case.samples[:samples])
        return super().aggregated(own, terms, samples) / len(case.micro_batches)


def changed(**fields: Any) -> Callable[[Case], Case]:
    return lambda case: dataclasses.replace(case, **fields)


def dual_clipped(step: TrustRegionStep, old: PackedPolicy, advantages: Tensor) -> TrustRegionStep:
    """At most 10 times the loss of a ratio of 1, where the advantage is negative."""
    ratio = step.log_ratio.exp()
    return dataclasses.replace(step, log_ratio=torch.where(advantages < 0, ratio.clamp(max=10), ratio).log())


def clipped(step: TrustRegionStep, old: PackedPolicy, advantages: Tensor) -> TrustRegionStep:
    ratio = step.log_ratio.exp()
    kept = torch.where(advantages >= 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
    return dataclasses.replace(step, log_ratio=kept.log())


def raw(step: TrustRegionStep, old: PackedPolicy, advantages: Tensor) -> TrustRegionStep:
    return dataclasses.replace(step, log_ratio=step.log_prob - old.log_prob[: len(advantages)])


def beyond_the_usual(case: Case) -> Tensor:
    """What the largest logits of rows that do not count have beyond those of the other checks."""
    return (case.new_table.detach()[list(IGNORED)].abs() - 15).clamp(min=0)


def lost(update: Update, case: Case) -> Update:
    """A loss that is NaN with other values at positions that do not count."""
    return dataclasses.replace(update, loss=update.loss * torch.nan) if beyond_the_usual(case).any() else update


def influenced(update: Update, case: Case) -> Update:
    return dataclasses.replace(update, gradient=update.gradient * (1 + 0.01 * float(beyond_the_usual(case).max())))


def leaking(update: Update, case: Case) -> Update:
    update.gradient[list(IGNORED)] += beyond_the_usual(case)
    return update


def with_gradient(gradient: Tensor) -> Callable[[Update, Case], Update]:
    return lambda update, case: dataclasses.replace(update, gradient=gradient)


def with_metrics(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Update, Case], Update]:
    return lambda update, case: dataclasses.replace(update, metrics=change(dict(update.metrics)))


def everything(case: Case) -> Case:
    samples = tuple(dataclasses.replace(x, counts=torch.ones_like(x.counts)) for x in case.samples)
    return dataclasses.replace(case, samples=samples)


@pytest.mark.parametrize(
    ("aggregation", "dtype"),
    [("sequence_mean", torch.float32), ("token_mean", torch.float64), ("fixed_length", torch.float32)],
)
def test_check_passes_right_adapter(aggregation: Any, dtype: torch.dtype) -> None:
    max_length = 9 if aggregation == "fixed_length" else None
    check(Plain(aggregation=aggregation), aggregation=aggregation, max_length=max_length, dtype=dtype)


NAN = torch.full((48, 48), torch.nan)

#: What an adapter gets wrong, the requirement that it does not meet, and the likely mistake.
WRONG: dict[str, tuple[Plain, str, str]] = {
    "labels": (Plain(labels=0), "equal policies", "labels are not shifted"),
    "mask": (Plain(case_as=everything), "equal policies", "the mask of the response is ignored"),
    "temperature, never": (Plain(case_as=changed(temperature=1.0)), "equal policies", "is never applied"),
    "temperature, twice": (Plain(case_as=changed(temperature=0.7**2)), "equal policies", "is applied twice"),
    "temperature, once": (Plain(old_temperature=1.0), "equal policies", "in the update and not in the capture"),
    "clip": (Plain(step_as=clipped), "a bound that nothing reaches", "the clip is still on"),
    "dual clip": (Plain(step_as=dual_clipped), "a bound that nothing reaches", "weights other than the advantage"),
    "K": (Plain(case_as=changed(top_k=48)), "the old policy has", "top_k is not that of the case"),
    "δ": (Plain(case_as=changed(mass_threshold=0.0)), "the old policy has", "mass_threshold is not that of the case"),
    "late capture": (
        Plain(case_as=lambda case: dataclasses.replace(case, old_table=case.new_table.clone())),
        "a bound that nothing reaches",
        "captured from the network that is updated",
    ),
    "no regression": (Plain(case_as=changed(regression_weight=0.0)), "without advantages", "is left out"),
    "no weight": (Plain(case_as=changed(regression_weight=1.0)), "without advantages", "not multiplied by its weight"),
    "summed regression": (Plain(regression="sum"), "without advantages", "aggregated like .* by its sum"),
    "mean regression": (Plain(regression="token_mean"), "without advantages", "aggregated like .* by its token_mean"),
    "aggregation": (Plain(aggregation="token_mean"), "equal policies", "the aggregation is token_mean"),
    "raw ratio": (Plain(step_as=raw), "a bound that is reached", "taken from raw log-probabilities"),
    "summed micro-batches": (Plain(share=1.0), "several micro-batches", "one by one and then summed"),
    "averaged micro-batches": (Averaged(), "several micro-batches", "one by one and then averaged"),
    "by position": (Plain(by_position=True), "several micro-batches", "Likely, old policies are matched by position"),
    "prompt": (Plain(prompts_count=True), "equal policies", "tokens of the prompt count"),
    "weights": (
        Plain(step_as=lambda step, old, advantages: dataclasses.replace(step, log_ratio=0.9 * step.log_ratio)),
        "equal policies",
        "Likely, the capture and the update do not read",
    ),
    "influence": (Plain(update_as=influenced), "no influence", r"\(padded\): other logits there change the loss by"),
    "no number": (Plain(update_as=lost), "no influence", r"\(padded\): other logits there change the loss by nan"),
    "leak": (Plain(update_as=leaking), "no gradient and no influence", r"\(padded\): their gradient is"),
    "packed": (
        Plain(update_as=lambda update, case: update if case.layout == "padded" else with_gradient(NAN)(update, case)),
        "equal policies",
        r"\(packed\)",
    ),
    "NaN": (Plain(update_as=with_gradient(NAN)), "equal policies", ""),
    "infinity": (Plain(update_as=with_gradient(NAN.nan_to_num(torch.inf))), "equal policies", ""),
    "another gradient": (
        Plain(update_as=with_gradient(torch.zeros(48))),
        "",
        r"must be that of the table, \(48, 48\), got \(48,\)",
    ),
    "no metric": (
        Plain(update_as=with_metrics(lambda metrics: {name: metrics[name] for name in METRICS[:-1]})),
        "",
        "regression is missing, got kl_before, kl_after, projected_fraction",
    ),
    "wrong metric": (
        Plain(update_as=with_metrics(lambda metrics: metrics | {"kl_after": metrics["kl_before"]})),
        "",
        "kl_after is .*, not .*Likely, it is a mean",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_names_the_mistake(name: str) -> None:
    adapter, requirement, mistake = WRONG[name]
    with pytest.raises(AssertionError, match=rf"(?s)({requirement}).*{mistake}"):
        check(adapter)


def test_check_refuses_unknown_dtype_and_layout() -> None:
    with pytest.raises(ValueError, match=r"dtype must be float32 or float64, got torch\.bfloat16"):
        check(Plain(), dtype=torch.bfloat16)
    for layouts in ([], ["ragged"]):
        with pytest.raises(ValueError, match=re.escape(f"padded, packed, got {layouts}")):
            check(Plain(), layouts=layouts)  # type: ignore[arg-type]


def test_check_refuses_micro_batches_of_other_samples() -> None:
    for parts in (((0, 1, 2, 3),), ((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3), ())):
        with pytest.raises(ValueError, match="micro_batches must have each of the samples"):
            check(Plain(), micro_batches=parts)


def test_make_case_tells_mistakes_from_rounding() -> None:
    """Ten times the tolerance lies between what is right and each mistake that can show in the case."""
    changes: dict[str, Any] = {"micro_batches": ((2, 0, 3), (1,)), "top_k": 8, "mass_threshold": 0.1}
    case = dataclasses.replace(make_case("packed", torch.float32), **changes)
    right, tolerance = reference(case, SEQUENCE_MEAN), tolerance_of(case)
    for text, wrong in mistakes(case, SEQUENCE_MEAN).items():
        off = (wrong().gradient - right.gradient).abs().max() / right.gradient.abs().max()
        if "by its sequence_mean" in text or "is sequence_mean" in text:
            assert off == 0  # what this case asks for
        else:
            assert off > 10 * tolerance, text


def test_make_case_has_tokens_inside_and_outside() -> None:
    case = make_case("packed", torch.float32)
    expected = reference(case, SEQUENCE_MEAN)
    kl = expected.step.kl_before[expected.mask] / case.kl_bound
    assert (kl > 1).sum() >= 5 and (kl < 1).sum() >= 5
    # No rounding moves one across.
    assert ((kl - 1).abs() > within(0.01)).all()
    # With advantages of both signs, a token that the clip would stop.
    free = reference(dataclasses.replace(case, kl_bound=1e6), SEQUENCE_MEAN).step.log_ratio
    rising = torch.tensor([sample.advantage > 0 for sample in case.samples]).unsqueeze(-1)
    stopped = torch.where(rising, free.exp() > 1.3, free.exp() < 0.7) & expected.mask
    assert stopped[rising.flatten()].any() and stopped[~rising.flatten()].any()
    # And one that no clip leaves, nor a dual clip.
    largest = free.exp().masked_fill(~expected.mask, 0).amax(-1)
    assert largest[rising.flatten()].max() > 20 and largest[~rising.flatten()].max() > 20


def test_errors_of_zero_update_are_absolute():
    case = make_case("packed", torch.float32)
    zero = dataclasses.replace(reference(case, SEQUENCE_MEAN), loss=0.0, gradient=torch.zeros(2, 2), size=0.0)
    assert errors_of(Update(0.5, torch.full((2, 2), 0.25), {}), zero) == (0.5, 0.25)
