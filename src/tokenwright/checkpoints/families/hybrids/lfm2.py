"""LFM2: short convolutions between two gates in most layers, attention in the others; LFM2-MoE has experts too."""

import re
from dataclasses import replace
from functools import partial

from tokenwright.checkpoints.families.family import (
    MOST_MLP,
    MOST_VOCAB,
    Family,
    TensorSource,
    dtype,
    named,
)
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.mixtures import (
    MOST_EXPERTS,
    TRAINING,
    check_same,
    expert_width,
    listed_layers,
)
from tokenwright.checkpoints.families.positions import read_attended, read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
)


def _parse(keys: JsonKeys, architecture: str, mixed: bool = False) -> tuple[ModelConfig, Graph]:
    attended = read_attended(keys, context=128000, kv_heads=8, theta=1000000.0)
    layers = attended["layers"]
    for key in _UNUSED:
        keys.raw(key)
    keys.only("block_use_swiglu", True, why="an MLP without gates in this architecture")
    keys.only("use_pos_enc", True, why="attention without positions in this architecture")
    config = ModelConfig(
        architecture=architecture,
        **attended,
        mlp_width=keys.whole("intermediate_size", 7168, most=MOST_MLP) if mixed else _mlp_width(keys),
        vocab_size=keys.whole("vocab_size", 65536, most=MOST_VOCAB),
        norm_eps=keys.number("norm_eps", 1e-5),
        qk_norm="head",
        mixture=_mixture(keys, layers) if mixed else None,
        tied_head=keys.flag("tie_embedding", keys.flag("tie_word_embeddings", True)),
        dtype=dtype(keys),
    )
    taps, bias = keys.whole("conv_L_cache", 3, least=2, most=MOST_TAPS), keys.flag("conv_bias", False)
    mixers = {i: _convolution(config, i, taps, bias) for i, state in enumerate(_convolved(keys, layers)) if state}
    return config, decoder(config, mixers)


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    for key in TRAINING:
        keys.raw(key)
    dense = keys.whole("num_dense_layers", 2, least=0)
    experts = keys.whole("num_experts", 32, least=0, most=MOST_EXPERTS)
    check_same(keys, "num_local_experts", "num_experts", experts)
    chosen = keys.whole("num_experts_per_tok", 4, most=experts or MOST_EXPERTS)
    width, factor = expert_width(keys, "moe_intermediate_size", 1792), keys.number("routed_scaling_factor", 1.0)
    normalised, corrected = keys.flag("norm_topk_prob", True), keys.flag("use_expert_bias", True)
    if dense >= layers or not experts:
        return None
    mixed = tuple(i >= dense for i in range(layers))
    return Mixture(experts, chosen, width, mixed, "sigmoid", renormalise=normalised, corrected=corrected, factor=factor)


def _mlp_width(keys: JsonKeys) -> int:
    """The width of the MLP: two thirds of the number in the file, in whole multiples."""
    width = keys.whole("block_ff_dim", keys.whole("intermediate_size", 12288, most=MOST_MLP), most=MOST_MLP)
    factor, multiple = keys.number("block_ffn_dim_multiplier", 1.0), keys.whole("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _convolved(keys: JsonKeys, layers: int) -> list[bool]:
    types, listed = keys.raw("layer_types"), "full_attn_idxs" in keys.names
    full = listed_layers(keys, "full_attn_idxs", layers) if listed else range(layers)
    if types is None:
        return [i not in full for i in range(layers)]
    return read_states(keys, types, layers, ("conv",), ("full_attention",))


def _convolution(config: ModelConfig, layer: int, taps: int, bias: bool) -> Recurrent:
    """The rows of the projection are the gates before and behind the convolution, then its channels."""
    at, width = f"layers.{layer}.conv", config.width
    places = Places(conv=2 * width, before=0, gate=width)
    before, after = mixer_norms(config, layer)
    return Recurrent(
        layer,
        before,
        Matrix.single(f"{at}.in", 3 * width, width, bias),
        Recurrence(at, "convolution", width, taps, places, bias, activated=False),
        Matrix.single(f"{at}.out", width, width, bias),
        after,
        config.scales.residual,
    )


LFM2 = Family(
    architectures={"Lfm2ForCausalLM": "lfm2"},
    parse=_parse,
    prefix="model.",
    names=named(
        {
            "embed": "embed_tokens",
            "norm": "embedding_norm",
            "head": "lm_head",
            "layers.{i}.attention_norm": "layers.{i}.operator_norm",
            "layers.{i}.attention.q": "layers.{i}.self_attn.q_proj",
            "layers.{i}.attention.k": "layers.{i}.self_attn.k_proj",
            "layers.{i}.attention.v": "layers.{i}.self_attn.v_proj",
            "layers.{i}.attention.o": "layers.{i}.self_attn.out_proj",
            "layers.{i}.attention.q_norm": "layers.{i}.self_attn.q_layernorm",
            "layers.{i}.attention.k_norm": "layers.{i}.self_attn.k_layernorm",
            "layers.{i}.conv.in": "layers.{i}.conv.in_proj",
            "layers.{i}.conv.conv": "layers.{i}.conv.conv",
            "layers.{i}.conv.out": "layers.{i}.conv.out_proj",
            "layers.{i}.mlp_norm": "layers.{i}.ffn_norm",
            "layers.{i}.mlp.gate": "layers.{i}.feed_forward.w1",
            "layers.{i}.mlp.up": "layers.{i}.feed_forward.w3",
            "layers.{i}.mlp.down": "layers.{i}.feed_forward.w2",
        }
    ),
    inert=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    stacks=re.compile(r"layers\.\d+\.conv\.conv\.weight"),  # [channels, 1, taps]
)

_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2_MOE = replace(
    LFM2,
    architectures={"Lfm2MoeForCausalLM": "lfm2_moe"},
    parse=partial(_parse, mixed=True),
    names=LFM2.names
    | named(
        {"layers.{i}.mlp.router": "layers.{i}.feed_forward.gate"}
        | {
            f"layers.{{i}}.mlp.experts.{{e}}.{ours}": f"layers.{{i}}.feed_forward.experts.{{e}}.{theirs}"
            for ours, theirs in _EXPERTS.items()
        }
    )
    | {"layers.{i}.mlp.correction": TensorSource("layers.{i}.feed_forward.expert_bias", wide=True)},
    renames=((re.compile(r"(layers\.\d+\.feed_forward\.expert_bias)"), r"\1.weight"),),
)
