"""An update of TROLL in plain torch, of the core's public functions: one process, no packing, no verl."""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tolerance import rounding, within
from tests.troll.verl.actor import Sample, Step
from tests.troll.verl.records import joined
from troll import Constraint, SparsePolicy, trust_region_step
from troll import capture as troll_capture
from troll.trust_region.dual import tolerance as solver_tolerance
from troll.trust_region.step import Pull
from troll.verl.records import from_records

#: Terms of the network's longest sums: its MLPs are as wide.
LONGEST_SUM = 64


@dataclass(frozen=True)
class Settings:
    """As `troll.verl.TrollPolicyLossConfig`, and what verl's actor and its batch have besides, by their names."""

    kl_bound: float = 0.02
    regression_weight: float = 1.0
    pull: Pull = "projection"
    top_k: int = 12
    mass_threshold: float = 1e-3
    constraint: str = "token"
    ratio_level: str = "token"
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int = 6
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True)
class Update:
    """The loss of a mini-batch, its gradient, and what its tokens' trust regions did."""

    loss: float
    gradients: dict[str, Tensor]
    #: Of the tokens that count, (N,) each.
    statistics: dict[str, Tensor]
    #: The loss with all its terms made positive: what its rounding error is relative to.
    size: float
    #: Of a log-probability, by rounding, at most.
    error: float


@functools.cache
def _saved(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def load(folder: Path, parameters: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    model = copy.deepcopy(_saved(folder))
    if parameters is not None:
        missing, unexpected = model.load_state_dict(dict(parameters), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def response_logits(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Of one sequence by itself, (T, V)."""
    logits = model(sample.input_ids[None]).logits[0, len(sample.prompt) - 1 : -1]
    return logits / temperature


def log_prob_error(logits: Tensor) -> float:
    """What the log-probabilities of two computations of these logits may differ by.

    Errors of the layers add up, and those within a sum mostly cancel: the one makes up for the other.
    """
    return rounding(LONGEST_SUM, float(logits.detach().abs().max()))


@torch.no_grad()
def capture(model: PreTrainedModel, sample: Sample, settings: Settings) -> SparsePolicy:
    logits = response_logits(model, sample, settings.temperature)
    return troll_capture(logits, sample.response, top_k=settings.top_k, mass_threshold=settings.mass_threshold)


@torch.no_grad()
def capture_error(model: PreTrainedModel, sample: Sample, settings: Settings) -> float:
    return log_prob_error(response_logits(model, sample, settings.temperature))


def update(
    new: PreTrainedModel,
    old: PreTrainedModel,
    samples: Sequence[Sample],
    settings: Settings,
    weights: Mapping[int, Tensor] | None = None,
    reference_log_probs: Mapping[int, Tensor] | None = None,
) -> Update:
    """One mini-batch. Correction weights and log-probabilities of the reference policy are by `id(sample)`."""
    new.zero_grad()
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    logits = [response_logits(new, sample, settings.temperature) for sample in samples]
    captured = joined([capture(old, sample, settings) for sample in samples])
    mask = torch.cat([sample.mask for sample in samples]).bool()
    step = trust_region_step(
        torch.cat(logits), captured, settings.kl_bound, constraint=_constraint(samples, settings), pull=settings.pull
    )
    names = ("kl_before", "kl_after", "multiplier", "projected", "regression")
    statistics = {name: getattr(step, name).detach()[mask] for name in names}
    statistics |= {"support_size": captured.used.sum(-1)[mask], "tail_mass": captured.tail_log_prob.exp()[mask]}
    loss, size = torch.zeros(()), torch.zeros(())
    sizes = [len(sample.response) for sample in samples]
    parts = zip(samples, logits, step.log_ratio.split(sizes), step.regression.split(sizes), strict=True)
    for sample, own, log_ratio, regression in parts:
        terms = torch.stack(_terms(sample, own, log_ratio, regression, settings, weights, reference_log_probs))
        loss = loss + _aggregate(terms.sum(0), sample.mask, tokens, len(samples), settings)
        size = size + _aggregate(terms.detach().abs().sum(0), sample.mask, tokens, len(samples), settings)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in new.named_parameters() if p.grad is not None}
    return Update(loss.item(), gradients, statistics, size.item(), log_prob_error(torch.cat(logits)))


def _constraint(samples: Sequence[Sample], settings: Settings) -> Constraint | None:
    if settings.constraint == "token":
        return None
    group = torch.cat([torch.full((len(sample.response),), i) for i, sample in enumerate(samples)])
    weight = torch.cat([sample.mask.double() / max(int(sample.mask.sum()), 1) for sample in samples])
    return Constraint(group, weight, len(samples))


def _terms(
    sample: Sample,
    logits: Tensor,
    log_ratio: Tensor,
    regression: Tensor,
    settings: Settings,
    weights: Mapping[int, Tensor] | None,
    reference_log_probs: Mapping[int, Tensor] | None,
) -> list[Tensor]:
    """The terms of the loss of every token of a sequence, (T,) each."""
    if settings.ratio_level == "sequence":
        mean = (log_ratio.detach() * sample.mask).sum() / sample.mask.sum()
        log_ratio = mean + log_ratio - log_ratio.detach()
    surrogate = -log_ratio.exp() * sample.advantages
    if weights is not None:
        surrogate = surrogate * weights[id(sample)]
    terms = [surrogate, settings.regression_weight * regression]
    log_p = torch.log_softmax(logits, -1)
    if settings.entropy_coeff:
        terms.append(settings.entropy_coeff * (log_p.exp() * log_p).sum(-1))
    if reference_log_probs is not None:
        # The "k3" estimate, verl's low_var_kl, which it bounds.
        difference = reference_log_probs[id(sample)] - log_p.gather(-1, sample.response[:, None])[:, 0]
        terms.append(settings.kl_loss_coef * (difference.exp() - difference - 1).clamp(-10, 10))
    return terms


def _aggregate(terms: Tensor, mask: Tensor, tokens: int, sequences: int, settings: Settings) -> Tensor:
    total = (terms * mask).sum()
    if settings.loss_agg_mode == "seq-mean-token-mean":
        total = total / mask.sum().clamp(min=1)
    divisor = {
        "token-mean": tokens,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * settings.loss_scale_factor,
    }
    return total / divisor[settings.loss_agg_mode]


def compared(got: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference between two sets of tensors, relative to the largest number of each."""
    assert set(got) == set(wanted)
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)) for name, value in wanted.items()
    )


def mini_batches(samples: Sequence[Sample], size: int = 4) -> list[Sequence[Sample]]:
    """Those of all processes together, of which process r holds samples r, r + world, ..."""
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def check_captured(folder: Path, records: Sequence[Tensor], samples: Sequence[Sample], settings: Settings) -> None:
    """Asserts that the records are the policies that the core captures of each sequence by itself."""
    model = load(folder)
    for record, sample in zip(records, samples, strict=True):
        got, wanted = from_records([record]).unpack(), capture(model, sample, settings)
        assert torch.equal(got.token_ids, wanted.token_ids) and torch.equal(got.slot, wanted.slot)
        assert (got.vocab_size, got.mass_threshold) == (wanted.vocab_size, wanted.mass_threshold)
        error = capture_error(model, sample, settings)
        torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=error)
        torch.testing.assert_close(got.tail_log_prob, wanted.tail_log_prob, rtol=0, atol=error)


def check_left_out(found: Mapping[str, Any]) -> None:
    """Asserts that what `worker.left_out` found is no update, and then one."""
    assert found["unchanged"]
    assert all(count > 0 for count in found["metrics"]["trust_region/nonfinite"])
    assert all(math.isnan(norm) for norm in found["metrics"]["grad_norm"])
    assert all(count == 0 for count in found["later"]["trust_region/nonfinite"])
    assert all(math.isfinite(norm) for norm in found["later"]["grad_norm"])


def check(
    folder: Path,
    steps: Sequence[Step],
    metrics: Mapping[str, Sequence[float]],
    batches: Sequence[Sequence[Sample]],
    settings: Settings,
    **terms: Any,
) -> None:
    """Asserts that the update of every mini-batch had the loss, the gradients and the metrics of the plain formula.

    The folder has the model as it was when the rollout was scored; the terms are those of `update`.
    """
    old = load(folder)
    projected = []
    assert len(steps) == len(batches) == len(metrics["loss"])
    for number, (step, mini_batch) in enumerate(zip(steps, batches, strict=True)):
        wanted = update(load(folder, step.parameters), old, mini_batch, settings, **terms)
        # A term is a ratio times an advantage: its relative error is that of two log-probabilities, and its gradient's.
        error = 2 * wanted.error
        assert metrics["loss"][number] == pytest.approx(wanted.loss, abs=error * wanted.size)
        assert compared(step.gradients, wanted.gradients) < within(error), number
        _check_metrics(metrics, number, len(metrics["trust_region/kl_before_mean"]) // len(steps), wanted, settings)
        projected.append(wanted.statistics["projected"].float().mean().item())
    # Not a test of the identity.
    assert sum(projected) / len(projected) > 0.1


def _check_metrics(
    metrics: Mapping[str, Sequence[float]], number: int, copies: int, update: Update, settings: Settings
) -> None:
    """Each process reports the same, over the tokens of all."""
    tokens = update.statistics
    projected = tokens["projected"]
    values = {name: tokens[name].float().mean().item() for name in ("regression", "support_size", "tail_mass")}
    for name in ("kl_before", "kl_after"):
        values |= {f"{name}_mean": tokens[name].mean().item(), f"{name}_max": tokens[name].max().item()}
    multiplier = tokens["multiplier"][projected].mean().item() if projected.any() else 0.0
    values |= {"projected_fraction": projected.float().mean().item(), "multiplier": multiplier, "nonfinite": 0.0}
    for name, value in values.items():
        got = metrics[f"trust_region/{name}"][number * copies : (number + 1) * copies]
        # In averages the errors of either sign are the square root of as many.
        worst = update.error if name.endswith("_max") else update.error / math.sqrt(LONGEST_SUM)
        error = _metric_error(name, value, values["multiplier"], worst, settings)
        assert got == pytest.approx([value] * copies, rel=1e-6, abs=error), name


def _metric_error(name: str, value: float, multiplier: float, error: float, settings: Settings) -> float:
    """What errors of log-probabilities, and where the solver stops, make of a metric.

    With f the logarithm of two policies' ratio and σ² its variance, KL is about σ²/2, and an error of f (that of two
    log-probabilities) changes it by that times σ. On the way from the old policy to the new one KL is about τ²σ²/2.
    So where it meets the bound ε the error of τ is τ²/√(2ε) of the error of f, and that of η = 1/τ − 1, the multiplier,
    is 1/√(2ε) of it: absolute, also where η is close to 0. The solver stops where KL is the bound up to a factor, and τ
    is off by half of that factor.
    """
    stopped = solver_tolerance(torch.float32)
    if name == "multiplier":
        return 2 * error / math.sqrt(2 * settings.kl_bound) + stopped * (1 + multiplier)
    if name == "regression" or name.startswith("kl_"):
        # Between equal policies nothing is left but the sum over the outcomes.
        equal = rounding(settings.top_k)
        return 2 * error * math.sqrt(2 * value) + stopped * settings.kl_bound * (1 + multiplier) + equal
    return error * value if name == "tail_mass" else 0.0
