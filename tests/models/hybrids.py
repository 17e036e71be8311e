"""The config.json of small hybrid models: layers that keep a state beside layers with attention."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 320
_COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
    "vocab_size": VOCAB,
}  # fmt: skip


def config_of(without: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A config.json as its family's files have it: the common keys but those in `without`, and its own `facts`."""
    lacking = without.split()
    return {name: one for name, one in _COMMON.items() if name not in lacking} | facts


LFM2 = config_of("attention_bias attention_dropout hidden_act intermediate_size rms_norm_eps tie_word_embeddings", {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 144,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 32, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "conv_use_xavier_init": True, "full_attn_idxs": [2],
    "model_type": "lfm2", "norm_eps": 1e-05, "num_heads": 4, "num_hidden_layers": 4, "rope_theta": 1000000.0,
    "transformers_version": "4.54.0.dev0", "use_pos_enc": True,
})  # fmt: skip

QWEN3_NEXT = config_of("pad_token_id", {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 32,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 24, "mlp_only_layers": [1], "model_type": "qwen3_next", "moe_intermediate_size": 40,
    "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 4,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48,
    "transformers_version": "4.57.0.dev0", "use_sliding_window": False,
})  # fmt: skip

QWEN3_5 = config_of("pad_token_id", {
    "architectures": ["Qwen3_5ForCausalLM"], "attn_output_gate": True, "full_attention_interval": 2, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_value_head_dim": 80, "mamba_ssm_dtype": "float32", "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_hidden_layers": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
    "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": True,
})  # fmt: skip

QWEN3_5_MOE: dict[str, Any] = {key: one for key, one in QWEN3_5.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "linear_value_head_dim": 16, "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48,
}  # fmt: skip

GRANITE4 = config_of("", {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
    "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 40,
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 0.8, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_experts_per_tok": 3, "num_hidden_layers": 4, "num_local_experts": 8,
    "output_router_logits": False, "position_embedding_type": "nope", "residual_multiplier": 0.9,
    "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 96,
    "tie_word_embeddings": True, "transformers_version": "4.56.0",
})  # fmt: skip

BAMBA = config_of("", {
    "architectures": ["BambaForCausalLM"], "attn_layer_indices": [2], "attn_rotary_emb": 16, "head_dim": 32,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 4, "mamba_proj_bias": True, "mlp_bias": False,
    "model_type": "bamba", "num_logits_to_keep": 1, "rope_theta": 10000.0, "transformers_version": "4.46.0",
    "use_mamba_kernels": True,
})  # fmt: skip

FALCON_H1 = config_of("", {
    "architectures": ["FalconH1ForCausalLM"], "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None, "embedding_multiplier": 3.0, "eos_token_id": 11, "head_dim": 16,
    "key_multiplier": 1.3, "lm_head_multiplier": 0.8, "mamba_chunk_size": 128, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_n_groups": 2, "mamba_n_heads": 6, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_multipliers": [0.7, 0.8],
    "model_type": "falcon_h1", "num_hidden_layers": 2, "num_logits_to_keep": 1, "projectors_bias": False,
    "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.7, 0.5, 0.35, 1.2, 0.9], "ssm_out_multiplier": 0.6, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto", "transformers_version": "4.52.0.dev0",
})  # fmt: skip

MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 1, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 2,
    "expand": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 2, "norm_before_gate": True, "num_heads": 8,
    "num_hidden_layers": 3, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "rms_norm": True, "state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 4, "torch_dtype": "float32",
    "transformers_version": "4.44.0.dev0", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "vocab_size": VOCAB,
}  # fmt: skip

NEMOTRON_H = config_of("hidden_act", {
    "architectures": ["NemotronHForCausalLM"], "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 16,
    "hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*-M", "layer_norm_epsilon": 1e-05, "mamba_head_dim": 16,
    "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 2, "num_hidden_layers": 6,
    "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None,
    "ssm_state_size": 16, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 1e-12,
    "transformers_version": "4.48.0.dev0", "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
})  # fmt: skip

JAMBA = config_of("attention_bias", {
    "architectures": ["JambaForCausalLM"], "attn_layer_offset": 2, "attn_layer_period": 4,
    "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_expand": 2,
    "mamba_inner_layernorms": True, "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 512, "num_experts": 6,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_logits_to_keep": 1, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "transformers_version": "4.40.0.dev0", "use_mamba_kernels": True,
})  # fmt: skip

MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 1, "conv_kernel": 4, "d_inner": 128, "d_model": 64,
    "eos_token_id": 2, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.1, "intermediate_size": 128, "layer_norm_epsilon": 1e-05, "model_type": "mamba",
    "n_layer": 3, "num_hidden_layers": 3, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 4, "time_step_scale": 1.0, "torch_dtype": "float32", "transformers_version": "4.39.0.dev0",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": VOCAB,
}  # fmt: skip

FALCON_MAMBA: dict[str, Any] = MAMBA | {
    "architectures": ["FalconMambaForCausalLM"], "expand": 4, "mixer_rms_eps": 1e-06, "model_type": "falcon_mamba",
    "tie_word_embeddings": False,
}  # fmt: skip

KIMI_LINEAR = config_of("attention_bias attention_dropout max_position_embeddings torch_dtype", {
    "architectures": ["KimiLinearForCausalLM"], "dtype": "float32", "first_k_dense_replace": 1, "head_dim": 18,
    "kv_lora_rank": 32,
    "linear_attn_config": {"full_attn_layers": [3], "head_dim": 16, "kda_layers": [1, 2, 4], "num_heads": 3,
    "short_conv_kernel_size": 4},
    "mla_use_nope": True, "model_max_length": 512, "model_type": "kimi_linear", "moe_intermediate_size": 48,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "num_experts": 8, "num_experts_per_token": 3, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "rope_theta": 10000.0, "routed_scaling_factor": 1.4, "topk_group": 1,
    "transformers_version": "4.56.2", "use_grouped_topk": True, "v_head_dim": 16,
})  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "qwen3-next": QWEN3_NEXT,
    "qwen3.5": QWEN3_5,
    "qwen3.5-moe": QWEN3_5_MOE,
    "granite4": GRANITE4,
    "bamba": BAMBA,
    "falcon-h1": FALCON_H1,
    "mamba2": MAMBA2,
    "jamba": JAMBA,
}


def token_by_token(model: "PreTrainedModel") -> None:
    """Have transformers compute delta rules as in decode: its form in chunks of 64 tokens is off by 2e-4 in fp32."""
    module = vars(sys.modules[type(model).__module__])
    if "torch_chunk_gated_delta_rule" in module:
        module["torch_chunk_gated_delta_rule"] = module["torch_recurrent_gated_delta_rule"]
    if "chunk_kimi_delta_attention" in module:
        module["chunk_kimi_delta_attention"] = module["recurrent_kimi_delta_attention"]


VARIANTS: dict[str, dict[str, Any]] = {
    "nemotron-h": NEMOTRON_H,
    "mamba": MAMBA,
    "falcon-mamba": FALCON_MAMBA,
    "kimi-linear": KIMI_LINEAR,
}
TYPES = {config["model_type"] for config in (*CONFIGS.values(), *VARIANTS.values())}
