"""Llama and the architectures whose arithmetic differs from it in a few facts: one table row each.

Absent keys take transformers' defaults (configuration_*.py), MiniCPM's those of its authors' code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from tokenwright.checkpoints.families.mixtures import (
    TRAINING,
    Kind,
    read_mixture,
)
from tokenwright.checkpoints.families.positions import (
    Slides,
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


@dataclass(frozen=True, slots=True)
class LlamaLike:
    """The differences between the architectures of the llama family."""

    # attention_bias covers q, k, v and o with "config", and not o with "config qkv"
    biases: Literal["none", "qkv", "config", "config qkv", "use_bias", "use_qkv_bias"] = "none"
    mlp_bias: bool = False  # whether the config may enable biases in the MLP
    qk_norm: Literal["head", "whole", "flag"] | None = None  # flag: of each head, if the config has use_qk_norm
    qk_norm_last: bool = False  # they stand behind the rotation
    alpha: bool = False  # whether a dynamic rotation may have an alpha
    pre_norm: bool = True  # norms before attention and MLP
    post_norm: bool = False  # norms after attention and MLP
    scaled: Literal["granite", "minicpm", "hyperclovax", "afmoe"] | None = None  # whose multipliers the config has
    slides: Slides = "none"
    # layers without rotary positions (NoPE): those of no_rope_layers, or those with full attention among windows
    nope: Literal["listed", "full"] | None = None
    # the default base of layers with a window, which have the rotation without its scaling; 0: that of the others
    local: float | None = None
    tied: bool = False  # default of tie_word_embeddings
    theta: float = 10000.0
    head_size: int | None = None  # default of head_dim; None: width / heads
    partial: float | None = None  # default of partial_rotary_factor; None: all of a head turns
    eps: float = 1e-6  # default of rms_norm_eps
    mixture: Kind | Routed | None = None  # of experts
    oss: bool = False  # gpt-oss: biases everywhere, learned logits of the heads, a clamped activation
    plain: bool = False  # StarCoder 2: LayerNorm
    bare: bool = False  # OLMo: LayerNorm without weights
    weightless: bool = False  # NanoChat: RMSNorm without weights, also behind the embedding, and capped logits
    act: str = "silu"  # default of hidden_act
    mlp_width: int | None = None  # default of intermediate_size
    gated: bool = True  # whether the MLP has gates
    biased: bool = False  # default of attention_bias and mlp_bias
    follows: bool = False  # whether files have a layer that predicts further tokens (MTP)
    sinks: bool = False  # a learned logit of each head; with positions everywhere, a base for each layer (Granite SWA)


# Keys of Hunyuan's files that concern its models with experts or pictures, or repeat others; and their beginnings.
_HUNYUAN = (
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "mask_init_id"),
    *("num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "sep_id"),
)
_PICTURES = ("anyres_", "im_", "image_", "text_", "video_", "vit_")
_MISTRAL = LlamaLike(slides="all")
_GLM_MOE = Routed("sigmoid", ("noaux_tc",), 1, 1.0, renormalise=True)
_EXAONE_MOE = LlamaLike(
    qk_norm="head",
    eps=1e-5,
    slides="pattern",
    nope="full",
    mixture=replace(_GLM_MOE, factor=2.5, experts="num_experts", shared="num_shared_experts"),
)
_APERTUS = LlamaLike(biases="config", mlp_bias=True, qk_norm="head", eps=1e-5, act="xielu", gated=False)
_ARIA = LlamaLike(biases="config", mixture="aria")
_EMU3 = LlamaLike(biases="config", mlp_bias=True, theta=1000000.0, eps=1e-5)
_PHI3 = LlamaLike(slides="given", eps=1e-5, partial=1.0)
_QWEN2 = LlamaLike(biases="qkv", slides="upper")
_QWEN3 = LlamaLike(biases="config", qk_norm="head", slides="upper", head_size=128)
_LLAMA_LIKE: Mapping[str, LlamaLike] = {
    "LlamaForCausalLM": LlamaLike(biases="config", mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": replace(_QWEN2, follows=True),
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "MixtralForCausalLM": LlamaLike(slides="given", theta=1000000.0, mixture="mixtral", eps=1e-5),
    "Qwen2MoeForCausalLM": LlamaLike(biases="qkv", slides="even", mixture="qwen2"),
    "Qwen3MoeForCausalLM": LlamaLike(biases="config", qk_norm="head", slides="flagged", mixture="qwen3"),
    "MellumForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        head_size=128,
        slides="listed",
        theta=500000.0,
        local=10000.0,
        mixture="mellum",
    ),
    "AriaTextForCausalLM": _ARIA,
    "AriaForConditionalGeneration": _ARIA,
    "Emu3ForCausalLM": _EMU3,
    "Emu3ForConditionalGeneration": _EMU3,
    "GotOcr2ForConditionalGeneration": replace(_QWEN2, tied=True),
    "MossTranscribeDiarizeForConditionalGeneration": replace(_QWEN3, tied=True),
    "NanoChatForCausalLM": LlamaLike(
        biases="config", qk_norm="head", qk_norm_last=True, act="relu2", gated=False, weightless=True
    ),
    "FlintForCausalLM": LlamaLike(
        biases="config", qk_norm="head", head_size=128, slides="flint", nope="full", sinks=True, mixture="flint"
    ),
    "GptOssForCausalLM": LlamaLike(
        biases="config", slides="alternate", theta=150000.0, head_size=64, eps=1e-5, mixture="gpt-oss", oss=True
    ),
    "SmolLM3ForCausalLM": LlamaLike(
        biases="config", mlp_bias=True, slides="nope", nope="listed", tied=True, theta=2000000.0
    ),
    "GraniteForCausalLM": LlamaLike(biases="config", mlp_bias=True, scaled="granite"),
    "Phi3ForCausalLM": _PHI3,
    "Phi4MultimodalForCausalLM": _PHI3,
    "OlmoForCausalLM": LlamaLike(biases="config", bare=True),
    "Olmo2ForCausalLM": LlamaLike(biases="config", qk_norm="whole", pre_norm=False, post_norm=True, eps=1e-5),
    "Olmo3ForCausalLM": LlamaLike(
        biases="config",
        qk_norm="whole",
        pre_norm=False,
        post_norm=True,
        eps=1e-5,
        theta=500000.0,
        slides="pattern",
        local=0,
    ),
    "Exaone4ForCausalLM": LlamaLike(
        qk_norm="head", pre_norm=False, post_norm=True, eps=1e-5, slides="pattern", nope="full"
    ),
    "Ernie4_5ForCausalLM": LlamaLike(biases="use_bias", tied=True, theta=500000.0, head_size=128, eps=1e-5),
    "GlmForCausalLM": LlamaLike(biases="config qkv", eps=1.5625e-07, head_size=128, partial=0.5),
    "Glm4ForCausalLM": LlamaLike(biases="config qkv", post_norm=True, eps=1.5625e-07, head_size=128, partial=0.5),
    "SeedOssForCausalLM": LlamaLike(biases="config qkv", mlp_bias=True, head_size=128),
    "MinistralForCausalLM": LlamaLike(slides="typed"),
    "Ministral3ForCausalLM": LlamaLike(slides="given", eps=1e-5),
    "Glm4MoeForCausalLM": LlamaLike(biases="config qkv", qk_norm="flag", eps=1e-5, partial=0.5, mixture=_GLM_MOE),
    "ExaoneMoEForCausalLM": _EXAONE_MOE,  # as published
    "ExaoneMoeForCausalLM": _EXAONE_MOE,  # as transformers writes it
    "MiniMaxM2ForCausalLM": LlamaLike(qk_norm="whole", theta=5000000.0, head_size=128, partial=1.0, mixture="minimax"),
    "Ernie4_5_MoeForCausalLM": LlamaLike(biases="use_bias", tied=True, theta=500000.0, eps=1e-5, mixture="ernie"),
    "OlmoeForCausalLM": LlamaLike(biases="config", qk_norm="whole", eps=1e-5, mixture="olmoe"),
    "ArceeForCausalLM": LlamaLike(biases="config", mlp_bias=True, eps=1e-5, act="relu2", gated=False),
    "HunYuanDenseV1ForCausalLM": LlamaLike(biases="config", qk_norm="head", qk_norm_last=True, eps=1e-5, alpha=True),
    "HYV3ForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        head_size=128,
        theta=11158840.0,
        eps=1e-5,
        mixture=Routed(
            *("sigmoid", ("noaux_tc",), 1, 2.826),
            renormalise=True,
            experts="num_experts",
            shared="num_shared_experts",
            shared_count=1,
            factor_key="router_scaling_factor",
        ),
    ),
    "ApertusForCausalLM": _APERTUS,
    "HunYuanMoEV1ForCausalLM": LlamaLike(
        biases="config", qk_norm="head", qk_norm_last=True, eps=1e-5, alpha=True, mixture="hunyuan"
    ),
    "Apertus1p5TextForCausalLM": _APERTUS,
    "FlexOlmoForCausalLM": LlamaLike(
        biases="config", qk_norm="whole", pre_norm=False, post_norm=True, theta=500000.0, mixture="olmoe"
    ),
    "GraniteSWAForCausalLM": LlamaLike(
        biases="config", mlp_bias=True, scaled="granite", slides="typed", tied=True, eps=1e-5, sinks=True
    ),
    "GraniteMoeSWAForCausalLM": LlamaLike(
        biases="config", scaled="granite", slides="typed", mixture="granite", sinks=True
    ),
    "Jais2ForCausalLM": LlamaLike(biases="config", mlp_bias=True, plain=True, act="relu2", gated=False, biased=True),
    "AfmoeForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        post_norm=True,
        eps=1e-5,
        slides="every",
        nope="full",
        head_size=128,
        scaled="afmoe",
        mixture="afmoe",
    ),
    "CwmForCausalLM": LlamaLike(eps=1e-5, slides="typed", theta=1000000.0, head_size=128),
    "Dots1ForCausalLM": LlamaLike(
        biases="config", qk_norm="head", slides="upper", mixture=replace(_GLM_MOE, dense=0, renormalise=False)
    ),
    "HeliumForCausalLM": LlamaLike(eps=1e-8, theta=100000.0, head_size=128),
    "HyperCLOVAXForCausalLM": LlamaLike(biases="config", mlp_bias=True, scaled="hyperclovax"),
    "GraniteMoeForCausalLM": LlamaLike(biases="config", scaled="granite", mixture="granite"),
    "GraniteMoeSharedForCausalLM": LlamaLike(biases="config", scaled="granite", mixture="granite"),
    "NemotronForCausalLM": LlamaLike(biases="config", mlp_bias=True, plain=True, act="relu2", gated=False, partial=0.5),
    "StableLmForCausalLM": LlamaLike(biases="use_qkv_bias", plain=True, partial=0.25),
    "SolarOpenForCausalLM": LlamaLike(
        biases="config qkv",
        eps=1e-5,
        theta=1000000.0,
        head_size=128,
        partial=1.0,
        mixture=replace(_GLM_MOE, dense=0),
        mlp_width=10240,  # its layers have experts alone
    ),
    "MiniCPMForCausalLM": LlamaLike(biases="config", tied=True, scaled="minicpm"),
    "Starcoder2ForCausalLM": LlamaLike(
        biases="use_bias", slides="given", tied=True, plain=True, act="gelu_pytorch_tanh", gated=False
    ),
}


def parse_llama(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    like = _LLAMA_LIKE[architecture]
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
    if like.nope == "full" and (any(windows) or like.slides in ("every", "flint")):
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
