"""BLOOM and MPT: scores with a bias for the distance (ALiBi), LayerNorm, heads tied to the embedding.

Absent keys take transformers' defaults (configuration_bloom.py, ..._mpt.py).
"""

import re
from dataclasses import replace
from math import ceil, log2

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_VOCAB,
    MOST_WIDTH,
    Family,
    TensorSource,
    check_repeats,
    dtype,
    named,
    read_clip,
    size_of_head,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Alibi, ModelConfig, Scales
from tokenwright.models.graph import Graph

_CONTEXT = 2048
# Of training, or repeated by other keys.
_UNUSED = {
    "bloom": ("bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    "mpt": ("emb_pdrop", "embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose", "use_cache"),
}
# Of MPT's attention: of training, or what transformers writes into every object.
_INERT = (
    *("attn_impl", "attn_pdrop", "attn_uses_sequence_id", "chunk_size_feed_forward", "dtype", "id2label", "label2id"),
    *("_name_or_path", "model_type", "return_dict", "torch_dtype", "transformers_version"),
)
_SLOW = ("slow_but_exact", "attention_softmax_in_fp32", "unk_token_id")


def slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """ALiBi's slope of each head: 2^-(most / n), 2^-(2 most / n), ... for n heads, a power of two.

    For another number of heads: the slopes of the next lower power, then every second slope of the next higher one.
    """
    above = 2 ** ceil(log2(heads))
    every = [2.0 ** (-most * i / above) for i in range(1, above + 1)]
    return tuple(every if above == heads else (every[1::2] + every[::2])[:heads])


def _config(keys: JsonKeys, architecture: str, width: int, layers: int, heads: int, context: int) -> ModelConfig:
    """What both have."""
    return ModelConfig(
        family="alibi",
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=size_of_head(keys, width, heads),
        mlp_width=4 * width,
        vocab_size=keys.whole("vocab_size", most=MOST_VOCAB),
        context=context,
        positions=Alibi(slopes(heads)),
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        gated=False,
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )


def _either(keys: JsonKeys, key: str, older: str, most: int) -> int:
    """A size that files have under two names."""
    return keys.whole(key, keys.raw(older), most=most)


def _parse_bloom(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    width = _either(keys, "n_embed", "hidden_size", MOST_WIDTH)
    layers, heads = (
        _either(keys, key, f"num_{older}", most)
        for key, older, most in (("n_layer", "hidden_layers", MOST_LAYERS), ("n_head", "attention_heads", 1 << 16))
    )
    context = keys.whole("seq_length", _CONTEXT, most=MAX_TOKENS)
    check_repeats(keys, context)
    keys.only("n_inner", 4 * width, why="an MLP of another width in this architecture")
    keys.only("apply_residual_connection_post_layernorm", False, why="a residual stream behind the norms")
    for key in (*_UNUSED["bloom"], *_SLOW):
        keys.raw(key)
    config = replace(
        _config(keys, architecture, width, layers, heads, context),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        embed_norm=True,
    )
    return config, decoder(config)


def _parse_mpt(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    width = keys.whole("d_model", 2048, most=MOST_WIDTH)
    layers, heads = keys.whole("n_layers", 24, most=MOST_LAYERS), keys.whole("n_heads", 16, most=1 << 16)
    context = keys.whole("max_seq_len", _CONTEXT, most=MAX_TOKENS)
    check_repeats(keys, context)
    keys.only("no_bias", True, why="biases in this architecture")
    keys.only("expansion_ratio", 4, why="an MLP of another width in this architecture")
    norms = ("layernorm", "low_precision_layernorm")
    keys.only("norm_type", *norms, why="another norm in this architecture")
    for key in (*_UNUSED["mpt"], "learned_pos_emb"):  # the last: without effect beside ALiBi
        keys.raw(key)
    scale, most, clip = _attention(keys)
    config = replace(
        _config(keys, architecture, width, layers, heads, context),
        positions=Alibi(slopes(heads, most)),
        activation="gelu",
        norm_bias=False,
        scales=Scales(attention=scale),
        qkv_clip=clip,
    )
    return config, decoder(config)


def _attention(keys: JsonKeys) -> tuple[float | None, float, float | None]:
    """MPT's factor of q k, if it is not the usual one, ALiBi's greatest exponent, and where q, k and v are clipped."""
    given = keys.raw("attn_config") or {}
    if not isinstance(given, dict):
        raise keys.error(f"attn_config must be an object, not a {type(given).__name__}")
    part = JsonKeys(given, f"{keys.where}: attn_config")
    part.only("alibi", True, why="learned positions in this architecture")
    part.only("attn_type", "multihead_attention", why="one KV head in a fused projection")
    clip = read_clip(part)
    part.only("prefix_lm", False, why="attention to later tokens")
    part.only("qk_ln", False, why="norms of q and k")
    scale = part.number("softmax_scale") if "softmax_scale" in part.names else None
    most = part.number("alibi_bias_max", 8.0)
    part.finish(_INERT, "correct config.json, or remove the key")
    return scale, most, clip


def _in_turn(index: int) -> TensorSource:
    """q, k or v, which BLOOM's files have head by head."""
    return TensorSource("h.{i}.self_attention.query_key_value", turn=(index, 3))


BLOOM = Family(
    architectures={"BloomForCausalLM": "bloom"},
    parse=_parse_bloom,
    prefix="transformer.",
    names=named(
        {
            "embed": "word_embeddings",
            "embed_norm": "word_embeddings_layernorm",
            "norm": "ln_f",
            "head": "lm_head",
            "layers.{i}.attention_norm": "h.{i}.input_layernorm",
            "layers.{i}.attention.q": _in_turn(0),
            "layers.{i}.attention.k": _in_turn(1),
            "layers.{i}.attention.v": _in_turn(2),
            "layers.{i}.attention.o": "h.{i}.self_attention.dense",
            "layers.{i}.mlp_norm": "h.{i}.post_attention_layernorm",
            "layers.{i}.mlp.up": "h.{i}.mlp.dense_h_to_4h",
            "layers.{i}.mlp.down": "h.{i}.mlp.dense_4h_to_h",
        }
    ),
    inert=re.compile(r"h\.\d+\.self_attention\.(bias|masked_bias)"),
)

_FUSED = TensorSource("blocks.{i}.attn.Wqkv", fused=True)
MPT = Family(
    architectures={"MPTForCausalLM": "mpt", "MptForCausalLM": "mpt"},
    parse=_parse_mpt,
    prefix="transformer.",
    names=named(
        {
            "embed": "wte",
            "norm": "norm_f",
            "head": "lm_head",
            "layers.{i}.attention_norm": "blocks.{i}.norm_1",
            **{f"layers.{{i}}.attention.{one}": _FUSED for one in "qkv"},
            "layers.{i}.attention.o": "blocks.{i}.attn.out_proj",
            "layers.{i}.mlp_norm": "blocks.{i}.norm_2",
            "layers.{i}.mlp.up": "blocks.{i}.ffn.up_proj",
            "layers.{i}.mlp.down": "blocks.{i}.ffn.down_proj",
        }
    ),
    inert=re.compile(r"blocks\.\d+\.attn\.attn_bias"),
)
