"""LFM2: short convolutions between two gates in most layers, attention in the others. The names of its own tensors.

Absent keys take transformers' defaults (configuration_lfm2.py).
"""

import re

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    Family,
    check_repeats,
    dtype,
    heads_of,
    named,
    size_of_head,
)
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Graph, Matrix
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

# Keys that repeat others, or say how the model was trained.
_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
)


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers, width = keys.whole("num_hidden_layers", 32, most=MOST_LAYERS), keys.whole("hidden_size", most=MOST_WIDTH)
    heads, kv_heads = heads_of(keys, 32, 8)
    head_size = keys.whole("head_dim", 0, least=0, most=1 << 16) or size_of_head(keys, width, heads)
    context = keys.whole("max_position_embeddings", 128000, most=MAX_TOKENS)
    rope, reach = read_rope(keys, 1000000.0, head_size, context)
    check_repeats(keys, context, reach)
    for key in _UNUSED:
        keys.raw(key)
    keys.only("block_use_swiglu", True, why="an MLP without gates in this architecture")
    keys.only("use_pos_enc", True, why="attention without positions in this architecture")
    config = ModelConfig(
        family="lfm2",
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=_mlp_width(keys),
        vocab_size=keys.whole("vocab_size", 65536, most=MOST_VOCAB),
        context=reach,
        positions=rope,
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm="rms",
        norm_eps=keys.number("norm_eps", 1e-5),
        activation="silu",
        gated=True,
        qk_norm="head",
        tied_head=keys.flag("tie_embedding", keys.flag("tie_word_embeddings", True)),
        dtype=dtype(keys),
    )
    taps, bias = keys.whole("conv_L_cache", 3, least=2, most=MOST_TAPS), keys.flag("conv_bias", False)
    mixers = {i: _convolution(config, i, taps, bias) for i, kind in enumerate(_types(keys, layers)) if kind == "conv"}
    return config, decoder(config, mixers)


def _mlp_width(keys: JsonKeys) -> int:
    """The width of the MLP: two thirds of the number in the file, in whole multiples."""
    width = keys.whole("block_ff_dim", keys.whole("intermediate_size", 12288, most=MOST_MLP), most=MOST_MLP)
    factor, multiple = keys.number("block_ffn_dim_multiplier", 1.0), keys.whole("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _types(keys: JsonKeys, layers: int) -> list[str]:
    """For each layer, whether it is a convolution or attention."""
    full, types = keys.raw("full_attn_idxs"), keys.raw("layer_types")
    if types is None:
        full = list(range(layers)) if full is None else full
        if not isinstance(full, list) or not all(type(i) is int and 0 <= i < layers for i in full):
            raise keys.error(f"full_attn_idxs must be a list of layers from 0 to {layers - 1}")
        types = ["full_attention" if i in full else "conv" for i in range(layers)]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(one in ("conv", "full_attention") for one in types)
    ):
        raise keys.error(f"layer_types must list {layers} times conv or full_attention, one for each layer")
    return types


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
