"""Random configurations of models, hybrids and others, as transformers' config classes take them."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.models.hybrids import VOCAB

Config = dict[str, Any]


def _base(random: Random, heads: int = 0) -> Config:
    """What all have: sizes, and attention whose heads share keys and values."""
    heads = heads or random.choice([2, 4, 6])
    size = random.choice([8, 16, 32])
    return {
        "vocab_size": VOCAB,
        "hidden_size": random.choice([32, 48, 64]) * (1 if heads != 6 else 3),
        "intermediate_size": random.choice([64, 96]),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([one for one in (1, 2, heads) if heads % one == 0]),
        "head_dim": size,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": random.random() < 0.5,
    }


def _layers(random: Random, state: str, attention: str) -> Config:
    """Layers of both kinds in any order, and at least one with a state."""
    types = [state if random.random() < 0.7 else attention for _ in range(random.randint(2, 5))]
    types[random.randrange(len(types))] = state
    return {"num_hidden_layers": len(types), "layer_types": types}


def _experts(random: Random, width: str = "moe_intermediate_size") -> Config:
    return {width: random.choice([32, 48]), "num_experts_per_tok": random.randint(1, 3)}


def _rope(random: Random, partial: float | None = None) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": random.choice([10000.0, 500000.0])}
    return {"rope_parameters": rope if partial is None else rope | {"partial_rotary_factor": partial}}


def _lfm2(random: Random) -> Config:
    base = _base(random)
    base["head_dim"] = base["hidden_size"] // base["num_attention_heads"] // 2 * 2
    base["hidden_size"] = base.pop("head_dim") * base["num_attention_heads"]
    facts = {"conv_L_cache": random.randint(2, 5), "conv_bias": random.random() < 0.5, "norm_eps": 1e-5}
    return base | _layers(random, "conv", "full_attention") | _rope(random) | facts


def lfm2(random: Random) -> Config:
    return _lfm2(random) | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}


def lfm3(random: Random) -> Config:
    """Layers of three types in any order, and at least one that attends."""
    layers = _layers(random, "conv", random.choice(["full_attention", "sliding_attention"]))
    layers["layer_types"].append("full_attention")
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": random.choice([1e4, 1e5])},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": random.choice([0.5, 1.0]),
        },
    }
    return (
        _base(random)
        | layers
        | {
            "model_type": "lfm3",
            "num_hidden_layers": len(layers["layer_types"]),
            "conv_L_cache": random.randint(2, 8),
            "conv_bias": random.random() < 0.5,
            "rope_parameters": ropes,
            "sliding_window": random.choice([8, 24]),
            "use_sandwich_norm": random.random() < 0.7,
            "use_attention_gate": random.random() < 0.7,
        }
    )


def lfm2_moe(random: Random) -> Config:
    found = _lfm2(random) | {"model_type": "lfm2_moe", "num_experts": random.choice([4, 6]), **_experts(random)}
    found["hidden_size"] = 16 * found["num_attention_heads"]
    return found | {
        "norm_topk_prob": random.random() < 0.7,
        "num_dense_layers": random.randint(0, 2),
        "routed_scaling_factor": random.choice([1.0, 1.7]),
        "use_expert_bias": random.random() < 0.7,
    }


def _delta(random: Random) -> Config:
    keys = random.choice([1, 2, 3])
    return {
        "linear_conv_kernel_dim": random.randint(2, 5),
        "linear_key_head_dim": random.choice([8, 12, 16]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * random.choice([1, 2]),
        "linear_value_head_dim": random.choice([8, 24, 80, 128]),
    }


def qwen3_next(random: Random) -> Config:
    layers = _layers(random, "linear_attention", "full_attention")
    found = _base(random) | layers | _delta(random) | _rope(random, random.choice([0.25, 0.5])) | _experts(random)
    return found | {
        "model_type": "qwen3_next",
        "num_experts": random.choice([4, 6]),
        "mlp_only_layers": random.choice([[], [1]]),
        "norm_topk_prob": random.random() < 0.5,
        "shared_expert_intermediate_size": 32,
    }


def qwen3_5(random: Random) -> Config:
    layers = _layers(random, "linear_attention", "full_attention")
    return _base(random) | layers | _delta(random) | _rope(random, 0.5) | {"model_type": "qwen3_5_text"}


def olmo_hybrid(random: Random) -> Config:
    base = _base(random)
    del base["head_dim"]
    layers = _layers(random, "linear_attention", "full_attention")
    layers["layer_types"][-1] = "full_attention"
    layers["layer_types"][0] = "linear_attention"
    turned = (
        _rope(random) if random.random() < 0.5 else {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    )
    negative = {"linear_allow_neg_eigval": random.random() < 0.5, "model_type": "olmo_hybrid"}
    return base | layers | _delta(random) | turned | negative


def _mamba(random: Random, width: int) -> Config:
    heads = random.choice([2, 4, 8])
    return {
        "mamba_conv_bias": random.random() < 0.5,
        "mamba_d_conv": random.randint(2, 5),
        "mamba_d_head": 2 * width // heads,
        "mamba_d_state": random.choice([8, 16, 24]),
        "mamba_expand": 2,
        "mamba_n_groups": random.choice([1, 2]),
        "mamba_n_heads": heads,
        "mamba_proj_bias": random.random() < 0.5,
    }


def granite(random: Random) -> Config:
    base = _base(random)
    del base["head_dim"]
    found = base | _layers(random, "mamba", "attention") | _mamba(random, base["hidden_size"])
    experts = {"num_local_experts": random.choice([0, 4]), "num_experts_per_tok": random.randint(1, 3)}
    return found | {
        "model_type": "granitemoehybrid",
        "intermediate_size": 48,
        "attention_multiplier": random.choice([0.2, 0.4]),
        "embedding_multiplier": random.choice([1.0, 4.0]),
        "logits_scaling": random.choice([0.5, 1.0]),
        "position_embedding_type": random.choice(["rope", "nope"]),
        "residual_multiplier": random.choice([0.6, 1.0]),
        "shared_intermediate_size": random.choice([64, 96]),
        **experts,
    }


def bamba(random: Random) -> Config:
    base = _base(random)
    found = base | _layers(random, "mamba", "attention") | _mamba(random, base["hidden_size"])
    types = found.pop("layer_types")
    return found | {
        "model_type": "bamba",
        "attn_layer_indices": [i for i, kind in enumerate(types) if kind == "attention"],
        **_rope(random, 0.5),
    }


def falcon_h1(random: Random) -> Config:
    base = _base(random)
    factors = [one for _ in range(5) if (one := random.choice([0.35, 0.7, 1.0, 1.4]))]
    mamba = _mamba(random, base["hidden_size"])
    biased = mamba["mamba_proj_bias"]
    return (
        base
        | mamba
        | _rope(random)
        | {
            "model_type": "falcon_h1",
            "num_hidden_layers": random.randint(1, 3),
            "mamba_d_ssm": mamba["mamba_d_head"] * mamba["mamba_n_heads"],
            "mamba_norm_before_gate": random.random() < 0.5,
            "mamba_rms_norm": random.random() < 0.5,
            "projectors_bias": random.random() < 0.5,
            "attention_in_multiplier": random.choice([0.8, 1.0]),
            "attention_out_multiplier": random.choice([0.9, 1.2]),
            "embedding_multiplier": random.choice([1.0, 3.0]),
            "key_multiplier": random.choice([0.6, 1.1]),
            "lm_head_multiplier": random.choice([0.5, 1.0]),
            "mlp_multipliers": [random.choice([0.7, 1.0]), random.choice([0.8, 1.0])],
            "ssm_in_multiplier": 1.0 if biased else random.choice([0.8, 1.3]),
            "ssm_multipliers": factors,
            "ssm_out_multiplier": random.choice([0.6, 1.0]),
        }
    )


def mamba2(random: Random) -> Config:
    heads, width = random.choice([2, 4, 8]), random.choice([32, 64])
    return {
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": width,
        "num_hidden_layers": random.randint(1, 4),
        "conv_kernel": random.randint(2, 5),
        "expand": 2,
        "head_dim": 2 * width // heads,
        "n_groups": random.choice([1, 2]),
        "num_heads": heads,
        "state_size": random.choice([8, 16, 24]),
        "tie_word_embeddings": random.random() < 0.5,
        "use_bias": random.random() < 0.5,
        "use_conv_bias": random.random() < 0.5,
    }


def nemotron_h(random: Random) -> Config:
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    listed = ["linear_attention", *(random.choice(kinds) for _ in range(random.randint(1, 5)))]
    groups = random.choice([1, 2])
    return _base(random) | {
        "model_type": "nemotron_h",
        "tie_word_embeddings": False,
        "layers_block_type": listed,
        "conv_kernel": random.randint(2, 5),
        "mamba_head_dim": random.choice([8, 16, 24]),
        "mamba_num_heads": random.choice([2, 4]),
        "mlp_bias": "moe" not in listed and random.random() < 0.5,
        "moe_intermediate_size": random.choice([32, 48]),
        "moe_shared_expert_intermediate_size": random.choice([40, 64]),
        "n_group": groups,
        "n_groups": random.choice([1, 2]),
        "n_routed_experts": 8,
        "norm_topk_prob": random.random() < 0.5,
        "num_experts_per_tok": random.randint(1, 3),
        "routed_scaling_factor": random.choice([1.0, 1.8]),
        "ssm_state_size": random.choice([8, 16, 24]),
        "time_step_min": 1e-12,  # below which transformers limits steps in a prompt alone
        "topk_group": random.randint(1, groups),
        "use_bias": random.random() < 0.5,
        "use_conv_bias": random.random() < 0.5,
    }


def jamba(random: Random) -> Config:
    base = _base(random)
    del base["head_dim"]
    period, layers = random.randint(1, 3), random.randint(2, 5)
    return base | {
        "model_type": "jamba",
        "hidden_size": 16 * base["num_attention_heads"],
        "num_hidden_layers": layers,
        "attn_layer_period": layers,
        "attn_layer_offset": random.randrange(layers),
        "expert_layer_period": period,
        "expert_layer_offset": random.randrange(period),
        "mamba_conv_bias": random.random() < 0.5,
        "mamba_d_conv": random.randint(2, 5),
        "mamba_d_state": random.choice([6, 8, 16]),
        "mamba_dt_rank": random.choice(["auto", 4, 7]),
        "mamba_proj_bias": random.random() < 0.5,
        "num_experts": random.choice([1, 4, 6]),
        "num_experts_per_tok": random.randint(1, 2),
    }


def mamba(random: Random) -> Config:
    return {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": random.choice([32, 48, 64]),
        "num_hidden_layers": random.randint(1, 4),
        "conv_kernel": random.randint(2, 5),
        "expand": random.choice([1, 2]),
        "state_size": random.choice([5, 8, 16]),
        "tie_word_embeddings": random.random() < 0.5,
        "time_step_rank": random.choice(["auto", 4, 7]),
        "use_bias": random.random() < 0.5,
        "use_conv_bias": random.random() < 0.5,
    }


def falcon_mamba(random: Random) -> Config:
    return mamba(random) | {"model_type": "falcon_mamba", "mixer_rms_eps": random.choice([1e-6, 1e-3])}


def kimi_linear(random: Random) -> Config:
    base, layers = _base(random), _layers(random, "linear_attention", "full_attention")
    del base["head_dim"]
    base["model_max_length"] = base.pop("max_position_embeddings")
    experts = _experts(random)
    experts["num_experts_per_token"] = experts.pop("num_experts_per_tok")
    heads = base["num_attention_heads"]
    return (
        base
        | layers
        | experts
        | {
            "model_type": "kimi_linear",
            "tie_word_embeddings": False,
            "hidden_size": 16 * heads,
            "num_key_value_heads": heads,
            "first_k_dense_replace": random.randint(0, 2),
            "kv_lora_rank": random.choice([32, 64]),
            "linear_conv_kernel_dim": random.randint(2, 5),
            "linear_head_dim": random.choice([8, 12, 16, 24]),
            "linear_num_heads": random.choice([1, 3, 4]),
            "moe_renormalize": random.random() < 0.5,
            "num_experts": random.choice([4, 6]),
            "q_lora_rank": random.choice([None, 24]),
            "qk_nope_head_dim": random.choice([16, 24]),
            "qk_rope_head_dim": random.choice([8, 16]),
            "routed_scaling_factor": random.choice([1.0, 2.4]),
            "v_head_dim": 16,
        }
    )


def gemma4(random: Random) -> Config:
    """Layers of both kinds, the last of which may read K and V of others; inputs of each layer or none."""
    base = _base(random)
    kinds = ["full_attention", "sliding_attention"]
    more, inputs = [random.choice(kinds) for _ in range(random.randint(1, 3))], random.choice([0, 8, 24])
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": random.choice([0.25, 0.5, 1.0])}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return base | {
        "model_type": "gemma4_text",
        "num_hidden_layers": len(more) + 3,
        "layer_types": [*random.sample(kinds, 2), *more, "full_attention"],
        "sliding_window": random.choice([8, 24]),
        "global_head_dim": random.choice([16, 32, 48]),
        "num_global_key_value_heads": random.choice([None, 1, base["num_attention_heads"]]),
        "attention_k_eq_v": random.random() < 0.5,
        "num_kv_shared_layers": random.choice([0, 1, 1 + len(more)]) if inputs else 0,  # transformers has no other
        "use_double_wide_mlp": random.random() < 0.5,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": random.choice([None, 30.0]),
        "enable_moe_block": random.random() < 0.4,
        "num_experts": 6,
        "top_k_experts": random.randint(1, 3),
        "moe_intermediate_size": random.choice([32, 48]),
        "rope_parameters": {"full_attention": random.choice([full, full, plain]), "sliding_attention": plain},
    }


def gemma3n(random: Random) -> Config:
    """Layers of both kinds, the last of which may read K and V of others; gates that are sparse in some."""
    base = _base(random)
    kinds = ["full_attention", "sliding_attention"]
    more = [random.choice(kinds) for _ in range(random.randint(1, 3))]
    layers, plain = 2 + len(more), {"rope_type": "default", "rope_theta": 10000.0}
    return base | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": layers,
        "intermediate_size": [random.choice([32, 48, 96]) for _ in range(layers)],
        "layer_types": [*random.sample(kinds, 2), *more],
        "sliding_window": random.choice([8, 24]),
        "num_kv_shared_layers": random.choice([0, 1, len(more)]),
        "hidden_size_per_layer_input": random.choice([8, 24]),
        "vocab_size_per_layer_input": random.choice([VOCAB, VOCAB - 8]),
        "final_logit_softcapping": random.choice([10.0, 30.0]),
        "altup_num_inputs": random.choice([2, 3, 4]),
        "laurel_rank": random.choice([4, 16]),
        "activation_sparsity_pattern": [random.choice([0.0, 0.3, 0.7]) for _ in range(layers)],
        "rope_parameters": {"full_attention": plain | {"rope_theta": 1e6}, "sliding_attention": plain},
    }


def _windows(random: Random) -> Config:
    """Layers of both kinds in any order, and at least one with a window."""
    return _layers(random, "sliding_attention", "full_attention") | {"sliding_window": random.choice([8, 24])}


def mellum(random: Random) -> Config:
    found = _base(random) | _windows(random) | _experts(random)
    full: Config = {"rope_type": "default", "rope_theta": 500000.0}
    yarn: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    kinds = [random.choice(["dense", "sparse", "sparse"]) for _ in found["layer_types"]]
    return found | {
        "model_type": "mellum",
        "attention_bias": random.random() < 0.5,
        "num_experts": random.choice([4, 6]),
        "mlp_layer_types": random.choice([None, kinds]),
        "norm_topk_prob": random.random() < 0.7,
        "rope_parameters": {
            "full_attention": random.choice([full, full | yarn]),
            "sliding_attention": {"rope_type": "default", "rope_theta": random.choice([1e4, 5e5])},
        },
    }


def emu3(random: Random) -> Config:
    return {"model_type": "emu3", "text_config": _base(random) | _rope(random) | {"num_hidden_layers": 2}}


def got_ocr2(random: Random) -> Config:
    text = _base(random) | _rope(random) | {"model_type": "qwen2", "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32, "image_size": 64}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {"model_type": "got_ocr2", "text_config": text, "vision_config": vision, **tied}


def moss_transcribe_diarize(random: Random) -> Config:
    text = _base(random) | _rope(random) | {"model_type": "qwen3", "num_hidden_layers": 2}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {"model_type": "moss_transcribe_diarize", "text_config": text, "audio_config": audio, **tied}


def phi4_multimodal(random: Random) -> Config:
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    audio = {"num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}
    return (
        _base(random)
        | _rope(random, random.choice([0.5, 0.75, 1.0]))
        | {
            "model_type": "phi4_multimodal",
            "num_hidden_layers": random.randint(1, 3),
            "vision_config": small | {"num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
            "audio_config": small | audio,
        }
    )


def cohere_compass(random: Random) -> Config:
    """Each kind of layers has a rotation of its own, or none."""
    ropes = [{"rope_type": "default", "rope_theta": base} for base in (1e4, 5e5)]
    return (
        _base(random)
        | _windows(random)
        | {
            "model_type": "cohere_compass_text",
            "attention_bias": random.random() < 0.5,
            "logit_scale": random.choice([None, 0.5]),
            "rope_parameters": {
                "full_attention": random.choice([*ropes, None]),
                "sliding_attention": random.choice(ropes),
            },
        }
    )


def aria(random: Random) -> Config:
    base = _base(random)
    del base["head_dim"]
    return (
        base
        | _rope(random)
        | {
            "model_type": "aria_text",
            "hidden_size": 16 * base["num_attention_heads"],
            "num_hidden_layers": random.randint(1, 3),
            "attention_bias": random.random() < 0.5,
            "moe_num_experts": random.choice([4, 6]),
            "moe_num_shared_experts": random.choice([1, 2]),
            "moe_topk": random.randint(1, 3),
        }
    )


def nanochat(random: Random) -> Config:
    more = {"num_hidden_layers": random.randint(1, 4), "final_logit_softcapping": random.choice([10.0, 15.0])}
    biases = {"attention_bias": random.random() < 0.5, "rms_norm_eps": random.choice([1e-6, 1e-3])}
    return _base(random) | _rope(random) | {"model_type": "nanochat", **more, **biases}


def lara_mini(random: Random) -> Config:
    """Layers of three types in any order, and at least one with a state."""
    layers = _layers(random, "linear_attention", random.choice(["full_attention", "sliding_attention"]))
    layers["layer_types"].append("sliding_attention")
    found = _base(random) | layers | _delta(random) | _rope(random) | _experts(random)
    return found | {
        "model_type": "lara_mini",
        "linear_key_head_dim": random.choice([16, 32]),  # with shorter ones fp32 rounds these deep mixtures too far
        "num_hidden_layers": len(layers["layer_types"]),
        "attention_bias": random.random() < 0.5,
        "num_experts": random.choice([4, 6]),
        "norm_topk_prob": random.random() < 0.5,
        "shared_expert_intermediate_size": random.choice([32, 64]),
        "sliding_window": random.choice([8, 24]),
    }


MAKERS: tuple[Callable[[Random], Config], ...] = (
    *(lfm2, lfm2_moe, qwen3_next, qwen3_5, olmo_hybrid, granite, bamba, falcon_h1, mamba2, nemotron_h),
    *(jamba, mamba, falcon_mamba, kimi_linear, gemma4, gemma3n),
    *(mellum, emu3, got_ocr2, moss_transcribe_diarize, phi4_multimodal, cohere_compass, aria, nanochat),
    *(lara_mini, lfm3),
)


def random_hybrid(seed: int) -> Config:
    """The configuration of a seed; the families take turns."""
    return MAKERS[seed % len(MAKERS)](Random(seed))


_SMALL: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROUTED: Config = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
_DECODER: Config = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
) | {
    "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "encoder_layers": 1,
    "encoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "scale_embedding": True,
}  # fmt: skip
_HEADS: Config = dict.fromkeys(("num_key_value_heads", "head_dim"))  # as many, and of the share of the width
_MLA: Config = _ROUTED | {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 16, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_SLIDING: Config = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 24}
_SCALED: Config = {"embedding_multiplier": 3.0, "residual_multiplier": 0.8, "logits_scaling": 1.3}
_GRANITE: Config = _SCALED | {"attention_multiplier": 0.3, "num_local_experts": 6, "num_experts_per_tok": 2}
_ALL_HEADS: Config = {"num_key_value_heads": 4}
_GPT: Config = dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim"))  # they have other keys
_GPT2_KEYS: Config = (
    _GPT
    | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
    | dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"))
)
_LLAMA3: Config = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_BOTH_ROPES: Config = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Architectures whose arithmetic is that of others but for a few facts.
PLAIN: dict[str, Config] = {
    "afmoe": _SLIDING
    | {
        "moe_intermediate_size": 48,
        "mup_enabled": True,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "route_scale": 1.5,
    },
    "apertus": {"rope_parameters": _LLAMA3},
    "exaone": {"architectures": ["ExaoneForCausalLM"], "rope_parameters": _LLAMA3},
    "cwm": _SLIDING | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "dots1": _ROUTED | {"sliding_window": None},
    "gemma": {"head_dim": 32},
    "gemma4_unified_text": _SLIDING | {"global_head_dim": 32, "rope_parameters": _BOTH_ROPES, "attention_k_eq_v": True},
    "vaultgemma": _SLIDING | {"query_pre_attn_scalar": 32},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hy_v3": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_scaling_factor": 1.5,
    },
    "apertus1p5_text": {"rope_parameters": _LLAMA3},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "granite_swa": _SCALED | _SLIDING | {"attention_multiplier": 0.3, "layer_rope_theta": [1e4, 5e5, 0]},
    "granitemoe_swa": _GRANITE | _SLIDING | {"layer_rope_theta": [0, 1e4, 0]},
    "jais2": {},
    "olmo": {"clip_qkv": 1.0},
    "helium": {"num_key_value_heads": 4},
    "hyperclovax": _SCALED,
    "gpt_bigcode": _GPT2_KEYS | {"n_inner": 96},
    "gpt_bigcode, all heads": _GPT2_KEYS | {"multi_query": False},
    "gpt_neo": _ALL_HEADS
    | dict.fromkeys(("num_hidden_layers", "num_attention_heads"))
    | {
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "attention_layers": ["global", "local", "local"],
        "window_size": 24,
    },
    "opt": _GPT | {"ffn_dim": 96, "tie_word_embeddings": False},
    "gptj": _GPT2_KEYS | {"rotary_dim": 8},
    "falcon": _GPT,
    "falcon, groups": _GPT | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon, one norm": _GPT | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon, in turn": _GPT | {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    "phi": {},
    **dict.fromkeys(("bart", "mvp", "trocr", "plbart", "marian", "mbart", "blenderbot", "pegasus"), _DECODER),
    "openai-gpt": _GPT2_KEYS,
    "biogpt": _GPT | {"intermediate_size": 96},
    "codegen": _GPT2_KEYS | {"rotary_dim": 8},
    "gpt_neox_japanese": {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None},
    "persimmon": _HEADS,
    "fuyu": _HEADS
    | {"text_config": {"model_type": "persimmon"} | {k: one for k, one in _SMALL.items() if k not in _HEADS}},
    "flint": _SLIDING
    | {
        "mlp_only_layers": [0],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "deepseek_v32": _MLA | {"n_group": 2, "topk_group": 1, "index_head_dim": 32, "index_n_heads": 2},
    "glm_moe_dsa": _MLA | {"index_head_dim": 32, "index_n_heads": 2},
    "axk1": _MLA | {"n_group": 2, "topk_group": 1},
    "nemotron": {"partial_rotary_factor": 0.5},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "use_parallel_residual": True},
    "youtu": {
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "minicpm3": {
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "num_key_value_heads": 4,
        "scale_emb": 3,
        "scale_depth": 1.4,
        "dim_model_base": 32,
    },
    "solar_open": {key: one for key, one in _ROUTED.items() if key != "first_k_dense_replace"},
}


def plain_model(kind: str) -> Config:
    """The configuration of a small model of an architecture in `PLAIN`."""
    found = {"model_type": kind.partition(",")[0], **_SMALL, **PLAIN[kind]}
    return {key: value for key, value in found.items() if value is not None}
