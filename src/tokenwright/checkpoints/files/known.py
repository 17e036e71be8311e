"""Models whose config.json is built in: the keys that fix shapes, context and dtype, from their authors' files."""

from collections.abc import Mapping
from typing import Any

_LLAMA: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-05, "vocab_size": 128256}
_LLAMA_31: Mapping[str, Any] = {
    **_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN: Mapping[str, Any] = {
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "openai-community/gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257,
    },
    "meta-llama/Llama-2-7b-hf": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "meta-llama/Meta-Llama-3-8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA_31, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "meta-llama/Llama-3.1-70B": {
        **_LLAMA_31, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "meta-llama/Llama-3.1-405B": {
        **_LLAMA_31, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "Qwen/Qwen3-0.6B": {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8,
    },
    "mistralai/Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "google/gemma-3-4b-pt": {
        "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024},
    },
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}, "routed_scaling_factor": 2.5, "topk_group": 4,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip

_ALSO: Mapping[str, tuple[str, ...]] = {  # common names, and repositories with the same shapes
    "openai-community/gpt2": ("GPT-2",),
    "meta-llama/Llama-2-7b-hf": ("Llama-2-7B",),
    "meta-llama/Meta-Llama-3-8B": ("Llama-3-8B",),
    "meta-llama/Llama-3.1-8B": ("Meta-Llama-3.1-8B",),
    "meta-llama/Llama-3.1-70B": ("Meta-Llama-3.1-70B",),
    "meta-llama/Llama-3.1-405B": ("Meta-Llama-3.1-405B",),
    "mistralai/Mistral-7B-v0.1": ("Mistral-7B",),
    "google/gemma-3-4b-pt": ("Gemma-3-4B", "gemma-3-4b-it"),
}


def _names() -> dict[str, str]:
    found = {}
    for full in KNOWN:
        owner, name = full.split("/")
        for one in (name, *_ALSO.get(full, ())):
            found[one.lower()] = found[f"{owner}/{one}".lower()] = full
    return found


_NAMES = _names()


def known_name(text: str) -> str | None:
    """The full name of a known model, from its name in any case, with or without the owner; or None."""
    return _NAMES.get(text.lower())
