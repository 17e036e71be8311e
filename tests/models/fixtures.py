"""Small random checkpoints whose files look like the originals on the hub, each with its oracle.

    path, model = make_checkpoint(tmp_path / "q", "qwen2")           # a folder, and transformers' model
    path, model = make_checkpoint(folder, "llama3", spelling="new")  # rope_parameters, dtype: as of today
    path, model = make_checkpoint(folder, "mistral", shards=3)       # three files and an index
    path, model = make_checkpoint(folder, "gpt2", dtype="bfloat16")  # the oracle: rounded weights in fp32
    path, model = make_checkpoint(folder, "llama2", changes={"head_dim": 32, "num_key_value_heads": 1})

`KINDS` and `VARIANTS` name them all. `changes` are merged into config.json before the model is made (None removes a
key). The oracle (fp32, eager attention) is built by transformers from the very dictionary that is written, so it
reads the same spellings as we do. Vocabulary 320; context 512 (linear, dynamic and YaRN: 4 times 128).

Default random initialisation hides bugs: attention is flat and logits are small. Here q and k are scaled so
that attention is peaked (median entropy at most half of log t) and logits have a standard deviation of at
least 1; norm weights and biases are away from 1 and 0. `test_fixtures.py` holds these figures.

Old spelling: GPT-2 without the `transformer.` prefix and with its `attn.bias` mask buffers; Llama with
`rotary_emb.inv_freq`; tied heads absent; `rope_theta`, `rope_scaling`, `torch_dtype`. The tokenizer is a
byte-level BPE of the special tokens, 256 bytes and a few merges; ids 0 to 2 are <unk>, <s> and </s>.
"""

import copy
import json
import shutil
from atexit import register
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import without_torch
from tests.models import hybrids
from tests.models.hybrids import VOCAB, config_of
from tokenwright.checkpoints.files.local import STORIES
from tokenwright.models.graph import Attention, Deepstack, Graph

MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "a n", "an d", "Ġ and", "o n", "Ġ s", "e r", "r e", "Ġ o"]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 2, "embd_pdrop": 0.1, "eos_token_id": 2, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 512, "n_embd": 64, "n_head": 4,
    "n_layer": 3, "n_positions": 512, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True,
    "max_length": 50}}, "vocab_size": VOCAB,
}  # fmt: skip

_LLAMA = config_of("attention_bias attention_dropout pad_token_id", {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": None, "transformers_version": "4.31.0",
})  # fmt: skip

_QWEN2 = config_of("attention_bias pad_token_id", {
    "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 2, "model_type": "qwen2", "num_hidden_layers": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32, "transformers_version": "4.37.2",
    "use_sliding_window": False,
})  # fmt: skip

_SMOLLM3 = config_of("tie_word_embeddings", {
    "architectures": ["SmolLM3ForCausalLM"], "layer_types": ["full_attention"] * 4, "max_window_layers": 28,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0, 1],
    "num_hidden_layers": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False,
})  # fmt: skip

_PHI3 = config_of("", {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "embd_pdrop": 0.0, "model_type": "phi3", "original_max_position_embeddings": 512, "resid_pdrop": 0.0,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 48, "transformers_version": "4.40.2",
})  # fmt: skip

_GRANITE = config_of("", {
    "architectures": ["GraniteForCausalLM"], "attention_dropout": 0.1, "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0, "logits_scaling": 0.8, "mlp_bias": False, "model_type": "granite",
    "residual_multiplier": 2.2, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True,
    "transformers_version": "4.47.0.dev0",
})  # fmt: skip

_OLMO2 = config_of("bos_token_id", {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "transformers_version": "4.47.0.dev0",
})  # fmt: skip

_STARCODER2 = config_of("attention_bias pad_token_id rms_norm_eps tie_word_embeddings", {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.018042,
    "intermediate_size": 256, "layer_norm_epsilon": 1e-05, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 48,
    "transformers_version": "4.37.0.dev0", "use_bias": True,
})  # fmt: skip

_MIXTRAL = config_of("attention_bias pad_token_id", {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "transformers_version": "4.36.0.dev0",
})  # fmt: skip

_QWEN2_MOE = config_of("attention_bias pad_token_id", {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "max_window_layers": 21,
    "model_type": "qwen2_moe", "moe_intermediate_size": 40, "norm_topk_prob": False, "num_experts": 10,
    "num_experts_per_tok": 4, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 72,
    "sliding_window": 32768, "transformers_version": "4.39.0.dev0", "use_sliding_window": False,
})  # fmt: skip

_QWEN3_MOE = config_of("pad_token_id", {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 32, "max_window_layers": 3,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 48, "norm_topk_prob": True,
    "num_experts": 16, "num_experts_per_tok": 3, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "transformers_version": "4.51.0", "use_sliding_window": False,
})  # fmt: skip

_GPT_OSS = config_of("bos_token_id", {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 2, "head_dim": 32,
    "initial_context_length": 128, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "model_type": "gpt_oss", "num_experts_per_tok": 2, "num_local_experts": 6, "output_router_logits": False,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 48, "swiglu_limit": 7.0,
    "transformers_version": "4.55.0.dev0",
})  # fmt: skip
MXFP4 = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
    "lm_head"], "quant_method": "mxfp4",
}  # fmt: skip

_GEMMA2 = config_of("tie_word_embeddings", {
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 10.0, "cache_implementation": "hybrid",
    "final_logit_softcapping": 5.0, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma2", "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 48,
    "transformers_version": "4.42.4",
})  # fmt: skip

_GEMMA3 = config_of("hidden_act tie_word_embeddings", {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "eos_token_id": [2, 4], "final_logit_softcapping": None, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text", "num_hidden_layers": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 40,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000, "sliding_window": 48, "sliding_window_pattern": 3, "transformers_version": "4.50.0.dev0",
})  # fmt: skip

_GEMMA4 = config_of("hidden_act torch_dtype", {
    "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": False, "dtype": "float32", "enable_moe_block": False,
    "eos_token_id": [2, 4], "final_logit_softcapping": 30.0, "global_head_dim": 48, "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 24, "intermediate_size": 48,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "model_type": "gemma4_text", "moe_intermediate_size": None, "num_experts": None,
    "num_global_key_value_heads": None, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "rms_norm_eps": 1e-06,
    "rope_parameters": { "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
    "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "sliding_window": 48, "tie_word_embeddings": True, "top_k_experts": None, "transformers_version": "5.5.0",
    "use_bidirectional_attention": None, "use_double_wide_mlp": True, "vocab_size_per_layer_input": VOCAB,
})  # fmt: skip

_GEMMA3N = config_of("hidden_act tie_word_embeddings", {
    "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0, 0.0], "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 3,
    "architectures": ["Gemma3nForCausalLM"], "eos_token_id": [2, 4], "final_logit_softcapping": 30.0, "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 24,
    "intermediate_size": [96, 48, 64, 96, 96], "laurel_rank": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": 48, "transformers_version": "4.53.0.dev0", "vocab_size_per_layer_input": VOCAB - 8,
})  # fmt: skip

_GEMMA3_VISION: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [2, 4], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 4, "model_type": "gemma3",
    "text_config": {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "query_pre_attn_scalar": 40, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 48,
    "sliding_window_pattern": 3, "vocab_size": VOCAB},
    "torch_dtype": "float32", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 32, "image_size": 28, "intermediate_size": 48,
    "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14,
    "vision_use_head": False},
}  # fmt: skip

_COHERE = config_of("rms_norm_eps tie_word_embeddings", {
    "architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-05, "logit_scale": 1.25, "model_max_length": 512,
    "model_type": "cohere", "pretraining_tp": 1, "rope_theta": 8000000.0, "transformers_version": "4.38.2",
    "use_qk_norm": False,
})  # fmt: skip

_NEOX = config_of("attention_bias attention_dropout num_key_value_heads pad_token_id rms_norm_eps", {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "intermediate_size": 256, "layer_norm_eps": 1e-05,
    "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "transformers_version": "4.24.0",
    "use_parallel_residual": True,
})  # fmt: skip

_GLM4 = config_of("bos_token_id", {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "eos_token_id": [2, 4], "head_dim": 16,
    "model_type": "glm4", "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "transformers_version": "4.52.0.dev0",
})  # fmt: skip

_COHERE2 = config_of("rms_norm_eps tie_word_embeddings", {
    "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 16,
    "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 1.25, "model_type": "cohere2", "num_hidden_layers": 4,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 48, "sliding_window_pattern": 4,
    "transformers_version": "4.48.0.dev0", "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True,
})  # fmt: skip

_OLMO3 = config_of("bos_token_id", {
    "architectures": ["Olmo3ForCausalLM"], "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "model_type": "olmo3", "num_hidden_layers": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": {"attention_factor": 0.9, "beta_fast": 32, "beta_slow": 1, "factor": 4.0,
    "original_max_position_embeddings": 128, "rope_type": "yarn"},
    "rope_theta": 500000, "sliding_window": 48, "transformers_version": "4.57.0",
})  # fmt: skip

_EXAONE4 = config_of("attention_bias", {
    "architectures": ["Exaone4ForCausalLM"], "head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "model_type": "exaone4",
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64, "rope_type": "llama3"},
    "rope_theta": 1000000, "sliding_window": 48, "sliding_window_pattern": "LLG",
    "transformers_version": "4.54.0.dev0",
})  # fmt: skip

_ERNIE = config_of("attention_bias attention_dropout", {
    "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 16, "model_type": "ernie4_5", "rope_theta": 500000.0,
    "tie_word_embeddings": True, "transformers_version": "4.54.0", "use_bias": False, "use_cache": False,
})  # fmt: skip

_DEEPSEEK2 = config_of("pad_token_id", {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config",
    "AutoModel": "modeling_deepseek.DeepseekV2Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "kv_lora_rank": 32, "model_type": "deepseek_v2",
    "moe_intermediate_size": 24, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_experts_per_tok": 3, "num_key_value_heads": 4, "pretraining_tp": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 128, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
    "topk_method": "greedy", "transformers_version": "4.33.1", "v_head_dim": 16,
})  # fmt: skip

_DEEPSEEK3 = config_of("pad_token_id", {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "model_type": "deepseek_v3",
    "moe_intermediate_size": 24, "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 16, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
    "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 2,
    "topk_method": "noaux_tc", "transformers_version": "4.33.1", "v_head_dim": 32,
})  # fmt: skip

_SEED_OSS = config_of("", {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "head_dim": 32, "mlp_bias": False, "model_type": "seed_oss",
    "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0, "transformers_version": "4.55.0",
})  # fmt: skip

_MINISTRAL3 = config_of("attention_bias pad_token_id", {
    "architectures": ["Ministral3ForCausalLM"], "head_dim": 16, "max_position_embeddings": 2048,
    "model_type": "ministral3",
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 512, "rope_type": "yarn"},
    "rope_theta": 1000000.0, "sliding_window": None,
})  # fmt: skip

_GLM45 = config_of("bos_token_id", {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [2, 4],
    "first_k_dense_replace": 1, "head_dim": 32, "model_type": "glm4_moe", "moe_intermediate_size": 24, "n_group": 1,
    "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "topk_group": 1, "transformers_version": "4.54.0", "use_qk_norm": True,
})  # fmt: skip

_EXAONE_MOE = config_of("attention_bias pad_token_id", {
    "architectures": ["ExaoneMoeForCausalLM"], "first_k_dense_replace": 1, "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "model_type": "exaone_moe", "moe_intermediate_size": 24,
    "n_group": 1, "norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 3, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "sliding_window": 48, "sliding_window_pattern": "LG", "topk_group": 1, "topk_method": "noaux_tc",
    "transformers_version": "5.0.0.dev0",
})  # fmt: skip

_MINIMAX = config_of("attention_bias attention_dropout pad_token_id", {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1, 1], "bos_token_id": None,
    "eos_token_id": None, "head_dim": 32, "intermediate_size": 24, "model_type": "minimax_m2",
    "mtp_transformer_layers": 1, "num_experts_per_tok": 3, "num_local_experts": 16, "num_mtp_modules": 3,
    "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "rotary_dim": 16, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "transformers_version": "4.46.1", "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True,
})  # fmt: skip

_ERNIE_MOE = config_of("attention_bias attention_dropout", {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64],
    "moe_gate": "topk", "moe_intermediate_size": 24, "moe_k": 3, "moe_layer_end_index": 2, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_num_experts": 16, "moe_num_shared_experts": 2, "moe_use_aux_free": True,
    "num_nextn_predict_layers": 1, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "transformers_version": "4.54.0.dev0", "use_bias": False,
})  # fmt: skip

_OLMOE = config_of("bos_token_id", {
    "architectures": ["OlmoeForCausalLM"], "clip_qkv": 1.2, "intermediate_size": 40, "model_type": "olmoe",
    "norm_topk_prob": False, "num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4,
    "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01, "transformers_version": "4.43.0.dev0",
})  # fmt: skip

_SHORT = [1.0, 1.02, 1.05, 1.1, 1.2, 1.25, 1.3, 1.35]
_LONG = [1.0, 1.2, 1.8, 3.0, 5.5, 9.0, 14.0, 20.0]

_LLAMA3_SCALING = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64, "rope_type": "llama3",
}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama2": _LLAMA,
    "llama3": _LLAMA
    | {"num_key_value_heads": 2, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_SCALING, "mlp_bias": False}
    | {"attention_bias": False, "head_dim": 16, "tie_word_embeddings": True, "eos_token_id": [2, 4]},
    "linear": _LLAMA | {"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": _LLAMA | {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": _QWEN2
    | {"max_position_embeddings": 128}
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "mistral": {key: value for key, value in _LLAMA.items() if key not in ("pretraining_tp", "rope_scaling")}
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    | {"rope_theta": 10000.0, "sliding_window": 48},
    "qwen2": _QWEN2,
    "qwen2-window": _QWEN2 | {"use_sliding_window": True},
    "qwen2.5": _QWEN2 | {"tie_word_embeddings": True, "use_mrope": False, "rope_scaling": None},
    "qwen3": _QWEN2
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32}
    | {"rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True},
    "smollm2": _LLAMA
    | {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True}
    | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "smollm3": _SMOLLM3,
    "phi3": _PHI3,
    "phi3-long": _PHI3
    | {"original_max_position_embeddings": 128, "sliding_window": 262144}
    | {"rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}},
    "phi4-mini": _PHI3
    | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    | {"original_max_position_embeddings": 128, "partial_rotary_factor": 0.75, "sliding_window": 262144}
    | {"rope_scaling": {"long_factor": _LONG[:6], "short_factor": _SHORT[:6], "type": "longrope"}}
    | {"tie_word_embeddings": True},
    "granite": _GRANITE,
    "mixtral": _MIXTRAL,
    "gpt-oss": _GPT_OSS,
    "qwen2-moe": _QWEN2_MOE,
    "qwen3-moe": _QWEN3_MOE | {"mlp_only_layers": [1]},
    "olmo2": _OLMO2,
    "starcoder2": _STARCODER2,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "cohere": _COHERE,
    "cohere2": _COHERE2,
    "neox": _NEOX,
    "glm4": _GLM4,
    "deepseek2": _DEEPSEEK2,
    "deepseek3": _DEEPSEEK3,
    **hybrids.CONFIGS,
    "tinyllama": _LLAMA | {"num_key_value_heads": 1, "_name_or_path": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"},
}
# Of the same arithmetic as other kinds, or almost: for what reads files, and compared with the oracle once.
VARIANTS: dict[str, dict[str, Any]] = {
    **hybrids.VARIANTS,
    "gemma3-vision": _GEMMA3_VISION,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "neox-serial": _NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0},
    "cohere-norms": _COHERE | {"use_qk_norm": True},
    "olmo3": _OLMO3,
    "exaone4": _EXAONE4,
    "ernie": _ERNIE,
    "glm": _GLM4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm"},
    "gpt-oss-plain": _GPT_OSS,  # without MXFP4
    "seed-oss": _SEED_OSS,
    "seed-oss-biases": _SEED_OSS | {"attention_out_bias": True, "mlp_bias": True},
    "hunyuan": {key: one for key, one in _SEED_OSS.items() if key not in ("attention_out_bias", "residual_dropout")}
    | {"architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 32}
    | {"eod_token_id": 3, "model_type": "hunyuan_v1_dense", "rope_theta": 10000.0, "use_qk_norm": True}
    | {"rope_scaling": {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"}},
    "ministral3": _MINISTRAL3,
    "ministral": {key: value for key, value in _MINISTRAL3.items() if key != "rope_scaling"}
    | {"architectures": ["MinistralForCausalLM"], "max_position_embeddings": 512, "model_type": "ministral"}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 48},
    "glm4.5": _GLM45,
    "glm4.5-air": _GLM45 | {"routed_scaling_factor": 1.0, "use_qk_norm": False},
    "exaone-moe": _EXAONE_MOE,
    "minimax-m2": _MINIMAX,
    "ernie-moe": _ERNIE_MOE,
    "glm4.7-flash": {key: value for key, value in _DEEPSEEK3.items() if key not in ("auto_map", "rope_scaling")}
    | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1}
    | {"rms_norm_eps": 1e-05, "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 1.0},
    "olmoe": _OLMOE,
    "arcee": {key: value for key, value in _LLAMA.items() if key != "pretraining_tp"}
    | {"architectures": ["ArceeForCausalLM"], "attention_bias": False, "hidden_act": "relu2", "mlp_bias": False}
    | {"head_dim": 16, "model_type": "arcee", "num_key_value_heads": 2, "rope_theta": 10000.0}
    | {"max_position_embeddings": 128}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "bitnet": {key: value for key, value in _LLAMA.items() if key != "pretraining_tp"}
    | {"architectures": ["BitNetForCausalLM"], "hidden_act": "relu2", "model_type": "bitnet"}
    | {"num_key_value_heads": 2, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "deepseek2-groups": _DEEPSEEK2
    | {"n_group": 4, "n_routed_experts": 16, "q_lora_rank": 40, "routed_scaling_factor": 1.6, "topk_group": 2}
    | {"topk_method": "group_limited_greedy"},
}


class Made(NamedTuple):
    path: Path  # the folder
    model: Any  # the oracle, transformers' PreTrainedModel: fp32, eager attention, eval mode


def make_config(kind: str, spelling: str = "old", changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json as a dictionary. Spelling "new" is what transformers 5 writes."""
    config: dict[str, Any] = copy.deepcopy((KINDS | VARIANTS)[kind])
    for key, value in (changes or {}).items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    if spelling == "new" and config["model_type"] != "gpt2":
        still = config["model_type"] in ("mamba2", "nemotron_h", "jamba", "mamba", "falcon_mamba")
        if not still and "rope_parameters" not in config:  # as of today anyway
            _respell(config.get("text_config", config))
        config["dtype"] = config.pop("torch_dtype", "float32")
    return config


def _respell(config: dict[str, Any]) -> None:
    """Put the keys of rotary positions where transformers 5 has them."""
    gemma3, olmo3 = (config["model_type"] == one for one in ("gemma3_text", "olmo3"))
    rope = dict(config.pop("rope_scaling", None) or {"rope_type": "default"})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    theta = config.pop("rope_theta", config.pop("rotary_emb_base", 1e6 if gemma3 else 10000.0))
    rope["rope_theta"] = float(theta)
    for key in ("rotary_pct", "partial_rotary_factor"):
        if key in config:
            rope["partial_rotary_factor"] = config.pop(key)
    if gemma3 or olmo3:
        base = theta if olmo3 else config.pop("rope_local_base_freq", 10000.0)
        local = {"rope_type": "default", "rope_theta": float(base)}
        rope = {"full_attention": rope, "sliding_attention": local}
    config["rope_parameters"] = rope


def write_tokenizer(folder: Path, bare: bool = False) -> None:
    """A byte-level BPE tokenizer; `bare` writes vocab.json and merges.txt, not tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = SPECIALS + alphabet + [merge.replace(" ", "") for merge in MERGES]
    vocab = {word: i for i, word in enumerate(words)}
    if bare:
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    else:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
        tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def plain_stories(folder: Path) -> Path:
    """The model that ships inside, without its chat template."""
    made = shutil.copytree(STORIES, folder / "plain")
    (made / "chat_template.jinja").unlink()
    settings = json.loads((made / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    (made / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    spelling: str = "old",
    dtype: str = "float32",
    shards: int = 1,
    changes: dict[str, Any] | None = None,
    seed: int = 0,
) -> Made:
    """Write the folder of a small model of this kind; see the module's docstring. The folder is created."""
    arguments = (kind, spelling, dtype, shards, changes, seed)
    if without_torch.blocked():
        without_torch.made_elsewhere(folder, *arguments)
        return Made(folder, without_torch.Absent())
    from tests.models.weights import write_checkpoint

    return Made(folder, write_checkpoint(folder, *arguments))


def copy_checkpoint(folder: Path, kind: str, changes: dict[str, Any] | None = None) -> Path:
    """A folder of its own with the checkpoint of `make_checkpoint`, which is made once a process."""
    return shutil.copytree(_made_once(kind, json.dumps(changes)), folder)


@cache
def _made_once(kind: str, changes: str) -> Path:
    folder = TemporaryDirectory(prefix=f"{kind}-")
    register(folder.cleanup)
    return make_checkpoint(Path(folder.name, kind), kind, changes=json.loads(changes)).path


def of_texts(graph: Graph) -> Graph:
    """The graph without the axes of a picture's positions, and without what layers add to its rows."""
    blocks = (
        replace(op, rotary=replace(op.rotary, sections=(), interleaved=False))
        if isinstance(op, Attention) and op.rotary is not None
        else op
        for op in graph.blocks
        if not isinstance(op, Deepstack)
    )
    return replace(graph, blocks=tuple(blocks))
