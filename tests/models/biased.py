"""The config.json of small models whose scores have a bias for the distance (ALiBi), as they were published."""

from typing import Any

VOCAB = 320

BLOOM: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
    "model_type": "bloom", "n_embed": 96, "n_inner": None, "n_layer": 3, "num_attention_heads": 6, "offset_alibi": 100,
    "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 512, "skip_bias_add": True, "skip_bias_add_qkv": False,
    "transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip

MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch",
    "attn_pdrop": 0, "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": 1.5,
    "prefix_lm": False, "qk_ln": False, "softmax_scale": None}, "d_model": 64, "emb_pdrop": 0,
    "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"emb_init_std": None, "fan_mode": "fan_in",
    "init_div_is_residual": True, "name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True,
    "logit_scale": None, "max_seq_len": 512, "model_type": "mpt", "n_heads": 4, "n_layers": 3, "no_bias": True,
    "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "float32", "transformers_version": "4.28.1", "use_cache": False, "verbose": 0, "vocab_size": VOCAB,
}  # fmt: skip
