"""A small random model of every causal language model that transformers knows."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 48

#: The sizes under all names that configurations have for them.
SMALL: dict[str, Any] = (
    dict.fromkeys(["vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"], VOCABULARY)
    | dict.fromkeys(["hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "hc_lowrank"], 32)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"], 48)
    | dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"], 2)
    | dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads"], 2)
    | dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads", "index_n_heads", "n_shared_experts"], 2)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 64)
    | dict.fromkeys(["head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 16)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
    | dict.fromkeys(
        ["moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "index_head_dim"], 32
    )
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "is_decoder": True}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "git": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "ministral3": {  # rotary positions, and queries whose scale depends on the position itself
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 4,
        }
    },
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 16,
        "feed_forward_size": 48,
    },
    "roc_bert": {"pronunciation_vocab_size": 48, "shape_vocab_size": 48},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}

#: Models that are not made: their other parts are large, or they are not models of text.
NOT_MADE = {
    "blt": "its patcher, encoder and decoder have configurations of their own",
    "gemma4_assistant": "it reads the cache of another model",
    "musicgen": "an encoder, a decoder and a codec of audio",
    "musicgen_melody": "an encoder, a decoder and a codec of audio",
    "phi4_multimodal": "its towers for images and sound have no small configuration",
}


#: All model types with a causal language model.
KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Skips the test of a kind that cannot be made small."""
    config_class: Any = CONFIG_MAPPING[kind]
    if kind in NOT_MADE:
        pytest.skip(NOT_MADE[kind])
    if "text_config" in config_class.sub_configs:
        pytest.skip(f"the text model of {kind} has a model type of its own")
    fields = config_class().to_dict().keys() | config_class.attribute_map.keys()
    sizes = {name: value for name, value in SMALL.items() if name in fields}
    return config_class(**(sizes | OWN.get(kind, {}) | changes))


def small_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model without dropout, whose weights are large enough that it tells tokens and positions apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
