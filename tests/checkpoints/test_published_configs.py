"""Published config.json files: which run, with the size that their cards give, and which operation the others need."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenwright.backends.native.compile import compiles
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.quantised.published import read_scheme
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable
from tokenwright.planner import plan

_COHERE = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-05, "num_key_value_heads": 8, "pad_token_id": 0, "use_cache": True,
    "vocab_size": 256000,
}  # fmt: skip
_LLAMA = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_PIXTRAL = {"head_dim": 64, "hidden_size": 1024, "image_size": 1540, "model_type": "pixtral", "patch_size": 14}
_MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "vision_config": _PIXTRAL, "vision_feature_layer": -1,
}  # fmt: skip
_QWEN_VL = {
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656,
}  # fmt: skip

_GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_token_id": 258881, "boa_token_id": 256000,
    "boi_token_id": 255999, "dtype": "bfloat16", "eoi_token_id": 258882, "eos_token_id": [1, 106],
    "image_token_id": 258880, "model_type": "gemma4", "tie_word_embeddings": True, "video_token_id": 258884,
    "vision_config": {"hidden_size": 1152}, "vision_soft_tokens_per_image": 280,
}  # fmt: skip
_GEMMA4_TEXT = {
    "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 131072, "model_type": "gemma4_text", "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_WINDOWS = ["sliding_attention"] * 5

_FP8 = {
    "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"],
    "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
_GLM45 = _LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip

RUN: dict[str, tuple[dict[str, Any], float]] = {  # with the parameters of the text model, in billions
    "CohereForAI/c4ai-command-r-plus": (
        _COHERE | {
            "architectures": ["CohereForCausalLM"], "hidden_size": 12288, "intermediate_size": 33792,
            "logit_scale": 0.8333333333333334, "max_position_embeddings": 8192, "model_max_length": 131072,
            "model_type": "cohere", "num_attention_heads": 96, "num_hidden_layers": 64, "rope_theta": 75000000.0,
            "torch_dtype": "float16", "transformers_version": "4.40.0.dev0", "use_qk_norm": True,
        },
        103.81,
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        _COHERE | {
            "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 14336, "layer_switch": 4, "logit_scale": 0.25,
            "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32,
            "num_hidden_layers": 32, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
            "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
            "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        },
        8.03,
    ),
    "allenai/Olmo-3-7B-Instruct": (
        _LLAMA | {
            "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_size": 4096,
            "intermediate_size": 11008, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
            "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "sliding_window": 4096,
            "tie_word_embeddings": False, "vocab_size": 100278,
        },
        7.30,
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": (
        _LLAMA | {
            "architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_size": 5120,
            "intermediate_size": 27392, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
            "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 1000000,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "sliding_window": 4096,
            "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "vocab_size": 102400,
        },
        32.00,
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (
        _LLAMA | {
            "architectures": ["Exaone4ForCausalLM"], "head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096,
            "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536, "model_type": "exaone4",
            "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8, "rope_theta": 1000000,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "sliding_window": None,
            "sliding_window_pattern": None, "tie_word_embeddings": True, "vocab_size": 102400,
        },
        1.28,
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        _LLAMA | {
            "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "ernie4_5",
            "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
        },
        0.36,
    ),
    "THUDM/glm-4-9b-chat-hf": (
        _LLAMA | {
            "architectures": ["GlmForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 131072,
            "model_type": "glm", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "vocab_size": 151552,
        },
        9.40,
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        _MISTRAL3 | {"text_config": _LLAMA | {
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
            "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
        }},
        23.57,
    ),
    "mistralai/Ministral-3-3B-Instruct-2512": (
        _MISTRAL3 | {"text_config": _LLAMA | {
            "head_dim": 128, "hidden_size": 3072, "intermediate_size": 9216, "max_position_embeddings": 262144,
            "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 26, "num_key_value_heads": 8,
            "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"}, "sliding_window": None,
            "tie_word_embeddings": True, "vocab_size": 131072,
        }, "quantization_config": {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
        "modules_to_not_convert": ["lm_head"], "weight_block_size": None}},
        3.43,
    ),
    "moonshotai/Kimi-K2-Instruct": (
        _LLAMA | {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
            "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
            "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2",
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]}, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
            "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
        },
        1026.41,
    ),
    "zai-org/GLM-4.5": (_GLM45, 352.8),
    "MiniMaxAI/MiniMax-M2": (
        _LLAMA | {
            "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "bos_token_id": None,
            "eos_token_id": None, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
            "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
            "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
            "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config": _FP8,
            "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
            "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
            "use_routing_bias": True, "vocab_size": 200064,
        },
        228.69,
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": (
        _LLAMA | {
            "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
            "max_position_embeddings": 131072, "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64],
            "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27,
            "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
            "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
            "vocab_size": 103424,
        },
        21.83,
    ),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": (
        _LLAMA | {
            "architectures": ["ExaoneMoEForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_size": 6144, "intermediate_size": 18432,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12, "max_position_embeddings": 262144,
            "mlp_layer_types": ["dense"] + ["sparse"] * 47, "model_type": "exaone_moe",
            "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rope_theta": 1000000,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
            "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1,
            "topk_method": "noaux_tc", "vocab_size": 153600,
        },
        236.57,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        _LLAMA | {
            "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False,
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288,
            "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
            "vocab_size": 155136,
        },
        36.15,
    ),
    "allenai/OLMoE-1B-7B-0125-Instruct": (
        _LLAMA | {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "hidden_size": 2048,
            "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "rope_scaling": None,
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
        },
        6.92,
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        _LLAMA | _QWEN_VL | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 2048, "intermediate_size": 11008,
            "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl",
            "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
            "vision_config": {"depth": 32, "hidden_size": 1280, "in_chans": 3, "out_hidden_size": 2048},
            "vision_token_id": 151654, "vocab_size": 151936,
        },
        3.09,
    ),
    "Qwen/Qwen3-VL-8B-Instruct": (
        _QWEN_VL | {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
            "tie_word_embeddings": False,
            "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": "qwen3_vl"},
            "text_config": {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
            "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_interleaved": True,
            "mrope_section": [24, 20, 20], "rope_type": "default"}, "rope_theta": 5000000, "use_cache": True,
            "vocab_size": 151936},
        },
        8.19,
    ),
    "google/gemma-3n-E2B-it": (
        {"architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"hidden_size": 1536},
         "audio_soft_tokens_per_image": 188, "audio_token_id": 262273, "boa_token_id": 256000, "boi_token_id": 255999,
         "eoa_token_id": 262272, "eoi_token_id": 262144, "eos_token_id": [1, 106], "image_token_id": 262145,
         "initializer_range": 0.02, "model_type": "gemma3n", "torch_dtype": "bfloat16",
         "transformers_version": "4.53.0.dev0", "vision_config": {"hidden_size": 2048},
         "vision_soft_tokens_per_image": 256, "text_config": {
             "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
             "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
             "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
             "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
             "initializer_range": 0.02, "intermediate_size": [8192] * 30, "laurel_rank": 64,
             "layer_types": [*_WINDOWS[:4], "full_attention"] * 6, "max_position_embeddings": 32768,
             "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2,
             "num_kv_shared_layers": 10, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
             "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
             "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262400,
             "vocab_size_per_layer_input": 262144}},
        4.44,  # the text model, without the K and V of layers that read those of others
    ),
    "google/gemma-4-E2B-it": (
        _GEMMA4 | {"text_config": _GEMMA4_TEXT | {"hidden_size": 1536, "hidden_size_per_layer_input": 256,
                   "intermediate_size": 6144, "layer_types": [*_WINDOWS[:4], "full_attention"] * 7,
                   "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1,
                   "num_kv_shared_layers": 20, "sliding_window": 512, "use_double_wide_mlp": True}},
        4.63,  # the text model
    ),
    "google/gemma-4-26B-A4B-it": (
        _GEMMA4 | {"text_config": _GEMMA4_TEXT | {"attention_k_eq_v": True, "enable_moe_block": True,
                   "hidden_size": 2816, "intermediate_size": 2112, "layer_types": [*_WINDOWS, "full_attention"] * 5,
                   "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
                   "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
                   "sliding_window": 1024, "top_k_experts": 8}},
        25.23,
    ),
    "google/gemma-4-31B-it": (
        _GEMMA4 | {"text_config": _GEMMA4_TEXT | {"attention_k_eq_v": True, "hidden_size": 5376,
                   "intermediate_size": 21504, "layer_types": [*_WINDOWS, "full_attention"] * 10,
                   "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
                   "num_key_value_heads": 16, "sliding_window": 1024}},
        30.7,
    ),
}  # fmt: skip

NEED: dict[str, tuple[dict[str, Any], str]] = {  # the keys that tell, and what they stand for
    "meta-llama/Llama-4-Scout-17B-16E": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"attention_chunk_size": 8192,
         "attn_temperature_tuning": 4, "interleave_moe_layer_step": 1, "num_local_experts": 16}},
        "chunked attention, 8,192 tokens at a time, queries scaled by their position, experts whose input is scaled",
    ),
    "moonshotai/Kimi-K3": (
        {"architectures": ["KimiK3ForConditionalGeneration"], "text_config": {"linear_attn_config": {"head_dim": 128}}},
        "gates of latent attention, attention over residual streams",
    ),
    "MiniMaxAI/MiniMax-M3": (
        {"architectures": ["MiniMaxM3SparseForConditionalGeneration"],
         "text_config": {"sparse_attention_config": {"sparse_topk_blocks": 16}}},
        "attention to blocks of tokens that an indexer chooses",
    ),
    "XiaomiMiMo/MiMo-V2-Flash": (
        {"architectures": ["MiMoV2FlashForCausalLM"], "attention_chunk_size": 128, "attention_value_scale": 0.707,
         "sliding_window": 128, "swa_head_dim": 192},
        "heads of another size in layers with a window, values of another size than keys, times a factor",
    ),
    "baichuan-inc/Baichuan2-13B-Chat": (
        {"architectures": ["BaichuanForCausalLM"]}, "one tensor of q, k and v (W_pack)",
    ),
    "THUDM/chatglm3-6b": ({"architectures": ["ChatGLMModel"]}, "the tensor names of ChatGLM"),
    "google/recurrentgemma-2b": (
        {"architectures": ["RecurrentGemmaForCausalLM"], "lru_width": 2560}, "gated linear recurrences",
    ),
    "google-t5/t5-small": ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder"),
}  # fmt: skip


def graph_of(name: str) -> Graph:
    settings = dict(RUN[name][0])
    read_scheme(settings, name)
    return parse_config(settings).graph


@pytest.mark.parametrize("name", RUN)
def test_a_published_config_runs(name: str, tmp_path: Path) -> None:
    graph, (config, billions) = graph_of(name), RUN[name]
    assert round(graph.parameters / 1e9, 2) == billions
    assert compiles(graph)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path).hindrances == ()


@pytest.mark.parametrize("name", NEED)
def test_of_others_the_missing_operation_is_named(name: str, tmp_path: Path) -> None:
    config, words = NEED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path)
    assert f"it needs {words}" in str(caught.value)


def test_ministrals_context_ends_where_queries_would_be_scaled() -> None:
    assert graph_of("mistralai/Ministral-3-3B-Instruct-2512").context == 16384


def test_a_text_has_one_position_in_each_section() -> None:
    [rope] = graph_of("Qwen/Qwen2.5-VL-3B-Instruct").ropes
    alone = parse_config(RUN["Qwen/Qwen2.5-VL-3B-Instruct"][0] | {"rope_scaling": None}).graph.ropes[0]
    assert replace(rope, sections=()) == alone
    at = np.arange(9)
    rows = [RotaryTable(one, 128).rows(where, 0).cos for one, where in ((rope, np.stack([at] * 3)), (alone, at))]
    assert (rows[0] == rows[1]).all()
