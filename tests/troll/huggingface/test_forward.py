"""The reading inside a model's forward: the model's own numbers, where its weights are gathered, what it refuses."""

import copy
import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BartForConditionalGeneration
from transformers.utils import ModelOutput
from trl.data_utils import prepare_multimodal_messages

from tests.tolerance import rounding, within
from tests.troll.huggingface.architectures import small_config, small_model
from tests.troll.huggingface.heads import MODELS, batch, captured, of_logits, pull, read
from tests.troll.trl import tiny, vision
from tests.troll.trl.tiny import assert_same_gradients, gradients
from troll import SparsePolicy, huggingface
from troll.huggingface import forward as forward_module
from troll.huggingface import head as head_of_model
from troll.huggingface.forward import ReadingOutput, causal_lm
from troll.trust_region.reading import head as head_module


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, and a remainder."""
    monkeypatch.setattr(head_module, "TOKEN_TILE", 4)
    monkeypatch.setitem(head_module.WHOLE_ROWS, "cpu", 3 * len(tiny.VOCABULARY))
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 20)


def assert_read_as_its_logits(
    model: Any,
    inputs: dict[str, Any],
    *,
    atol: float,
    gradient: float = tiny.GRADIENT_ERROR,
    temperature: float = 1.0,
) -> SparsePolicy:
    """What is read of a model, and its gradients, are what its own logits give; returns what is captured."""
    log_probs, entropy = of_logits(model, inputs, temperature)
    pull(log_probs, entropy).backward()
    expected = gradients(model)
    model.zero_grad()
    old = captured(model, inputs, temperature)
    step = read(model, inputs, old, temperature=temperature)
    assert step.log_prob.dtype == torch.float32
    for actual, wanted in ((step.log_prob, log_probs), (step.entropy, entropy), (old.log_prob, log_probs)):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=atol)
    pull(step.log_prob, step.entropy).backward()
    assert_same_gradients(gradients(model), expected, gradient)
    return old


@pytest.mark.parametrize("model", ["tied", "biased", "gemma2", "granite", "cohere"])
def test_numbers_are_those_of_the_models_own_logits(model):
    model = MODELS.get(model, lambda: tiny.make_model(model))()
    atol = within(rounding(tiny.COMMON["hidden_size"], 30))
    old = assert_read_as_its_logits(model, batch(), atol=atol, temperature=0.7)
    assert old.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_vision_language_model_is_read_with_its_images(family):
    model: Any = vision.make_model(family)
    processor: Any = vision.make_processor(family)
    examples = list(vision.make_dataset().select(range(2)))
    messages = [prepare_multimodal_messages(example["prompt"], images=[example["image"]]) for example in examples]
    inputs: Any = processor(
        images=[[example["image"]] for example in examples],
        text=[processor.apply_chat_template(each, add_generation_prompt=True) for each in messages],
        padding=True,
        return_tensors="pt",
    )
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :-3] = -100
    old = huggingface.capture(model, labels=labels, **inputs)
    step = huggingface.trust_region_step(model, labels=labels, old=old, kl_bound=torch.inf, **inputs)
    logits = model(**inputs).logits[:, :-1].float().log_softmax(-1)
    own = logits.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels[:, 1:] == -100, 0)
    torch.testing.assert_close(step.log_prob, own, rtol=0, atol=within(1e-5))
    step.log_prob.sum().backward()
    towers = [name for name in gradients(model) if ".vision_model." in name or ".visual." in name]
    assert max(float(gradients(model)[name].abs().max()) for name in towers) > 0


@pytest.mark.parametrize(("model", "autocast"), [("llama", True), ("tied", False), ("gemma2", True)])
def test_half_precision_is_that_of_the_models_own_logits(model, autocast):
    """Up to the rounding of the logits, of which the reading makes those of the support in float32."""
    made = MODELS.get(model, lambda: tiny.make_model(model))().to(torch.float32 if autocast else torch.bfloat16)
    # Every product between the logits and the first layer's weights rounds the gradient to half the spacing of bf16.
    gradient = 16 * torch.finfo(torch.bfloat16).eps / 2
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_read_as_its_logits(made, batch(), atol=5e-2, gradient=gradient)


@pytest.mark.parametrize(("kind", "head"), [("mamba", torch.bfloat16), ("hy_v4", torch.float32)])
def test_hidden_states_of_another_dtype_are_multiplied_as_the_model_does(kind, head):
    """Mamba's are float32 with weights in bf16; those of HY-V4 are bf16 with a head in float32."""
    model, inputs = small_model(kind).to(torch.bfloat16), batch()  # type: ignore[arg-type]
    model.get_output_embeddings().to(head)
    torch.testing.assert_close(captured(model, inputs).log_prob, of_logits(model, inputs)[0], rtol=0, atol=5e-2)


def test_an_encoder_is_refused():
    """Which reads the tokens that are scored."""
    config: Any = small_config("bart", is_decoder=False)
    with pytest.raises(ValueError, match="model must be causal, and BartForConditionalGeneration also reads"):
        captured(BartForConditionalGeneration(config), batch())


def test_nothing_scored_is_a_differentiable_zero():
    model, inputs = tiny.make_model("llama"), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    step = read(model, inputs, captured(model, inputs))
    assert not step.log_prob.any()
    pull(step.log_prob, step.entropy).backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_without_a_request_the_forward_is_the_models():
    model: Any = tiny.make_model("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids, labels=ids)
    captured(model, batch())
    actual = model(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    # `generate` refuses arguments that are not in the signature.
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 6)


@pytest.mark.parametrize("model", ["plain", "biased"])
def test_partitioned_weights_are_gathered_in_both_passes(monkeypatch, model):
    """As under ZeRO-3, but NaN instead of empty: outside the context that is entered, the head has no weights."""
    whole, parted, inputs = MODELS[model](), MODELS[model](), batch()
    parted.load_state_dict(whole.state_dict())
    old = captured(whole, inputs)
    step = read(whole, inputs, old)
    pull(step.log_prob, step.entropy).backward()
    captured(parted, inputs)  # the first reading looks at the logits, for which the head is whole

    parameters = list(parted.get_output_embeddings().parameters())
    full = [parameter.detach().clone() for parameter in parameters]
    entered = 0

    @contextmanager
    def gather(*requested: nn.Parameter | None) -> Iterator[None]:
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

    monkeypatch.setattr(head_of_model, "gathered", gather)
    part()
    again = captured(parted, inputs)
    assert torch.equal(again.token_ids, old.token_ids)
    step = read(parted, inputs, old)
    assert entered == 2
    assert parameters[0].isnan().all()
    pull(step.log_prob, step.entropy).backward()
    assert entered == 3
    assert parameters[0].isnan().all()
    assert_same_gradients(gradients(parted), gradients(whole), 0)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings)


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_are_part_of_what_is_read(settings):
    model: Any = get_peft_model(tiny.make_model("llama"), lora(**({"target_modules": ["q_proj"]} | settings)))
    inputs = batch()
    with torch.no_grad():  # of modules_to_save, the copy is what is trained
        model.get_base_model().get_output_embeddings().weight.mul_(0.9)
    assert_read_as_its_logits(model, inputs, atol=within(1e-5))
    with model.disable_adapter():
        torch.testing.assert_close(
            captured(model, inputs).log_prob, of_logits(model, inputs)[0].detach(), rtol=0, atol=within(1e-5)
        )


@pytest.mark.parametrize(
    ("indices", "tied"),
    [([4, 9], True), ({"lm_head": [4, 9]}, True), ({"embed_tokens": [4, 9], "lm_head": [4, 8]}, False)],
)
def test_single_trained_tokens_are_part_of_what_is_read(indices, tied):
    """Of the embedding, and of the head: by themselves, or because they are tied."""
    made = lora(target_modules=["q_proj"], trainable_token_indices=indices)
    model = tiny.adapted(tiny.make_model("llama", tie_word_embeddings=tied), made)
    assert_read_as_its_logits(model, batch(), atol=within(1e-5))


def test_a_prefix_is_seen_once():
    """PEFT passes a cache with the prefix, to which every pass of the model appends."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: Any = get_peft_model(tiny.make_model("llama"), config)
    inputs = batch()
    expected, _ = of_logits(model, inputs)
    for _ in range(2):
        torch.testing.assert_close(captured(model, inputs).log_prob, expected.detach(), rtol=0, atol=within(1e-5))


def saved_and_loaded(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_of_a_model_that_was_read_has_its_own_weights(copied):
    model, inputs = tiny.make_model("llama"), batch()
    before = captured(model, inputs)
    twin = copied(model)
    tiny.move(model, 0.1)
    expected, _ = of_logits(twin, inputs)
    torch.testing.assert_close(captured(twin, inputs).log_prob, expected.detach(), rtol=0, atol=within(1e-5))
    assert torch.equal(captured(twin, inputs).token_ids, before.token_ids)


def head_with(weight: Tensor) -> nn.Module:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def adapted_head(config: Any) -> Any:
    return tiny.adapted(tiny.make_model("llama", tie_word_embeddings=True), config).get_output_embeddings()


def sharded_head_of_trained_tokens() -> Any:
    head = adapted_head(lora(target_modules=["q_proj"], trainable_token_indices=[4, 9]))
    head_of_model.refuse_head(head)
    head.token_adapter.base_layer.weight.ds_id = 0  # ZeRO-3's
    return head


def offloaded_shards() -> Any:
    """A head as FSDP2 keeps it with `CPUOffloadPolicy`."""
    weight = Mock(spec=DTensor, is_meta=False, device=torch.device("cpu"))
    weight.device_mesh.device_type = "cuda"
    return SimpleNamespace(weight=weight)


UNREADABLE: dict[str, Any] = {
    "offloaded the LM head's shards": offloaded_shards,
    "is quantised": lambda: head_with(torch.zeros(49, 32, dtype=torch.int8)),
    "is offloaded": lambda: head_with(torch.zeros(49, 32, device="meta")),
    "must be a linear layer with a weight, got Sequential": nn.Sequential,
    "has an adapter .*of PEFT.* leave it out of target_modules": lambda: adapted_head(lora(target_modules=["lm_head"])),
    "has an adapter": lambda: adapted_head(
        IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[])
    ),
    "has trainable_token_indices, .* leave trainable_token_indices out": sharded_head_of_trained_tokens,
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_a_head_that_cannot_be_read_is_refused(words):
    with pytest.raises(ValueError, match=words):
        head_of_model.refuse_head(UNREADABLE[words]())


def doubled(output: Any) -> None:
    output.logits = 2 * output.logits


def masked(output: Any) -> None:
    output.logits[..., 10:] = -torch.inf


@pytest.mark.parametrize("change", [doubled, masked, "final_logit_softcapping", "logit_scale"])
def test_the_first_reading_finds_logits_that_are_not_the_heads(change):
    """As the model changes them, or as its configuration says and it does not."""
    model = tiny.make_model("llama")

    class Changed(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if not isinstance(change, str):
                change(output)
            return output

    model.__class__ = Changed
    if isinstance(change, str):
        setattr(model.config, change, 0.5)
    weight = model.get_output_embeddings().weight.data
    good = weight.clone()
    weight.fill_(torch.nan)
    captured(model, batch())  # NaN cannot be compared, so the next reading is
    weight.copy_(good)
    with pytest.raises(RuntimeError, match=r"logits of Changed are not those of its head: they differ by"):
        captured(model, batch())


def test_a_forward_without_logits_is_read():
    """There is nothing to compare with."""
    model = tiny.make_model("llama")
    expected = captured(tiny.make_model("llama"), batch())

    class Silent(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return ModelOutput(logits=None, last=super().forward(*args, **kwargs).logits)

    model.__class__ = Silent
    assert torch.equal(captured(model, batch()).log_probs, expected.log_probs)


@pytest.mark.parametrize(("keeps", "around"), [(True, False), (False, False), (False, True)])
def test_the_first_reading_makes_the_last_logits_only(keeps, around):
    lengths: list[int] = []
    llama: Any = type(tiny.make_model("llama"))

    class Plain(llama):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
            if around:
                hidden = self.model.__class__.forward(self.model, input_ids).last_hidden_state
            else:
                hidden = self.model(input_ids).last_hidden_state
            logits = self.lm_head(hidden[:, -logits_to_keep if keeps else 0 :])
            lengths.append(logits.shape[1])
            return ModelOutput(logits=logits)

    if not keeps:
        signature = inspect.signature(Plain.forward)
        parameters = [x for name, x in signature.parameters.items() if name != "logits_to_keep"]
        Plain.forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    model = tiny.make_model("llama")
    expected = captured(tiny.make_model("llama"), batch())
    model.__class__ = Plain
    assert torch.equal(captured(model, batch()).log_probs, expected.log_probs)
    assert lengths == [1]
    assert model(batch()["input_ids"]).logits.shape[1] == batch()["input_ids"].shape[1]  # afterwards as before


def test_a_decoder_that_bypasses_its_backbone_is_compared_once():
    """OPT's, in training mode without dropout: two readings, and one pass for the comparison."""
    model: Any = small_model("opt", dropout=0.0).train()
    passes: list[None] = []
    model.model.decoder.register_forward_hook(lambda *_: passes.append(None))
    for _ in range(2):
        captured(model, batch())
    assert len(passes) == 3


def test_a_forward_that_was_replaced_is_wrapped_again():
    model: Any = tiny.make_model("llama")
    expected = captured(model, batch())
    original = type(model).forward
    model.forward = lambda *args, **kwargs: original(model, *args, **kwargs)
    assert torch.equal(captured(model, batch()).log_probs, expected.log_probs)


def as_dict(module: nn.Module, args: Any, output: Any) -> Any:
    return dict(output)


def rounded(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, ReadingOutput):
        output.tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in output.tensors.items()}
    return output


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (as_dict, r"wrapper of LlamaForCausalLM changes what its forward returns to dict"),
        (rounded, r"rounded to torch\.bfloat16.*output_dtype=None"),
    ],
)
def test_a_wrapper_that_changes_what_comes_out_is_noticed(wrapper, words):
    model: Any = tiny.make_model("llama")
    model.register_forward_hook(wrapper)
    with pytest.raises(RuntimeError, match=words):
        captured(model, batch())


def test_a_model_in_mixed_precision_is_read_within_autocast():
    model: Any = tiny.make_model("llama")
    model._original_forward = model.forward  # as accelerate leaves it
    with pytest.raises(RuntimeError, match=r"accelerator\.autocast"):
        captured(model, batch())
    with torch.autocast("cpu", torch.bfloat16):
        assert captured(model, batch()).log_prob.isfinite().all()


def test_models_inside_of_wrappers_are_found():
    model = tiny.make_model("llama")
    for wrapped in (model, get_peft_model(model, lora(target_modules=["q_proj"])), nn.DataParallel(model)):
        assert causal_lm(wrapped) is model
    for other in (nn.Linear(2, 2), AutoModelForCausalLM.from_config(model.config).base_model):
        with pytest.raises(ValueError, match="model must"):
            causal_lm(other)


# The backend compiles nothing, so it works where compilers were switched off. The setting is undone by torch: pytest's
# monkeypatch would delete it, as an object's `__dict__` does not hold it.
@pytest.mark.slow
@torch._dynamo.config.patch(disable=False)
def test_a_compiled_model_is_read(monkeypatch):
    """The backbone is compiled, the tiles are not."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model, inputs = tiny.make_model("llama"), batch()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = captured(model, inputs)
    compiled: Any = torch.compile(model, backend=backend)
    assert torch.equal(captured(compiled, inputs).token_ids, expected.token_ids)
    step = read(compiled, inputs, expected)
    pull(step.log_prob, step.entropy).backward()
    assert graphs
    assert any("linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    assert forward_module.REQUEST not in inspect.signature(model.forward).parameters
