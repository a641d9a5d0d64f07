"""The fused head in the model's forward: TRL's own numbers, where and how its weights are gathered, what it costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import PromptTuningConfig
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

import troll.trl.fused_head as fused_head_module
from tests.tolerance import within
from tests.trl import tiny
from tests.trl.distributed_worker import SameRollouts
from tests.trl.heads import MODELS, batch, captured_support, pull, with_heads
from tests.trl.tiny import assert_same_gradients, gradients, logged
from troll.trl.fused_head import PolicyOutput, add_policy_head
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.reading import head as head_module


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder."""
    monkeypatch.setattr(head_module, "TOKEN_TILE", 4)
    monkeypatch.setitem(head_module.WHOLE_ROWS, "cpu", 3 * len(tiny.VOCABULARY))
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 20)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_of_trls_own_head(model, tail):
    model, inputs = with_heads(MODELS[model](), tail, temperature=0.7), batch()
    expected = model(**inputs)
    pull(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()

    output = model(**inputs, old_support=captured_support(model, inputs))
    assert (type(expected), type(output)) == (FusedCausalLMOutput, PolicyOutput)
    torch.testing.assert_close(output.log_probs, expected.log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(output.label_mask, expected.label_mask)
    pull(output).backward()
    assert_same_gradients(gradients(model), expected_gradients)

    with torch.no_grad():
        capture = model(**inputs, capture_policy=True)
    torch.testing.assert_close(capture.log_probs, expected.log_probs.detach(), rtol=1e-6, atol=1e-6)
    assert capture.entropy is None
    assert capture.vocab_size == output.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("model", ["plain", "tied", "softcap"])
@pytest.mark.parametrize(
    ("weights", "autocast", "in_float32"),
    [
        (torch.float32, True, False),
        (torch.float32, True, True),
        (torch.bfloat16, False, False),
        (torch.bfloat16, False, True),
    ],
    ids=["autocast", "autocast, float32 head", "bf16 weights", "bf16 weights, float32 head"],
)
def test_half_precision_is_that_of_trls_own_head(model, weights, autocast, in_float32):
    """Up to the rounding of the product, and everything after it in float32, a softcap included."""
    model = with_heads(MODELS[model]().to(weights), cast_lm_head_to_fp32=in_float32)
    inputs = batch()
    results = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for request in ({}, {"old_support": captured_support(model, inputs)}):
            model.zero_grad()
            output = model(**inputs, **request)
            pull(output).backward()
            results.append((output, gradients(model)))
    (expected, expected_gradients), (output, grads) = results
    assert output.log_probs.dtype == torch.float32
    # TRL rounds the logits of the support to the product's dtype.
    tolerance = 1e-5 if in_float32 else 2e-2
    torch.testing.assert_close(output.log_probs, expected.log_probs, rtol=1e-6, atol=tolerance)
    torch.testing.assert_close(output.entropy, expected.entropy, rtol=1e-6, atol=tolerance)
    # It rounds the gradient of each logit too, and from there it comes to the first layer's weights by some 16
    # products, each of which rounds it again, by half the spacing of bf16.
    assert_same_gradients(grads, expected_gradients, 16 * torch.finfo(torch.bfloat16).eps / 2)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_scored_positions_alone_reach_the_head(monkeypatch, tail):
    """TRL passes all positions on a CPU, and those alone with Triton: the outputs are the same, and so is the cost."""
    model, inputs = with_heads(tiny.make_model("llama"), tail), batch()
    lengths: list[int] = []
    for name in ("capture", "read"):
        monkeypatch.setattr(fused_head_module, name, spy(getattr(fused_head_module, name), lengths))
    results = []
    for triton in (False, True):
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device, triton=triton: triton)
        output = model(**inputs, old_support=captured_support(model, inputs))
        model.zero_grad()
        pull(output).backward()
        results.append((output, gradients(model)))
    scored = int((inputs["labels"] != -100).sum())
    assert lengths == [scored] * 4
    (first, first_gradients), (second, second_gradients) = results
    for name in ("log_probs", "entropy", "label_mask"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    for ours, theirs in zip(first.policy, second.policy, strict=True):
        assert torch.equal(ours, theirs)
        assert len(ours) == scored
    assert_same_gradients(second_gradients, first_gradients, 0)


def spy(function: Any, lengths: list[int]) -> Any:
    def spied(source: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(source.shape.numel())
        return function(source, *args, **kwargs)

    return spied


@pytest.mark.parametrize("triton", [False, True])
def test_nothing_scored_is_a_differentiable_zero(monkeypatch, triton):
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: triton)
    model, inputs = with_heads(tiny.make_model("llama")), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    output = model(**inputs, old_support=captured_support(model, inputs))
    assert output.outcomes().log_probs.shape == (0, 8)
    pull(output).backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_without_a_request_the_forward_is_trls():
    model: Any = tiny.make_model("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids, labels=ids)
    with_heads(model)
    actual = model(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    # `generate` refuses arguments that are not in the signature.
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 6)


def test_a_trl_that_does_not_have_this_head_is_named(monkeypatch):
    with pytest.raises(RuntimeError, match=r"in TRL 1\.16\.\d+ LlamaForCausalLM\.forward does not call"):
        add_policy_head(tiny.make_model("llama"), top_k=8, mass_threshold=1e-3, tail="bucket")
    model = tiny.make_model("llama")
    add_fused_lm_head(model)
    monkeypatch.delattr(trl_utils, fused_head_module.CHUNKED_LOG_PROB_FUNCTION)
    with pytest.raises(RuntimeError, match=r"does not call _ChunkedLogProbFunction"):
        add_policy_head(model, top_k=8, mass_threshold=1e-3, tail="bucket")


# ---------------------------------------------------------------------------------------------------------------------
# Weights that are elsewhere, adapters that add tokens


@pytest.mark.parametrize("model", ["plain", "biased"])
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_partitioned_weights_are_gathered_in_forward_and_backward(monkeypatch, model, tail):
    """As under ZeRO-3, but NaN instead of empty: outside the context that TRL enters, the head has no weights."""
    whole, parted, inputs = with_heads(MODELS[model](), tail), with_heads(MODELS[model](), tail), batch()
    parted.load_state_dict(whole.state_dict())
    support = captured_support(whole, inputs)
    pull(whole(**inputs, old_support=support)).backward()

    parameters = list(parted.get_output_embeddings().parameters())
    full = [parameter.detach().clone() for parameter in parameters]
    entered = 0

    @contextmanager
    def gather(*requested: torch.nn.Parameter | None) -> Iterator[None]:
        nonlocal entered
        # deepspeed keeps what it knows on the parameter itself.
        assert [id(parameter) for parameter in requested if parameter is not None] == list(map(id, parameters))
        if not parameters[0].isnan().any():  # within another one
            yield
            return
        entered += 1
        for parameter, data in zip(parameters, full, strict=True):
            parameter.data.copy_(data)
        yield
        part()

    def part() -> None:
        for parameter in parameters:
            parameter.data.fill_(torch.nan)

    for module in (trl_utils, fused_head_module):
        monkeypatch.setattr(module, "maybe_gather_lm_head_ctx", gather)
    part()
    for ours, theirs in zip(captured_support(parted, inputs), support, strict=True):
        assert torch.equal(ours, theirs)
    loss = pull(parted(**inputs, old_support=support))
    assert entered == 2
    assert parameters[0].isnan().all()
    loss.backward()
    assert entered == 3
    assert parameters[0].isnan().all()
    assert_same_gradients(gradients(parted), gradients(whole), 0)


def test_prompt_learning_adds_tokens_in_front(make):
    """PEFT prepends virtual tokens and their labels: the old policy still stands at the completion's tokens."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make(peft_config=config, kl_bound=1e-3, learning_rate=0.5, steps_per_generation=4, max_steps=4)
    trainer.train()
    assert logged(trainer, "trust_region/kl_before_max")[0] < within(1e-6)
    assert logged(trainer, "trust_region/kl_before_max")[-1] > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# Cost


@pytest.mark.parametrize("settings", [{}, {"tail": "floor"}, {"entropy_coef": 0.1}, {"beta": 0.1}], ids=str)
def test_training_makes_no_tensor_of_tokens_by_vocabulary(make, monkeypatch, settings):
    """Neither capture nor update, the loss and its backward included."""
    vocab_size, hidden_size, largest = 1111, 42, 0
    model = tiny.make_model("llama", vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=1)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                # The head itself and its gradient; no number of tokens here is the hidden size.
                if isinstance(tensor, Tensor) and hidden_size not in tensor.shape:
                    largest = max(largest, tensor.numel())
            return out

    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 128)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 8)
    if "beta" in settings:
        path = make.output_dir / "reference"
        model.save_pretrained(path)
        model.config._name_or_path = str(path)
    trainer = make(SameRollouts, model, kl_bound=0.01, max_steps=2, support_top_k=8, **settings)
    with Watch():
        trainer.train()
    assert max(logged(trainer, "trust_region/projected_fraction")) > 0
    assert 0 < largest < 4 * vocab_size  # eight tokens at least


def test_what_the_head_reads_is_kept_in_float32(make, monkeypatch):
    """bf16 autocast ends before the projection: log-probabilities of half precision would be off by 0.02."""
    dtypes = []
    original = PackedPolicy.of

    def spy(policy: SparsePolicy) -> PackedPolicy:
        dtypes.append(policy.log_probs.dtype)
        return original(policy)

    monkeypatch.setattr(PackedPolicy, "of", spy)
    make(bf16=True, max_steps=2).train()
    assert dtypes
    assert set(dtypes) == {torch.float32}
