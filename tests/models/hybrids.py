"""The config.json of small hybrid models: layers that keep a state beside layers with attention."""

from typing import Any

VOCAB = 320

LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 144,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 32, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "conv_use_xavier_init": True,
    "eos_token_id": 2, "full_attn_idxs": [2], "hidden_size": 64, "initializer_range": 0.02,
    "max_position_embeddings": 512, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 4,
    "num_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "float32", "transformers_version": "4.54.0.dev0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": VOCAB,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {"lfm2": LFM2}
TYPES = {config["model_type"] for config in CONFIGS.values()}
