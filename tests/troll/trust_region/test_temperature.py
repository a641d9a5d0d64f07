"""The temperature of an old policy: what remembers it, and a step at another one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import troll
from troll import PackedPolicy, SparsePolicy

SHAPE, SIZE = (2, 3), 20


def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the weight of a head, and sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*SHAPE, 5, generator=generator), torch.randn(SIZE, 5, generator=generator)
    return hidden, weight, torch.randint(SIZE, SHAPE, generator=generator)


HIDDEN, WEIGHT, TOKENS = numbers()
LOGITS = HIDDEN @ WEIGHT.t()

#: Sources that divide by the temperature.
SOURCES: dict[str, Callable[[float], Any]] = {
    "logits": lambda temperature: troll.Logits(LOGITS, temperature=temperature),
    "rows of logits": lambda temperature: troll.Logits(
        LOGITS.flatten(0, 1), temperature=temperature, rows=torch.arange(6)
    ),
    "head": lambda temperature: troll.LMHead(HIDDEN, WEIGHT, temperature=temperature),
}


def refused(captured: float, at: float) -> Any:
    return pytest.raises(ValueError, match=re.escape(f"old policy's capture, {captured}, got {at}"))


@pytest.mark.parametrize(
    ("name", "top_k"), [("logits", None), ("logits", 4), ("rows of logits", None), ("head", None), ("head", 4)]
)
@pytest.mark.parametrize(("captured", "at"), [(1.0, 0.5), (1e-7, 2e-7), (30.0, 29.999)])
def test_step_refuses_another_temperature(name, captured, at, top_k):
    source = SOURCES[name]
    tokens = TOKENS.view(source(1.0).shape)
    old = troll.capture(source(captured), tokens, truncation=None if top_k is None else troll.Truncation(top_k=top_k))
    assert type(old.temperature) is float
    same = troll.trust_region_step(source(captured), old)
    assert same.log_ratio.abs().max() < 1e-3 and not same.projected.any()
    with refused(captured, at):
        troll.trust_region_step(source(at), old)
    with refused(captured, at):
        troll.trust_region_step(troll.log_probs_at(source(at), old.token_ids), old)


def test_step_does_not_compare_divided_logits():
    """A tensor, or logits that say so, may be at any temperature; so may an engine's log-probabilities."""
    for capture_at, step_at in ((0.5, None), (None, 0.5), (None, None)):
        sources = [
            LOGITS / 0.5 if temperature is None else troll.Logits(LOGITS, temperature=temperature)
            for temperature in (capture_at, step_at)
        ]
        old = troll.capture(sources[0], TOKENS)
        assert old.temperature == capture_at
        step = troll.trust_region_step(sources[1], old)
        assert step.log_ratio.abs().max() < 1e-5
    rows = torch.arange(6)
    old = troll.capture(troll.Logits(LOGITS.view(6, SIZE), temperature=None, rows=rows), TOKENS.flatten())
    assert old.temperature is None


def test_capture_top_has_its_temperature():
    log_probs = torch.log_softmax(LOGITS / 0.5, -1)
    own = log_probs.gather(-1, TOKENS.unsqueeze(-1)).squeeze(-1)
    ids = torch.arange(SIZE).expand(*SHAPE, SIZE)
    head = troll.LMHead(HIDDEN, WEIGHT, temperature=0.5)
    for temperature in (None, 0.5):
        old = troll.capture_top(ids, log_probs, TOKENS, own, SIZE, temperature=temperature)
        assert old.temperature == temperature
        assert troll.trust_region_step(head, old).log_ratio.abs().max() < 1e-5
    old = troll.capture_top(ids, log_probs, TOKENS, own, SIZE, temperature=1.0)
    with refused(1.0, 0.5):
        troll.trust_region_step(head, old)


def test_cat_has_temperature_if_all_have():
    known, unknown = (troll.capture(source, TOKENS, top_k=4) for source in (troll.Logits(LOGITS), LOGITS))

    def join(*policies: SparsePolicy) -> Any:
        return PackedPolicy.cat([*map(PackedPolicy.of, policies)])

    assert join(known, known).temperature == 1.0
    assert join(known, unknown).temperature is join(unknown, known).temperature is None
    other = troll.capture(troll.Logits(LOGITS, temperature=0.5), TOKENS, top_k=4)
    with pytest.raises(ValueError, match=r"share one temperature, got 1\.0, 0\.5"):
        join(known, unknown, other)
