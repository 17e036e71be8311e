"""Llama and the architectures whose arithmetic differs from it in a few facts, which `llama_like.py` has.

Absent keys take transformers' defaults (configuration_*.py), MiniCPM's those of its authors' code.
"""

from dataclasses import replace
from typing import Literal

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    activation,
    check_repeats,
    dtype,
    heads_of,
    read_clip,
    size_of_head,
    sizes,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama_like import LLAMA_LIKE, LlamaLike
from tokenwright.checkpoints.families.mixtures import (
    TRAINING,
    read_mixture,
)
from tokenwright.checkpoints.families.positions import (
    read_bases,
    read_both_ropes,
    read_rope,
    read_rotary,
    read_windows,
)
from tokenwright.checkpoints.families.routed import Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Mixture, ModelConfig, Scales
from tokenwright.models.graph import Graph
from tokenwright.models.op import Activation

# Keys of Hunyuan's files that concern its models with experts or pictures, or repeat others; and their beginnings.
_HUNYUAN = (
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "mask_init_id"),
    *("num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "sep_id"),
)
_PICTURES = ("anyres_", "im_", "image_", "text_", "video_", "vit_")


def parse_llama(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    like = LLAMA_LIKE[architecture]
    found = sizes(keys, mlp_width=like.mlp_width)
    layers, width = found["layers"], found["width"]
    heads, kv_heads = heads_of(keys)
    head_size = keys.whole("head_dim", like.head_size or 0, least=0, most=1 << 16) or size_of_head(keys, width, heads)
    context = keys.whole("max_position_embeddings", most=MAX_TOKENS)
    if like.alpha:
        _skip_pictures(keys, like)
    if like.local is not None:
        rope, reach, local = read_both_ropes(keys, like.theta, like.local or None, head_size, context)
    else:
        partial, local = _partial(keys, like, head_size), None
        rope, reach = read_rope(keys, like.theta, head_size, context, partial, like.alpha)
    check_repeats(keys, context, reach)
    rotary = read_rotary(keys, layers) if like.nope == "listed" else (True,) * layers
    windows = read_windows(keys, like.slides, rotary)
    if like.nope == "full" and (any(windows) or like.slides == "every"):
        rotary = tuple(window is not None for window in windows)
    if like.sinks and like.nope is None:
        rope, local, rotary = read_bases(keys, rope, windows)
    qkv_bias, out_bias, mlp_bias = _biases(keys, like)
    config = ModelConfig(
        family="llama",
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=reach,
        positions=rope,
        windows=windows,
        rotary=rotary,
        local=local,
        norm="layer" if like.plain or like.bare else "rms",
        norm_eps=_eps(keys, like),
        norm_bias=not like.bare,
        norm_weights=not (like.bare or like.weightless),
        embed_norm=like.weightless,
        logit_cap=_cap(keys) if like.weightless else None,
        activation=_activation(keys, like),
        gated=like.gated,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=_qk_norm(keys, like),
        qk_norm_last=like.qk_norm_last,
        pre_norm=like.pre_norm,
        parallel="one norm" if like.plain and keys.flag("use_parallel_residual", False) else None,
        post_norm=like.post_norm or (like.scaled == "hyperclovax" and keys.flag("use_post_norm", True)),
        qkv_clip=read_clip(keys) if like.bare or like.mixture == "olmoe" else None,
        scales=_scales(keys, like, layers, width),
        mixture=_mixture(keys, like, layers),
        next_layers=_next_layers(keys, like),
        out_gate=like.scaled == "afmoe",
        sink_logits=like.oss or like.sinks,
        tied_head=keys.flag("tie_word_embeddings", like.tied),
        dtype=dtype(keys),
    )
    if like.oss:
        keys.only("hidden_act", "silu", why="another activation in this architecture")
        config = replace(config, activation="clamped_swiglu")
    return config, decoder(config)


def _activation(keys: JsonKeys, like: LlamaLike) -> Activation:
    """The MLP's activation; that which Apertus learns is its own."""
    if like.act != "xielu":
        return activation(keys, "hidden_act", like.act)
    keys.only("hidden_act", "xielu", why="another activation in this architecture")
    keys.only("qk_norm", True, why="attention without norms of q and k in this architecture")
    if keys.raw("rope_scaling") is None and keys.raw("rope_parameters") is None:
        raise keys.error("rope_scaling is missing; the published files have that of Llama 3 there")
    return "xielu"


def _skip_pictures(keys: JsonKeys, like: LlamaLike) -> None:
    """Read the keys of Hunyuan's files that concern other models than the one at hand."""
    for key in (*_HUNYUAN, *(name for name in keys.names if name.startswith(_PICTURES))):
        keys.raw(key)
    if like.mixture is None:
        keys.raw("num_experts")
    keys.only("norm_type", "rms", why="another norm in this architecture")
    keys.only("use_cla", False, why="K and V that layers share")
    keys.only("use_rotary_pos_emb", True, why="attention without positions")


def _mixture(keys: JsonKeys, like: LlamaLike, layers: int) -> Mixture | None:
    if not isinstance(like.mixture, Routed):
        return read_mixture(keys, like.mixture, layers) if like.mixture else None
    for key in TRAINING:
        keys.raw(key)
    return read_routed(keys, like.mixture, layers)


def _next_layers(keys: JsonKeys, like: LlamaLike) -> int:
    """Layers after the last that predict further tokens (MTP)."""
    if not (like.follows or isinstance(like.mixture, Routed)):
        return 0
    return keys.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS)


def _qk_norm(keys: JsonKeys, like: LlamaLike) -> Literal["head", "whole"] | None:
    """The norms of q and k."""
    if like.qk_norm == "flag":
        return "head" if keys.flag("use_qk_norm", False) else None
    if like.qk_norm is not None:
        keys.only("use_qk_norm", True, why="attention without norms of q and k in this architecture")
        keys.only("qk_norm_type", "per_layer", why="other norms of q and k in this architecture")
    return like.qk_norm


def _partial(keys: JsonKeys, like: LlamaLike, head_size: int) -> float | None:
    """The default share of a head's dimensions that turn. MiniMax-M2's files give their number."""
    if like.mixture != "minimax":
        return like.partial
    return keys.whole("rotary_dim", head_size, most=head_size) / head_size


def _scales(keys: JsonKeys, like: LlamaLike, layers: int, width: int) -> Scales:
    """Granite's multipliers; its logits are divided by logits_scaling, HyperCLOVA X' multiplied.

    MiniCPM's depend on the depth and the width.
    """
    if like.scaled is None:
        return Scales()
    if like.scaled == "hyperclovax":
        return Scales(
            embedding=keys.number("embedding_multiplier", 1.0),
            attention=None if keys.raw("attention_multiplier") is None else keys.number("attention_multiplier"),
            residual=keys.number("residual_multiplier", 1.0),
            logits=keys.number("logits_scaling", 1.0),
        )
    if like.scaled == "afmoe":
        return Scales(embedding=width**0.5 if keys.flag("mup_enabled", False) else 1.0)
    if like.scaled == "minicpm":
        return Scales(
            embedding=keys.number("scale_emb", 1.0),
            residual=keys.number("scale_depth", 1.0) / layers**0.5,
            logits=keys.number("dim_model_base", 1.0) / width,
        )
    return granite_scales(keys)


def granite_scales(keys: JsonKeys) -> Scales:
    return Scales(
        embedding=keys.number("embedding_multiplier", 1.0),
        attention=keys.number("attention_multiplier", 1.0),
        residual=keys.number("residual_multiplier", 1.0),
        logits=1 / keys.number("logits_scaling", 1.0),
    )


def _eps(keys: JsonKeys, like: LlamaLike) -> float:
    """The epsilon of the norms. Some of StarCoder 2's files repeat it under two other names, without effect."""
    if like.bare:
        return 1e-5
    if not like.plain:
        return keys.number("rms_norm_eps", like.eps)
    keys.only("norm_type", "layer_norm", why="another norm in this architecture")
    keys.only("mlp_type", "default", why="another MLP in this architecture")
    for unused in ("layer_norm_epsilon", "rms_norm_eps"):
        keys.raw(unused)
    return keys.number("norm_epsilon", keys.number("norm_eps", keys.number("layer_norm_eps", 1e-5)))


def _cap(keys: JsonKeys) -> float | None:
    """The soft cap of logits."""
    return None if keys.is_null("final_logit_softcapping") else keys.number("final_logit_softcapping", 15.0)


def _optional(keys: JsonKeys, key: str, offered: bool, why: str, default: bool) -> bool:
    """A flag that only some architectures of the family have."""
    if offered:
        return keys.flag(key, default)
    keys.only(key, False, why=f"{why} in this architecture")
    return False


def _biases(keys: JsonKeys, like: LlamaLike) -> tuple[bool, bool, bool]:
    """Whether q, k and v have biases, whether o has one, and whether the MLP has."""
    if like.biases == "use_bias":
        every = keys.flag("use_bias", like.plain)
        return every, every, every
    if like.oss:
        every = keys.flag("attention_bias", True)
        return every, every, True
    mlp = _optional(keys, "mlp_bias", like.mlp_bias, "biases in the MLP", like.biased)
    if like.biases == "qkv":
        for key in ("attention_bias", "qkv_bias"):
            keys.only(key, True, why="Qwen2's attention without its biases")
        return True, False, mlp
    if like.biases == "use_qkv_bias":
        keys.only("qk_layernorm", False, why="a LayerNorm of each head of q and k in this architecture")
        return keys.flag("use_qkv_bias", False), False, mlp
    if like.biases == "config qkv":
        out = keys.flag("attention_out_bias", False)
        return keys.flag("attention_bias", not isinstance(like.mixture, Routed)), out, mlp
    both = _optional(keys, "attention_bias", like.biases == "config", "biases of attention", like.biased)
    return both, both, mlp
