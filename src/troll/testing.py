"""A conformance test for adapters: whether TROLL in a trainer does what TROLL does.

The network of the test is a table, so that any trainer can hold it: the logits that follow token a are row a.
Everything that an adapter has to get right (which logits belong to which token, the temperature, the mask, the
aggregation) shows in the loss and in the gradient of that table.

```python
from troll.testing import Case, Update, check_adapter

def my_adapter(case: Case) -> Update:
    ...  # capture with case.old_table, update with case.new_table, by the trainer's own calls
    return Update(loss, gradient_of_the_new_table, metrics)

def test_my_adapter():
    check_adapter(my_adapter, aggregation="sequence_mean", layouts=["packed"])
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from troll import Logits, TrustRegionStep, capture, troll_loss, trust_region_step

Layout = Literal["padded", "packed"]

#: Of the vocabulary: the first are left to the trainer (padding, end of sequence) and stand in no sample. Rows of the
#: others are read at positions that do not count (`IGNORED`), or at positions that do (`COUNTED`), and never at both.
VOCAB_SIZE, IGNORED, COUNTED = 48, range(8, 24), range(24, 48)

#: A divergence that no policy of a case reaches.
UNREACHABLE = 1e6

#: Means over the tokens that count, which every adapter reports.
METRICS = ("kl_before", "kl_after", "projected_fraction", "regression")

_MICRO_BATCHES = ((2, 0), (3, 1))

#: How far the solver may be from the bound in float32, relative to it.
_SOLVER = 1e-3


@dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and a response to it.

    Attributes:
        prompt: (P,) int64.
        response: (R,) int64.
        counts: (R,) bool, which tokens of the response count. The others were not sampled by the policy.
        advantage: Of every token of the response.
    """

    prompt: Tensor
    response: Tensor
    counts: Tensor
    advantage: float

    @property
    def token_ids(self) -> Tensor:
        """The whole sequence, (P + R,)."""
        return torch.cat([self.prompt, self.response])


@dataclass(frozen=True, eq=False)
class Case:
    """A mini-batch for one update: score it with the old network, then update the new one with it.

    Attributes:
        samples: In the order in which the rollout made them.
        old_table: (V, V); the logits at a position that holds token a are row a, not yet divided by the temperature.
        new_table: (V, V), the same of the network that is updated. Both are the adapter's own, and may be overwritten.
        layout: How the trainer lays out a micro-batch: "padded", a row a sample; "packed", one sample after the other.
        micro_batches: The samples of each micro-batch of the update, by number. The rollout may be scored in any other
            order.
        temperature: The samples were drawn at it.
        kl_bound: ε.
        regression_weight: α.
        top_k: K, the whole vocabulary.
        mass_threshold: δ, 0.
    """

    samples: tuple[Sample, ...]
    old_table: Tensor
    new_table: Tensor
    layout: Layout
    micro_batches: tuple[tuple[int, ...], ...]
    temperature: float = 0.7
    kl_bound: float = 0.05
    regression_weight: float = 1.5
    top_k: int = VOCAB_SIZE
    mass_threshold: float = 0.0


@dataclass(frozen=True, eq=False)
class Update:
    """What an adapter made of a case, over all micro-batches, before the gradient is clipped.

    Attributes:
        loss: The loss of the mini-batch.
        gradient: Its gradient with regard to the new table, (V, V).
        metrics: `METRICS`, under these names: means over the tokens that count, or aggregated as the loss is.
    """

    loss: float | Tensor
    gradient: Tensor
    metrics: Mapping[str, float | Tensor]


class Adapter(Protocol):
    """One call: the trainer's own capture and update, on a network that is a table."""

    def __call__(self, case: Case, /) -> Update:
        """The update of a case."""
        ...


def check_adapter(
    adapter: Adapter,
    *,
    aggregation: Literal["sequence_mean", "token_mean", "fixed_length"] = "sequence_mean",
    max_length: int | None = None,
    layouts: Sequence[Layout] = get_args(Layout),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Checks that an adapter keeps TROLL's contract (docs/hosts.md), in every layout that it has.

    - Equal policies give the plain policy gradient.
    - A bound that nothing reaches gives the policy gradient with the importance ratio, without a clip.
    - Without advantages only the regression is left, with its weight, aggregated as the policy term is.
    - A bound that is reached gives the loss and the gradient of the dense projection, computed in float64.
    - Two micro-batches, in an order of their own, give what one gives.
    - Tokens that do not count have no gradient and no influence.
    - The metrics are those of the tokens that count.

    How far an adapter may be off follows from its arithmetic: a log-probability is a sum of V terms, and the solver's
    divergence is within 1e-3 · ε in float32.

    Args:
        adapter: See [Adapter][troll.testing.Adapter].
        aggregation: The trainer's way of aggregating tokens, as in [troll_loss][troll.troll_loss].
        max_length: For "fixed_length".
        layouts: Those that the trainer has.
        dtype: Of the tables, and of the adapter's arithmetic: float32 or float64.

    Raises:
        AssertionError: Names the requirement that is not met, what was found, and the likely mistake.
        ValueError: On another dtype, or no layout or an unknown one.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}: run the adapter in full precision")
    if not layouts or not set(layouts) <= set(get_args(Layout)):
        raise ValueError(f"layouts must be some of {', '.join(get_args(Layout))}, got {list(layouts)}")
    normalisation = {"aggregation": aggregation, "max_length": max_length}
    for layout in layouts:
        for requirement in _requirements(layout, dtype):
            _check(adapter, requirement, normalisation, dtype)
        _check_ignored(adapter, _case(layout, dtype), dtype)
        _check_metrics(adapter, _case(layout, dtype), normalisation, dtype)


@dataclass(frozen=True, eq=False)
class _Requirement:
    text: str
    case: Case
    hint: str


def _requirements(layout: Layout, dtype: torch.dtype) -> Iterator[_Requirement]:
    case = _case(layout, dtype)
    yield _Requirement(
        "equal policies give the plain policy gradient",
        dataclasses.replace(case, new_table=case.old_table.clone()),
        "the capture and the update do not read the same positions, or not with the same settings",
    )
    yield _Requirement(
        "a bound that nothing reaches gives the policy gradient without a clip",
        dataclasses.replace(case, kl_bound=UNREACHABLE),
        "the ratio is not the exponential of step.log_ratio, or weights other than the advantage multiply it",
    )
    yield _Requirement(
        "without advantages the regression is left, aggregated as the policy term is",
        dataclasses.replace(case, samples=tuple(dataclasses.replace(x, advantage=0.0) for x in case.samples)),
        "regression_weight * step.regression is not added to each token's term before the aggregation",
    )
    yield _Requirement(
        "a bound that is reached gives the loss and gradient of the projection",
        case,
        "the old policy is not that of the same token, or the gradient does not pass through the step",
    )
    yield _Requirement(
        "two micro-batches give what one gives",
        dataclasses.replace(case, micro_batches=_MICRO_BATCHES),
        "old policies are matched by position and not by sample, or a micro-batch is normalised by itself",
    )


def _case(layout: Layout, dtype: torch.dtype) -> Case:
    """Four samples of different lengths, two of them with tokens that do not count; both sides of the bound."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: range) -> int:
        return tokens[int(torch.randint(len(tokens), (), generator=generator))]

    samples = []
    for prompt_length, response_length, others, advantage in (
        (2, 7, (2, 3), 1.3),
        (5, 3, (), -0.8),
        (3, 9, (0, 5), 0.6),
        (4, 5, (), -1.7),
    ):
        counts = torch.ones(response_length, dtype=torch.bool)
        counts[list(others)] = False
        # Of a sequence, which tokens' rows predict one that counts.
        reads = [False] * (prompt_length - 1) + counts.tolist() + [False]
        token_ids = torch.tensor([draw(COUNTED if read else IGNORED) for read in reads])
        samples.append(Sample(token_ids[:prompt_length], token_ids[prompt_length:], counts, advantage))
    old = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    # Every third row moves little: its tokens stay within the bound.
    moved = torch.where(torch.arange(VOCAB_SIZE) % 3 == 0, 0.1, 0.5).unsqueeze(-1)
    new = old + moved * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    return Case(tuple(samples), old.to(dtype), new.to(dtype), layout, (tuple(range(len(samples))),))


# What should come out


@dataclass(frozen=True, eq=False)
class _Expected:
    """An update, and the size of its loss: with all terms positive, which its rounding is relative to."""

    loss: float
    gradient: Tensor
    size: float
    step: TrustRegionStep
    mask: Tensor


def _reference(
    case: Case,
    normalisation: Mapping[str, Any],
    *,
    regression_normalisation: Mapping[str, Any] | None = None,
    old_temperature: float | None = None,
    shift: int = 1,
    prompts_count: bool = False,
    ratio_is_raw: bool = False,
    clip: float | None = None,
) -> _Expected:
    """The update by the core's public functions, dense and in float64; the keywords are ways to get it wrong."""
    ids = torch.nn.utils.rnn.pad_sequence([x.token_ids for x in case.samples], batch_first=True)
    # Where a sample's last position is read, there has to be a token after it.
    labels = torch.nn.functional.pad(ids, (0, 1))[:, shift : shift + ids.shape[1] - 1]
    parts = [
        torch.cat([torch.full((len(x.prompt) - 1,), prompts_count), x.counts]).to(torch.bool) for x in case.samples
    ]
    mask = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    advantages = torch.tensor([x.advantage for x in case.samples], dtype=torch.float64)
    at = ids[:, :-1]

    old_table, new_table = case.old_table.double(), case.new_table.double().requires_grad_()
    old_source = Logits(old_table[at], temperature=old_temperature or case.temperature)
    old = capture(old_source, labels, top_k=case.top_k, mass_threshold=case.mass_threshold)
    step = trust_region_step(Logits(new_table[at], temperature=case.temperature), old, case.kl_bound)
    if ratio_is_raw:
        step = dataclasses.replace(step, log_ratio=step.log_probs - old.log_prob)
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
    return _Expected(float(loss.detach()), gradient, float(size.detach()), step, mask)


def _tolerance(case: Case, dtype: torch.dtype) -> float:
    """Relative to the size of the loss and to the largest gradient."""
    largest = float(torch.maximum(case.old_table.abs().max(), case.new_table.abs().max())) / case.temperature
    rounding = torch.finfo(dtype).eps * VOCAB_SIZE * largest
    solver = _SOLVER if dtype == torch.float32 else 1e-9 / case.kl_bound
    none_projected = case.kl_bound == UNREACHABLE or torch.equal(case.old_table, case.new_table)
    return rounding if none_projected else rounding + solver


def _errors(update: Update, expected: _Expected) -> tuple[float, float]:
    """Of the loss, relative to its size, and of the gradient, relative to the largest; inf where it is not finite."""
    gradient = update.gradient.detach().cpu().double()
    # An update that should be none is compared as it is.
    loss = abs(float(update.loss) - expected.loss) / (expected.size or 1.0)
    worst = float((gradient - expected.gradient).abs().max()) / (float(expected.gradient.abs().max()) or 1.0)
    return math.inf if math.isnan(loss) else loss, math.inf if math.isnan(worst) else worst


def _run(adapter: Adapter, case: Case, requirement: str) -> Update:
    own = dataclasses.replace(case, old_table=case.old_table.clone(), new_table=case.new_table.clone())
    update = adapter(own)
    assert update.gradient.shape == case.new_table.shape, (
        f"{_where(requirement, case)}: the gradient must be that of the table, {tuple(case.new_table.shape)}, "
        f"got {tuple(update.gradient.shape)}"
    )
    return update


def _where(requirement: str, case: Case) -> str:
    micro_batches = "" if len(case.micro_batches) == 1 else f", {len(case.micro_batches)} micro-batches"
    return f"{requirement} ({case.layout}{micro_batches})"


def _check(adapter: Adapter, requirement: _Requirement, normalisation: Mapping[str, Any], dtype: torch.dtype) -> None:
    case = requirement.case
    update, expected = _run(adapter, case, requirement.text), _reference(case, normalisation)
    tolerance = _tolerance(case, dtype)
    loss, gradient = _errors(update, expected)
    if max(loss, gradient) <= tolerance:
        return
    # A mistake may project where nothing should be.
    close = (
        text for text, wrong in _mistakes(case, normalisation) if max(_errors(update, wrong())) <= tolerance + _SOLVER
    )
    mistake = next(close, None)
    likely = f"Just this comes out where {mistake}" if mistake else f"Likely, {requirement.hint}"
    raise AssertionError(
        f"{_where(requirement.text, case)}: the loss is {float(update.loss):.6g}, not {expected.loss:.6g} "
        f"(off by {loss:.1e}), and the gradient is off by {gradient:.1e} of the largest; rounding and the solver "
        f"explain {tolerance:.1e}. {likely}"
    )


def _mistakes(case: Case, normalisation: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], _Expected]]]:
    """What adapters get wrong, and what then comes out."""
    everything = tuple(dataclasses.replace(x, counts=torch.ones_like(x.counts)) for x in case.samples)
    changed: dict[str, dict[str, Any]] = {
        "the temperature is never applied": {"temperature": 1.0},
        "the temperature is applied twice": {"temperature": case.temperature**2},
        "the mask of the response is ignored": {"samples": everything},
        "the regression is left out": {"regression_weight": 0.0},
        "the regression is not multiplied by its weight": {"regression_weight": 1.0},
        "the old policy is captured from the network that is updated": {"old_table": case.new_table},
    }
    for text, fields in changed.items():
        yield text, partial(_reference, dataclasses.replace(case, **fields), normalisation)
    options: dict[str, dict[str, Any]] = {
        "the clip is still on": {"clip": 0.2},
        "the temperature is applied in the update and not in the capture": {"old_temperature": 1.0},
        "labels are not shifted: a position's logits are about the next token": {"shift": 0},
        "tokens of the prompt count": {"prompts_count": True},
        "the ratio is taken from raw log-probabilities and not from step.log_ratio": {"ratio_is_raw": True},
    }
    for text, keywords in options.items():
        yield text, partial(_reference, case, normalisation, **keywords)
    for name, other in (
        ("sequence_mean", {"aggregation": "sequence_mean"}),
        ("token_mean", {"aggregation": "token_mean"}),
        ("sum", {"aggregation": "token_mean", "num_tokens": 1.0}),
    ):
        yield (
            f"the regression is aggregated otherwise than the policy term, by its {name}",
            partial(_reference, case, normalisation, regression_normalisation=other),
        )
        yield (
            f"the aggregation is {name}, and check_adapter was told {normalisation['aggregation']}",
            partial(_reference, case, other),
        )
    if len(case.micro_batches) > 1:
        for text, share in (("summed", 1.0), ("averaged", 1 / len(case.micro_batches))):
            yield (
                f"micro-batches are normalised one by one and then {text}",
                partial(_one_by_one, case, normalisation, share),
            )


def _one_by_one(case: Case, normalisation: Mapping[str, Any], share: float) -> _Expected:
    """Micro-batches as if each were a mini-batch, and their updates added up."""
    parts = [
        _reference(dataclasses.replace(case, samples=tuple(case.samples[i] for i in numbers)), normalisation)
        for numbers in case.micro_batches
    ]
    return dataclasses.replace(
        parts[0],
        loss=share * sum(x.loss for x in parts),
        gradient=share * sum((x.gradient for x in parts[1:]), parts[0].gradient),
        size=share * sum(x.size for x in parts),
    )


# What does not follow from one reference


def _check_ignored(adapter: Adapter, case: Case, dtype: torch.dtype) -> None:
    """Other numbers in the rows that are read only where nothing counts change nothing."""
    requirement, tolerance = "tokens that do not count have no gradient and no influence", _tolerance(case, dtype)
    ignored = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    ignored[list(COUNTED)] = False
    generator = torch.Generator().manual_seed(1)
    old_table, new_table = case.old_table.clone(), case.new_table.clone()
    for table in (old_table, new_table):
        table[ignored] = 10 * torch.randn(VOCAB_SIZE - len(COUNTED), VOCAB_SIZE, generator=generator).to(dtype)
    before = _run(adapter, case, requirement)
    after = _run(adapter, dataclasses.replace(case, old_table=old_table, new_table=new_table), requirement)
    gradients = [x.gradient.detach().cpu().double() for x in (before, after)]
    largest = gradients[0].abs().max()
    own = float(torch.stack([x[ignored].abs().max() for x in gradients]).max() / largest)
    change = float((gradients[0] - gradients[1]).abs().max() / largest)
    moved = abs(float(before.loss) - float(after.loss)) / max(1.0, abs(float(before.loss)))
    assert own <= tolerance, (
        f"{_where(requirement, case)}: their gradient is {own:.1e} of the largest. Likely, the prompt, padding or "
        "masked tokens are in the policy term or in the regression"
    )
    assert max(change, moved) <= tolerance, (
        f"{_where(requirement, case)}: other logits there change the loss by {moved:.1e}, and the gradient by "
        f"{change:.1e} of the largest. Likely, a normalisation reads all tokens, or padded values are multiplied by a "
        "mask and not replaced"
    )


def _check_metrics(adapter: Adapter, case: Case, normalisation: Mapping[str, Any], dtype: torch.dtype) -> None:
    requirement = "the metrics are those of the tokens that count"
    case = dataclasses.replace(case, micro_batches=_MICRO_BATCHES)
    metrics, expected = _run(adapter, case, requirement).metrics, _reference(case, normalisation)
    values = {
        "kl_before": expected.step.kl_before,
        "kl_after": expected.step.kl_after,
        "projected_fraction": expected.step.projected.double(),
        "regression": expected.step.regression.detach(),
    }
    tolerance = _tolerance(case, dtype)
    for name in METRICS:
        assert name in metrics, f"{_where(requirement, case)}: {name} is missing, got {', '.join(metrics) or 'none'}"
        means = [_mean(values[name], expected, how) for how in ({"aggregation": "token_mean"}, normalisation)]
        found = float(metrics[name])
        assert any(abs(found - mean) <= tolerance * mean for mean in means), (
            f"{_where(requirement, case)}: {name} is {found:.6g}, not {means[0]:.6g}. Likely, it is a mean over "
            "micro-batches, or tokens that do not count are in it"
        )


def _mean(values: Tensor, expected: _Expected, normalisation: Mapping[str, Any]) -> float:
    step = dataclasses.replace(expected.step, regression=values)
    zeros = torch.zeros(len(values), dtype=values.dtype)
    return float(troll_loss(step, zeros, expected.mask, **normalisation)[0].detach())
