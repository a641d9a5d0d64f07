"""The estimates against what the CPU's allocator reports while the same thing runs on real tensors."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import troll
from benchmarks import memory_without_data as memory
from benchmarks.memory_without_data import Batch, Network, UnknownMemory, optimiser_bytes

#: How far an estimate may be from the allocator's peak. docs/performance.md states it.
ACCURACY = 0.15

ROWS, PROMPT, COMPLETION, TOP_K = 4, 32, 96, 16
SIZES: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "pad_token_id": 0}
QWEN3 = Qwen3Config(**SIZES, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
CLASSES: dict[type, Any] = {Qwen3Config: Qwen3ForCausalLM, LlamaConfig: LlamaForCausalLM}
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


def measured_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator had handed out at once during a call, inside kernels too."""
    run()  # what is set up at the first call does not count
    return peak_of_one(run)


def peak_of_one(run: Callable[[], object]) -> int:
    """The same of a first call."""
    gc.collect()  # or what earlier tests have left is freed meanwhile, and subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def batch(in_bf16: bool, rows: int = ROWS, prompt: int = PROMPT, completion: int = COMPLETION) -> Batch:
    return Batch(rows, prompt, completion, torch.bfloat16 if in_bf16 else None)


def model_of(config: PreTrainedConfig, lora: bool = False, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    model = CLASSES[type(config)](config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not lora:
        return model
    if checkpointing:
        model.enable_input_require_grads()
    return get_peft_model(model, LORA)


def bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def head_of(model: Any, ids: Tensor) -> troll.LMHead:
    """The source of the completions' logits."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    hidden = base.get_decoder()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    scored = hidden.last_hidden_state[:, -COMPLETION - 1 : -1].flatten(0, 1)
    return troll.LMHead(scored, base.get_output_embeddings().weight)


def micro_batch(model: Any, in_bf16: bool) -> Callable[[], Tensor]:
    """One micro-batch of TROLL's loss, as a function of nothing."""
    ids = torch.randint(1, 4096, (ROWS, PROMPT + COMPLETION))
    with torch.no_grad(), batch(in_bf16).casting():
        old = troll.capture(head_of(model, ids), ids[:, -COMPLETION:].flatten(), top_k=TOP_K)

    def loss() -> Tensor:
        with batch(in_bf16).casting():
            step = troll.trust_region_step(head_of(model, ids), old)
        total = (step.log_ratio.exp() + step.regression).mean()
        total.backward()
        return total.detach()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(("config", "accumulates"), [(QWEN3, True), (LLAMA, False)], ids=["qwen3", "llama"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("in_bf16", [False, True], ids=["float32", "autocast"])
def test_update_takes_what_was_estimated(config, accumulates, lora, checkpointing, in_bf16):
    network = Network(config, peft=LORA if lora else None, checkpointing=checkpointing)
    weights = memory.parameters(network)
    found = memory.update(network, batch(in_bf16), TOP_K, accumulates)

    model = model_of(config, lora, checkpointing)
    trained = [p for p in model.parameters() if p.requires_grad]
    loss, optimizer = micro_batch(model, in_bf16), torch.optim.AdamW(trained, fused=True)
    loss()
    optimizer.step()
    state = bytes_of(x for values in optimizer.state.values() for x in values.values())
    assert weights.optimiser == pytest.approx(state, rel=0.01)

    def one_update() -> None:
        loss()
        if accumulates:
            loss()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    optimizer.zero_grad(set_to_none=True)
    peak = measured_peak(one_update)
    # Without weights and moments, which are known exactly, so that they cannot hide a wrong count of the rest.
    assert weights.gradients + found == pytest.approx(peak, rel=ACCURACY)


def test_mixture_of_experts_takes_what_was_estimated() -> None:
    config = Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, architectures=["Qwen3MoeForCausalLM"]
    )
    network, model = Network(config), Qwen3MoeForCausalLM(config).train()
    weights = memory.parameters(network)
    assert weights.weights == bytes_of(model.parameters())
    loss = micro_batch(model, in_bf16=False)

    def one_update() -> None:
        loss()
        model.zero_grad(set_to_none=True)

    found = memory.update(network, batch(False), TOP_K, accumulates=False)
    assert weights.gradients + found == pytest.approx(measured_peak(one_update), rel=ACCURACY)


def test_reward_model_takes_what_was_estimated() -> None:
    config = Qwen3Config(**SIZES, architectures=["Qwen3ForSequenceClassification"])
    config.num_labels, config.use_cache = 1, False  # as load_reward_model has it
    model, ids = Qwen3ForSequenceClassification(config).eval(), torch.randint(1, 4096, (16, 128))

    def score() -> None:
        with torch.no_grad():
            model(ids, attention_mask=torch.ones_like(ids))

    assert memory.score(Network(config), Batch(16, 32, 96), None) == pytest.approx(measured_peak(score), rel=ACCURACY)


def test_parameters_counts_quantised_weights() -> None:
    model = model_of(LLAMA)
    linear = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    others = sum(p.numel() for p in model.parameters()) - linear
    adapted = memory.parameters(Network(LLAMA, torch.bfloat16, LORA, 4))
    assert adapted.weights - adapted.gradients == pytest.approx(linear * (0.5 + 4 / 64) + 2 * others, abs=100)
    assert adapted.gradients == 4 * (adapted.numbers - linear - others)  # peft keeps the adapter in float32


def test_parameters_have_the_dtype_of_the_network() -> None:
    config = Qwen3Config(**SIZES, architectures=["Qwen3ForSequenceClassification"], dtype="bfloat16")
    found = memory.parameters(Network(config, torch.float32))
    assert found.weights == 4 * found.numbers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_torch_fused", 8000),
        ("adamw_8bit", 2000),
        ("paged_lion_8bit", 1000),
        ("adamw_torch_4bit", 1000),
        ("lion_32bit", 4000),
        ("sgd", 0),
        ("adafactor", 4 * (10 + 90 + 100)),
        ("a new one", 8000),  # as AdamW, to be on the safe side
    ],
)
def test_optimiser_bytes(name: str, expected: int) -> None:
    assert optimiser_bytes(name, [torch.empty(10, 90), torch.empty(100)]) == expected
    in_bf16 = [torch.empty(1000, dtype=torch.bfloat16)]
    assert optimiser_bytes("adamw_torch", in_bf16) == 4000  # moments have the dtype of the weights


def needs_data(self: object, input_ids: Tensor, **_: object) -> None:
    input_ids.sum().item()


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (LlamaModel, "forward", needs_data, "memory of a llama model cannot be estimated"),
        (memory, "_MISSING", ["_pre_fw_hook"], r"the MemTracker of torch 2\..* has no _pre_fw_hook"),
    ],
)
def test_score_names_what_cannot_be_estimated(owner, name, value, message, monkeypatch):
    assert memory._MISSING == []
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(UnknownMemory, match=message):
        memory.score(Network(LLAMA), batch(False, rows=3), TOP_K)


def test_parameters_leaves_random_numbers_as_they_are() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    memory.parameters(Network(QWEN3, torch.bfloat16, LORA))
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("in_bf16", [False, True], ids=["float32", "autocast"])
def test_capture_takes_what_was_estimated(in_bf16: bool) -> None:
    model = model_of(QWEN3)
    ids = torch.randint(1, 4096, (ROWS, PROMPT + COMPLETION))

    def capture() -> None:
        with torch.no_grad(), batch(in_bf16).casting():
            troll.capture(head_of(model, ids), ids[:, -COMPLETION:].flatten(), top_k=TOP_K)

    estimated = memory.score(Network(QWEN3), batch(in_bf16), TOP_K)
    assert estimated == pytest.approx(measured_peak(capture), rel=ACCURACY)


@pytest.mark.parametrize(
    ("config", "in_bf16", "prompt", "completion"),
    [
        (QWEN3, False, 120, 8),
        pytest.param(LLAMA, True, 120, 8, marks=pytest.mark.slow),
        pytest.param(LLAMA, False, 16, 64, marks=pytest.mark.slow),
        pytest.param(QWEN3, True, 16, 64, marks=pytest.mark.slow),
    ],
)
def test_generation_takes_what_was_estimated(config, in_bf16, prompt, completion):
    rows = 32
    model = model_of(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    ids = torch.randint(1, 4096, (rows, prompt))
    forward = type(model).forward

    @functools.wraps(forward)
    def cast_forward(*args: Any, **kwargs: Any) -> Any:  # as accelerate has it
        with batch(in_bf16).casting():
            return forward(model, *args, **kwargs)

    def generate() -> Tensor:
        settings = GenerationConfig(max_new_tokens=completion, do_sample=True, top_k=0, eos_token_id=None)
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    model.forward = cast_forward
    assert generate().shape == (rows, prompt + completion)
    found = memory.generation(Network(config), batch(in_bf16, rows, prompt, completion))
    assert sum(found) == pytest.approx(measured_peak(generate), rel=ACCURACY)
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert found[0] == pytest.approx(cache * (prompt + completion) / prompt, rel=0.05)
