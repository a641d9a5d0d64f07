"""The old policy and the trust region of a Hugging Face model, for loops of one's own."""

from typing import Any

import pytest
import torch

import troll
from tests.tolerance import within
from tests.troll.huggingface.heads import CAPTURE, batch, captured, scored
from tests.troll.trl import tiny
from tests.troll.trl.tiny import assert_same_gradients, gradients, move
from troll import Constraint, Truncation, huggingface
from troll.huggingface.dropout import dropout_rates

BOUND = 0.01


def moved(architecture: str = "llama", temperature: float = 0.7) -> tuple[Any, dict[str, Any], troll.SparsePolicy]:
    model, inputs = tiny.make_model(architecture), batch()
    old = captured(model, inputs, temperature)
    move(model, 0.05)
    return model, inputs, old


def logits_of(model: Any, inputs: dict[str, Any], temperature: float = 0.7) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=inputs["input_ids"]).logits[:, :-1] / temperature
    return logits


@pytest.mark.parametrize("pull", ["projection", "proximal"])
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("bound", [BOUND, torch.tensor([[0.005], [0.02]])], ids=["one bound", "a bound each"])
def test_a_loop_of_ones_own_is_that_of_the_logits(pull, scope, bound):
    model, inputs, old = moved()
    mask, advantages = scored(inputs), torch.tensor([1.0, -0.5])
    constraint = Constraint.sequence(mask) if scope == "sequence" else None
    options = {"kl_bound": bound if scope == "token" else BOUND, "pull": pull, "constraint": constraint}
    step = huggingface.trust_region_step(model, **inputs, old=old, temperature=0.7, entropy=True, **options)
    assert step.log_ratio.shape == mask.shape
    loss, metrics = troll.troll_loss(step, advantages, mask)
    loss.backward()
    actual = gradients(model)
    model.zero_grad()

    expected = troll.trust_region_step(logits_of(model, inputs), old, entropy=True, **options)
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


def test_padding_is_masked_and_more_inputs_go_to_the_model():
    model, inputs, _ = moved()
    shifted = {name: torch.nn.functional.pad(value, (2, 0)) for name, value in inputs.items()}
    shifted["labels"][:, :2] = -100
    mask = torch.ones_like(shifted["input_ids"])
    mask[:, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    options: dict[str, Any] = {**CAPTURE, **shifted, "position_ids": positions}
    padded = huggingface.capture(model, attention_mask=mask, **options)
    plain = captured(model, inputs)
    torch.testing.assert_close(padded.log_prob[:, 2:], plain.log_prob, rtol=1e-4, atol=within(1e-5))


def test_a_policy_of_inference_mode_has_the_step_of_any_other():
    model, inputs = tiny.make_model("llama"), batch()
    steps = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            old = captured(model, inputs)
        for step in (
            huggingface.trust_region_step(model, **inputs, old=old),
            troll.trust_region_step(logits_of(model, inputs, 1.0), troll.PackedPolicy.of(old).unpack()),
        ):
            step.log_ratio.sum().backward()
            steps.append((step.log_ratio.detach(), gradients(model)))
            model.zero_grad()
    torch.testing.assert_close(steps[:2], steps[2:], rtol=0, atol=0)


def test_truncated_sampling_has_the_step_of_the_logits_on_the_kept_set():
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
        (
            {"input_ids": torch.full((2, 8), 48)},
            r"token id 48, and the embedding of LlamaForCausalLM has 48 rows: call model.resize_token_embeddings",
        ),
        ({"kl_bound": 0.0}, "kl_bound"),
        ({"kl_bound": torch.full((2, 8), 0.05)}, r"kl_bound must broadcast to \(2, 7\)"),
        (
            {"constraint": Constraint.sequence(torch.ones(2, 8, dtype=torch.bool))},
            r"the constraint's token positions must be \(2, 7\)",
        ),
        ({"temperature": 0.5}, r"temperature must be that of the old policy's capture, 0\.7, got 0\.5"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    model, inputs, old = moved()
    with pytest.raises(ValueError, match=message):
        huggingface.trust_region_step(model, **(inputs | {"old": old, "temperature": 0.7} | change))


def test_a_policy_of_other_positions_or_another_vocabulary_is_refused():
    model, inputs, old = moved()
    with pytest.raises(ValueError, match="old must hold the positions"):
        huggingface.trust_region_step(model, **inputs, old=old[:1], temperature=0.7)
    other = tiny.make_model("llama", vocab_size=60)
    with pytest.raises(ValueError, match="60 tokens, got"):
        huggingface.trust_region_step(other, **inputs, old=old, temperature=0.7)


def test_a_policy_of_other_sequences_is_refused():
    model, inputs, old = moved()
    with pytest.raises(ValueError, match="old must be of the same labels"):
        huggingface.trust_region_step(model, **inputs, old=old[[1, 0]], temperature=0.7)


def test_it_is_there_when_it_is_named(monkeypatch):
    monkeypatch.delattr(troll, "huggingface")  # as where nobody has imported it
    assert troll.huggingface is huggingface
    with pytest.raises(AttributeError, match="no attribute 'hugging_face'"):
        _ = troll.hugging_face


@pytest.mark.parametrize(("temperature", "at"), [(1.0, 0.5), (0.7, 1.0)])
def test_step_at_another_temperature_is_refused(temperature, at):
    model, inputs, old = moved(temperature=temperature)
    assert old.temperature == temperature
    message = rf"temperature must be .* capture, {temperature}, got {at}"
    with pytest.raises(ValueError, match=message):
        huggingface.trust_region_step(model, **inputs, old=old, temperature=at)
    with pytest.raises(ValueError, match=message):
        troll.trust_region_step(troll.Logits(logits_of(model, inputs, 1.0), temperature=at), old)


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


@pytest.mark.parametrize(
    "name", ["dropout_ratio", "drop_rate", "drop_prob", "emb_pdrop", "ffn_dropout", "attn_dropout_p", "layerdrop"]
)
def test_dropout_rates_finds_the_rate_of_a_function_by_its_name(name):
    module: Any = torch.nn.Identity()
    setattr(module, name, 0.0)
    module.drop_threshold, module.token_dropout, module.p = 0.4, True, 0.5
    assert list(dropout_rates(module)) == []
    setattr(module, name, 0.1)
    assert list(dropout_rates(module)) == [(module, name)]


#: Rates of layers and of functions, by architecture.
DROPOUT = {"llama": {"attention_dropout": 0.1}, "gpt2": {"resid_pdrop": 0.1}, "opt": {"dropout": 0.1}}


@pytest.mark.parametrize("architecture", DROPOUT)
def test_active_dropout_is_named(architecture, recwarn):
    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}
    sizes |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    quiet = tiny.make_model(architecture, **(sizes | none)).train()
    model, inputs = tiny.make_model(architecture, **(sizes | none | DROPOUT[architecture])), batch()
    old = captured(model.eval(), inputs)
    huggingface.trust_region_step(model, **inputs, old=old)
    huggingface.trust_region_step(quiet, **inputs, old=captured(quiet, inputs))
    assert not [warning for warning in recwarn if "dropout" in str(warning.message)]
    named = r"training mode and has dropout \(.*=0\.1 of .*model\.eval\(\)"
    with pytest.warns(UserWarning, match=named):
        captured(model.train(), inputs)
    with pytest.warns(UserWarning, match=named):
        huggingface.trust_region_step(model, **inputs, old=old)
