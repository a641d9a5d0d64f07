"""The old policy and the trust region of a Hugging Face model, for loops of one's own."""

from typing import Any

import pytest
import torch

import troll
from tests.tolerance import within
from tests.troll.huggingface.heads import batch, captured, scored
from tests.troll.trl import tiny
from tests.troll.trl.tiny import assert_same_gradients, gradients, move
from troll import Constraint, Truncation, huggingface

BOUND = 0.01


def moved() -> tuple[Any, dict[str, Any], troll.SparsePolicy]:
    model, inputs = tiny.make_model("llama"), batch()
    old = captured(model, inputs, 0.7)
    move(model, 0.05)
    return model, inputs, old


def logits_of(model: Any, inputs: dict[str, Any], temperature: float = 0.7) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=inputs["input_ids"]).logits[:, :-1] / temperature
    return logits


@pytest.mark.parametrize(
    ("pull", "scope", "bound"),
    [
        ("projection", "token", torch.tensor([[0.005], [0.02]])),
        ("proximal", "token", BOUND),
        ("projection", "sequence", BOUND),
    ],
    ids=["a bound each", "proximal", "sequence"],
)
def test_a_loop_of_ones_own_is_that_of_the_logits(pull, scope, bound):
    model, inputs, old = moved()
    mask, advantages = scored(inputs), torch.tensor([1.0, -0.5])
    constraint = Constraint.sequence(mask) if scope == "sequence" else None
    options = {"kl_bound": bound, "pull": pull, "constraint": constraint, "entropy": True}
    step = huggingface.trust_region_step(model, **inputs, old=old, temperature=0.7, **options)
    loss, metrics = troll.troll_loss(step, advantages, mask)
    loss.backward()
    actual = gradients(model)
    model.zero_grad()

    expected = troll.trust_region_step(logits_of(model, inputs), old, **options)
    expected_loss, expected_metrics = troll.troll_loss(expected, advantages, mask)
    expected_loss.backward()
    assert bool(step.projected[mask].any())
    torch.testing.assert_close(loss, expected_loss, rtol=within(1e-5), atol=within(1e-6))
    assert_same_gradients(actual, gradients(model))
    assert metrics.keys() == expected_metrics.keys()
    for name in ("log_ratio", "regression", "log_prob", "kl_before", "entropy"):
        values, wanted = getattr(step, name), getattr(expected, name)
        torch.testing.assert_close(values[mask], wanted[mask], rtol=1e-4, atol=within(1e-5))
        assert not values[~mask].any()


def test_what_is_not_counted_is_certain():
    _, inputs, old = moved()
    outside = old[~scored(inputs)]
    assert (outside.log_prob == 0).all()
    torch.testing.assert_close(outside.outcomes.exp().sum(-1), torch.ones(len(outside.slot)))
    assert (outside.token_ids[:, 0] == 0).all() and (outside.token_ids[:, 1:] == -1).all()
    assert old.shape == scored(inputs).shape


def test_truncated_step_is_that_of_logits_on_the_kept_set():
    model, inputs = tiny.make_model("llama"), batch()
    mask, truncation = scored(inputs), Truncation(top_p=0.9)
    with torch.no_grad():
        before = logits_of(model, inputs)
    options: dict[str, Any] = {"top_k": before.shape[-1], "truncation": truncation}
    old = huggingface.capture(model, **inputs, temperature=0.7, **options)
    same = huggingface.trust_region_step(model, **inputs, old=old, temperature=0.7)
    assert same.log_ratio[mask].abs().max() < within(1e-5)
    move(model, 0.05)
    step = huggingface.trust_region_step(model, **inputs, old=old, temperature=0.7)
    tokens = inputs["labels"][:, 1:].clamp(min=0)
    expected = troll.trust_region_step(logits_of(model, inputs), troll.capture(before, tokens, **options))
    for name in ("log_ratio", "regression", "kl_before", "log_prob", "kept_log_mass"):
        torch.testing.assert_close(
            getattr(step, name)[mask], getattr(expected, name)[mask], rtol=1e-4, atol=within(1e-5)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, r"labels must be"),
        ({"input_ids": torch.zeros(8, dtype=torch.long)}, r"input_ids must be \(B, L\)"),
        ({"input_ids": torch.full((2, 8), 48)}, "token id 48, and the embedding of LlamaForCausalLM has 48 rows: call"),
        ({"kl_bound": 0.0}, "kl_bound"),
        ({"kl_bound": torch.full((2, 8), 0.05)}, r"kl_bound must broadcast to \(2, 7\)"),
        ({"constraint": Constraint.sequence(torch.ones(2, 8) > 0)}, r"the constraint's token positions must be \(2, 7"),
        ({"temperature": 1.0}, r"temperature must be that of the old policy's capture, 0\.7, got 1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    model, inputs, old = moved()
    with pytest.raises(ValueError, match=message):
        huggingface.trust_region_step(model, **(inputs | {"old": old, "temperature": 0.7} | change))


@pytest.mark.parametrize(
    ("rows", "message"), [([0], "old must hold the positions"), ([1, 0], "old must be of the same labels")]
)
def test_a_policy_of_other_sequences_is_refused(rows, message):
    model, inputs, old = moved()
    with pytest.raises(ValueError, match=message):
        huggingface.trust_region_step(model, **inputs, old=old[rows], temperature=0.7)


def test_a_policy_of_another_vocabulary_is_refused():
    _, inputs, old = moved()
    with pytest.raises(ValueError, match="60 tokens, got"):
        huggingface.trust_region_step(tiny.make_model("llama", vocab_size=60), **inputs, old=old, temperature=0.7)


def test_it_is_there_when_it_is_named(monkeypatch):
    monkeypatch.delattr(troll, "huggingface")  # as where nobody has imported it
    assert troll.huggingface is huggingface
    with pytest.raises(AttributeError, match="no attribute 'hugging_face'"):
        _ = troll.hugging_face


def test_mask_of_a_prompt_is_refused():
    model, inputs, old = moved()
    step = huggingface.trust_region_step(model, **inputs, old=old, temperature=0.7)
    advantages = torch.ones(2)
    for mask in (torch.ones_like(scored(inputs)), inputs["labels"][:, :-1] != -100):  # shifted by one, too
        with pytest.raises(ValueError, match=r"mask must count only tokens that the step scored, .*labels\[:, 1:\]"):
            troll.troll_loss(step, advantages, mask)
    part = scored(inputs).clone()
    part[0] = False
    troll.troll_loss(step, advantages, part)
