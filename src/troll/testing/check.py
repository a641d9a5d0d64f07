"""The conformance test: requirement by requirement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from troll import troll_loss
from troll.testing.case import COUNTED, METRICS, UNREACHABLE, VOCAB_SIZE, Adapter, Case, Layout, Update, make_case
from troll.testing.reference import SOLVER, Expected, errors_of, mistakes, reference, tolerance_of

#: K and δ of a requirement: some tokens reach one of them first, and some the other.
_TOP_K, _MASS_THRESHOLD = 8, 0.1


def check_adapter(
    adapter: Adapter,
    *,
    aggregation: Literal["sequence_mean", "token_mean", "fixed_length"] = "sequence_mean",
    max_length: int | None = None,
    layouts: Sequence[Layout] = get_args(Layout),
    micro_batches: Sequence[Sequence[int]] = ((2, 0, 3), (1,)),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Checks that an adapter meets the requirements of docs/hosts.md, in every layout that it has.

    - Equal policies give the plain policy gradient.
    - A bound that no token reaches gives the policy gradient with the importance ratio, without a clip.
    - With zero advantages, only the regression is left, with its weight, aggregated like the policy term.
    - A bound that tokens exceed gives the loss and the gradient of the dense projection, computed in float64.
    - The old policy has the case's K and δ.
    - Several micro-batches, in another order than the rollout's, give the result of one.
    - Tokens that do not count have no gradient and no influence.
    - The metrics are those of the tokens that count.

    The tolerances follow from the adapter's arithmetic: a log-probability is a sum of V terms, and the solver's
    divergence is within 1e-3 · ε in float32.

    Args:
        adapter: The adapter to test, see [Adapter][troll.testing.Adapter].
        aggregation: How the trainer aggregates tokens, as in [troll_loss][troll.troll_loss].
        max_length: Tokens per sequence to divide by, for "fixed_length" only.
        layouts: The layouts that the trainer has.
        micro_batches: The four samples in micro-batches, by number. Give ((2, 0), (3, 1)) if the trainer's always have
            one size; those of different sizes find more.
        dtype: The dtype of the tables and of the adapter's arithmetic: float32 or float64.

    Raises:
        AssertionError: Names the requirement that is not met, what was found, and the likely mistake.
        ValueError: If the dtype is another one, a layout is missing or unknown, or the micro-batches are not those of
            four samples.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}: run the adapter in full precision")
    if not layouts or not set(layouts) <= set(get_args(Layout)):
        raise ValueError(f"layouts must be some of {', '.join(get_args(Layout))}, got {list(layouts)}")
    parts = tuple(tuple(numbers) for numbers in micro_batches)
    if sorted(number for numbers in parts for number in numbers) != [0, 1, 2, 3] or len(parts) < 2 or () in parts:
        raise ValueError(
            f"micro_batches must have each of the samples 0 to 3 once, in at least two, got {micro_batches}"
        )
    normalisation = {"aggregation": aggregation, "max_length": max_length}
    for layout in layouts:
        case = make_case(layout, dtype)
        for requirement, special, hint in _requirements(case, parts):
            _check_update(adapter, requirement, special, hint, normalisation)
        _check_ignored(adapter, case)
        _check_metrics(adapter, dataclasses.replace(case, micro_batches=parts), normalisation)


def _requirements(case: Case, micro_batches: tuple[tuple[int, ...], ...]) -> Iterator[tuple[str, Case, str]]:
    """The requirements: a name, a case, and the likely mistake of an adapter that fails."""
    yield (
        "equal policies give the plain policy gradient",
        dataclasses.replace(case, new_table=case.old_table.clone()),
        "the capture and the update do not read the same positions, or not with the same settings",
    )
    yield (
        "a bound that nothing reaches gives the policy gradient without a clip",
        dataclasses.replace(case, kl_bound=UNREACHABLE),
        "the ratio is not the exponential of step.log_ratio, or weights other than the advantage multiply it",
    )
    yield (
        "without advantages the regression is left, aggregated as the policy term is",
        dataclasses.replace(case, samples=tuple(dataclasses.replace(x, advantage=0.0) for x in case.samples)),
        "regression_weight * step.regression is not added to each token's term before the aggregation",
    )
    yield (
        "a bound that is reached gives the loss and gradient of the projection",
        case,
        "the old policy is not that of the same token, or the gradient does not pass through the step",
    )
    yield (
        "the old policy has the case's K and δ",
        dataclasses.replace(case, top_k=_TOP_K, mass_threshold=_MASS_THRESHOLD),
        "the capture has a K or δ of its own",
    )
    yield (
        "several micro-batches give what one gives",
        dataclasses.replace(case, micro_batches=micro_batches),
        "old policies are matched by position and not by sample, or a micro-batch is normalised by itself",
    )


def _check_update(adapter: Adapter, requirement: str, case: Case, hint: str, normalisation: Mapping[str, Any]) -> None:
    update, expected, tolerance = _run(adapter, case, requirement), reference(case, normalisation), tolerance_of(case)
    loss, gradient = errors_of(update, expected)
    if max(loss, gradient) <= tolerance:
        return
    # A mistake may project where nothing should be.
    wide = tolerance + SOLVER
    close = (text for text, wrong in mistakes(case, normalisation).items() if max(errors_of(update, wrong())) <= wide)
    mistake = next(close, None)
    likely = f"This is exactly the result if {mistake}" if mistake else f"Likely, {hint}"
    raise AssertionError(
        f"{_where(requirement, case)}: the loss is {float(update.loss):.6g}, not {expected.loss:.6g} "
        f"(off by {loss:.1e}), and the gradient is off by {gradient:.1e} of the largest; rounding and the solver "
        f"explain {tolerance:.1e}. {likely}"
    )


def _check_ignored(adapter: Adapter, case: Case) -> None:
    """Checks that rows that are read only at positions that do not count have no influence."""
    requirement, tolerance = "tokens that do not count have no gradient and no influence", tolerance_of(case)
    ignored = slice(COUNTED.start)  # all rows before those that count
    generator = torch.Generator().manual_seed(1)
    old_table, new_table = case.old_table.clone(), case.new_table.clone()
    for table in (old_table, new_table):
        table[ignored] = 10 * torch.randn(COUNTED.start, VOCAB_SIZE, generator=generator).to(table)
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
    assert change <= tolerance and moved <= tolerance, (  # which NaN is not
        f"{_where(requirement, case)}: other logits there change the loss by {moved:.1e}, and the gradient by "
        f"{change:.1e} of the largest. Likely, a normalisation reads all tokens"
    )


def _check_metrics(adapter: Adapter, case: Case, normalisation: Mapping[str, Any]) -> None:
    requirement, tolerance = "the metrics are those of the tokens that count", tolerance_of(case)
    metrics, expected = _run(adapter, case, requirement).metrics, reference(case, normalisation)
    values = {
        "kl_before": expected.step.kl_before,
        "kl_after": expected.step.kl_after,
        "projected_fraction": expected.step.projected.double(),
        "regression": expected.step.regression.detach(),
    }
    for name in METRICS:
        assert name in metrics, f"{_where(requirement, case)}: {name} is missing, got {', '.join(metrics) or 'none'}"
        means = [_mean(values[name], expected, how) for how in ({"aggregation": "token_mean"}, normalisation)]
        found = float(metrics[name])
        assert any(abs(found - mean) <= tolerance * mean for mean in means), (
            f"{_where(requirement, case)}: {name} is {found:.6g}, not {means[0]:.6g}. Likely, it is a mean over "
            "micro-batches, or tokens that do not count are in it"
        )


def _mean(values: Tensor, expected: Expected, normalisation: Mapping[str, Any]) -> float:
    step = dataclasses.replace(expected.step, regression=values)
    zeros = torch.zeros(len(values), dtype=values.dtype)
    return float(troll_loss(step, zeros, expected.mask, **normalisation)[0].detach())


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
