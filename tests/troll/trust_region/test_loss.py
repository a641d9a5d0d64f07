"""troll_loss and its aggregations, against the reference and values computed by hand."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import troll
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import MASK, array, random_step, some
from troll import TrustRegionStep, troll_loss
from troll.trust_region.metrics import step_tally

LEVELS: tuple[Any, ...] = ("token", "sequence")
AGGREGATIONS: tuple[Any, ...] = ("sequence_mean", "token_mean", "fixed_length")


def draw_advantages(per_token: bool = False) -> torch.Tensor:
    shape = (4, 5) if per_token else (4,)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def settings_of(aggregation: str) -> dict[str, Any]:
    return {"aggregation": aggregation, "max_length": 7 if aggregation == "fixed_length" else None}


@pytest.mark.parametrize(("per_token", "weight"), [(False, 0.3), (True, 0.0)])
@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "token_mean of 23"])
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_loss_agrees_with_the_reference(ratio_level, aggregation, per_token, weight):
    step, advantages = random_step(), draw_advantages(per_token)
    aggregation, _, num_tokens = aggregation.partition(" of ")
    options = {"regression_weight": weight, "ratio_level": ratio_level} | settings_of(aggregation)
    options["num_tokens"] = float(num_tokens) if num_tokens else None
    loss, _ = troll_loss(step, advantages, MASK, **options)
    arrays: Any = [array(x) for x in (step.log_ratio, step.regression, advantages, MASK)]
    assert loss.shape == ()
    assert loss.item() == pytest.approx(reference.loss(*arrays, **options), rel=1e-12)


@pytest.mark.parametrize(
    ("ratio_level", "aggregation", "expected"),
    [
        # Sequence 1: ratios 2 and 1/2, advantage 1, regression 0.1 and 0.3. Sequence 2: ratio 4, advantage −2, 0.2.
        ("token", "sequence_mean", ((-2 + 0.1 - 0.5 + 0.3) / 2 + (8 + 0.2)) / 2),
        ("token", "token_mean", ((-2 + 0.1 - 0.5 + 0.3) + (8 + 0.2)) / 3),
        ("token", "fixed_length", ((-2 + 0.1 - 0.5 + 0.3) + (8 + 0.2)) / (2 * 10)),
        # The geometric mean of 2 and 1/2 is 1.
        ("sequence", "sequence_mean", ((-1 + 0.1 - 1 + 0.3) / 2 + (8 + 0.2)) / 2),
        ("sequence", "token_mean", ((-1 + 0.1 - 1 + 0.3) + (8 + 0.2)) / 3),
        ("sequence", "fixed_length", ((-1 + 0.1 - 1 + 0.3) + (8 + 0.2)) / (2 * 10)),
    ],
)
def test_loss_by_hand(ratio_level, aggregation, expected):
    numbers = dict.fromkeys(("log_prob", "kl_before", "kl_after", "multiplier"), torch.zeros(2, 2))  # of no matter
    step = TrustRegionStep(
        log_ratio=torch.tensor([[math.log(2.0), math.log(0.5)], [math.log(4.0), 9.0]]),
        regression=torch.tensor([[0.1, 0.3], [0.2, 9.0]]),
        projected=torch.zeros(2, 2, dtype=torch.bool),
        **numbers,
    )
    mask = torch.tensor([[True, True], [True, False]])
    options = {"ratio_level": ratio_level, "aggregation": aggregation}
    options["max_length"] = 10 if aggregation == "fixed_length" else None
    loss, _ = troll_loss(step, torch.tensor([1.0, -2.0]), mask, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_loss_of_micro_batches_adds_up():
    """With the number of tokens of the whole batch, as a number or as a tensor that several processes agreed on."""
    step, advantages = random_step(), draw_advantages()
    whole, _ = troll_loss(step, advantages, MASK, aggregation="token_mean")
    tokens = int(MASK.sum())
    for num_tokens in (tokens, float(tokens), torch.tensor(tokens), torch.tensor(float(tokens))):
        options: dict[str, Any] = {"aggregation": "token_mean", "num_tokens": num_tokens}
        parts = [
            troll_loss(some(step, rows), advantages[rows], MASK[rows], **options)[0]
            for rows in (slice(0, 1), slice(1, 4))
        ]
        assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("num_tokens", [None, 0, 0.0, torch.tensor(0)])
def test_loss_of_no_token_is_zero(num_tokens: float | torch.Tensor | None):
    step, none = random_step(), torch.zeros_like(MASK)
    loss, _ = troll_loss(step, draw_advantages(), none, aggregation="token_mean", num_tokens=num_tokens)
    assert loss.item() == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_loss_gradient_agrees_with_reference(ratio_level, aggregation):
    """Against central differences of the reference's loss: the sequence ratio is differentiated as it stands."""
    step, advantages = random_step(), draw_advantages()
    options = {"regression_weight": 0.7, "ratio_level": ratio_level} | settings_of(aggregation)
    troll_loss(step, advantages, MASK, **options)[0].backward()

    def value(log_ratio: np.ndarray, regression: np.ndarray) -> float:
        return reference.loss(log_ratio, regression, array(advantages), array(MASK), **options)

    point = {"log_ratio": array(step.log_ratio), "regression": array(step.regression)}
    for name in point:
        gradient = getattr(step, name).grad
        assert gradient is not None
        for index in np.ndindex(4, 5):
            change = np.zeros((4, 5))
            change[index] = 1e-6
            up, down = point | {name: point[name] + change}, point | {name: point[name] - change}
            assert gradient[index].item() == pytest.approx((value(**up) - value(**down)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize(("per_token", "garbage"), [(True, math.nan), (True, math.inf), (False, -math.inf)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_loss_ignores_masked_positions(ratio_level, aggregation, per_token, garbage):
    advantages = draw_advantages(per_token)
    options = {"ratio_level": ratio_level} | settings_of(aggregation)
    clean_step, step = random_step(), random_step(garbage)
    clean, clean_metrics = troll_loss(clean_step, advantages, MASK, **options)
    clean.backward()
    if per_token:
        advantages = torch.where(MASK, advantages, garbage)
    loss, metrics = troll_loss(step, advantages, MASK, **options)
    loss.backward()
    torch.testing.assert_close(loss, clean, rtol=1e-12, atol=0)
    for name in ("log_ratio", "regression"):
        ours, theirs = getattr(step, name).grad, getattr(clean_step, name).grad
        assert not ours[~MASK].any()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for name, value in clean_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-12, atol=0, msg=name)


def test_loss_metrics_are_those_of_the_step():
    step = random_step()
    _, metrics = troll_loss(step, draw_advantages(), MASK, aggregation="token_mean", ratio_level="sequence")
    expected = step_tally(step, MASK).values(empty=0.0)
    assert metrics.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in metrics.items())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("sequences", [0, 2])
def test_loss_of_fully_masked_batch_is_zero(sequences, aggregation):
    logits = torch.randn(sequences, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    old = troll.capture(torch.zeros(sequences, 5, 7), torch.zeros(sequences, 5, dtype=torch.int64))
    step = troll.trust_region_step(logits, old)
    loss, metrics = troll_loss(step, torch.ones(sequences), torch.zeros(sequences, 5), **settings_of(aggregation))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()
    assert metrics.pop("kl_before_mean").isnan() and all(value.item() == 0 for value in metrics.values())


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("ratio_level must be one of token, sequence", {"ratio_level": "tokne"}),
        ("aggregation must be one of sequence_mean, token_mean, fixed_length", {"aggregation": "mean"}),
        ("max_length goes with aggregation 'fixed_length', got None", {"aggregation": "fixed_length"}),
        ("max_length goes with aggregation 'fixed_length', got 9 with 'token_mean'", {"max_length": 9}),
        ("max_length must be at least 1", {"aggregation": "fixed_length", "max_length": 0}),
        ("num_tokens goes with aggregation 'token_mean'", {"aggregation": "sequence_mean", "num_tokens": 9}),
        ("advantages must be (4) or (4, 5)", {"advantages": torch.zeros(5)}),
        ("advantages must be (4) or (4, 5)", {"advantages": torch.zeros(4, 4)}),
        ("mask must be (4, 5)", {"mask": torch.ones(4, 4, dtype=torch.bool)}),
        ("regression_weight must be at least 0", {"regression_weight": -0.1}),
        ("regression_weight must be at least 0", {"regression_weight": math.nan}),
        (
            "step must be (B, T), got (5)",
            {"step": some(random_step(), 0), "advantages": torch.zeros(5), "mask": MASK[0]},
        ),
    ],
    ids=range(12),
)
def test_loss_refuses_arguments_that_do_not_fit(message, change):
    arguments = {"step": random_step(), "advantages": torch.zeros(4), "mask": MASK, "aggregation": "token_mean"}
    with pytest.raises(ValueError, match=re.escape(message)):
        troll_loss(**(arguments | change))


def step_of(scored: torch.Tensor) -> TrustRegionStep:
    """A step that is about some tokens only."""
    return dataclasses.replace(random_step(), scored=scored)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_loss_refuses_mask_of_unscored_tokens(dtype):
    scored = MASK.bool().clone()
    at = tuple(scored.nonzero()[-1])
    options = settings_of("fixed_length")
    whole, _ = troll_loss(step_of(scored), draw_advantages(), scored.to(dtype), **options)
    assert torch.equal(whole, troll_loss(random_step(), draw_advantages(), scored, **options)[0])
    scored[at] = False
    part = scored.clone()
    troll_loss(step_of(MASK.bool()), draw_advantages(), part.to(dtype), **options)  # fewer are fine
    with pytest.raises(
        ValueError, match=rf"mask must count only tokens that the step scored, got 1 of {int(MASK.sum())}"
    ):
        troll_loss(step_of(scored), draw_advantages(), MASK.to(dtype), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU the mask is checked")
def test_loss_of_unscored_tokens_is_nan_on_gpu():
    scored = MASK.bool().clone()
    scored[tuple(scored.nonzero()[-1])] = False
    values = {name: x.detach().cuda() for name, x in vars(step_of(scored)).items() if x is not None}
    loss, metrics = troll_loss(TrustRegionStep(**values), draw_advantages().cuda(), MASK.cuda())
    assert loss.isnan() and metrics["nonfinite"] == 1
