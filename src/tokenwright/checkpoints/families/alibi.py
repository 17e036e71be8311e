"""BLOOM and MPT: scores with a bias for the distance (ALiBi), LayerNorm, heads tied to the embedding; and DBRX.

DBRX is MPT's successor by names and norms: it turns q and k, and has experts. Absent keys take transformers' defaults
(configuration_bloom.py, ..._mpt.py, ..._dbrx.py); but the rotary base is the one beside DBRX's attention.
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
    activation,
    check_repeats,
    dtype,
    named,
    read_clip,
    size_of_head,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, TRAINING, expert_width
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Alibi, Mixture, ModelConfig, Rope, Scales
from tokenwright.models.graph import Graph

_CONTEXT = 2048
# Of training, or repeated by other keys.
_UNUSED = {
    "bloom": ("bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    "mpt": ("emb_pdrop", "embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose", "use_cache"),
}
# Of objects in a config: of training, or what transformers writes into every object.
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


def _mosaic(keys: JsonKeys, architecture: str) -> ModelConfig:
    """The facts that configs of MPT and DBRX name alike."""
    width = keys.whole("d_model", 2048, most=MOST_WIDTH)
    layers, heads = keys.whole("n_layers", 24, most=MOST_LAYERS), keys.whole("n_heads", 16, most=1 << 16)
    context = keys.whole("max_seq_len", _CONTEXT, most=MAX_TOKENS)
    check_repeats(keys, context)
    return replace(_config(keys, architecture, width, layers, heads, context), norm_bias=False)


def _parse_mpt(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    plain = _mosaic(keys, architecture)
    keys.only("no_bias", True, why="biases in this architecture")
    keys.only("expansion_ratio", 4, why="an MLP of another width in this architecture")
    norms = ("layernorm", "low_precision_layernorm")
    keys.only("norm_type", *norms, why="another norm in this architecture")
    for key in (*_UNUSED["mpt"], "learned_pos_emb"):  # the last: without effect beside ALiBi
        keys.raw(key)
    scale, most, clip = _attention(keys)
    config = replace(
        plain,
        positions=Alibi(slopes(plain.heads, most)),
        activation="gelu",
        scales=Scales(attention=scale),
        qkv_clip=clip,
    )
    return config, decoder(config)


def _attention(keys: JsonKeys) -> tuple[float | None, float, float | None]:
    """MPT's factor of q k, if it is not the usual one, ALiBi's greatest exponent, and where q, k and v are clipped."""
    part = _object(keys, "attn_config")
    part.only("alibi", True, why="learned positions in this architecture")
    part.only("attn_type", "multihead_attention", why="one KV head in a fused projection")
    clip = read_clip(part)
    part.only("prefix_lm", False, why="attention to later tokens")
    part.only("qk_ln", False, why="norms of q and k")
    scale = part.number("softmax_scale") if "softmax_scale" in part.names else None
    most = part.number("alibi_bias_max", 8.0)
    part.finish(_INERT, "correct config.json, or remove the key")
    return scale, most, clip


def _object(keys: JsonKeys, name: str) -> JsonKeys:
    given = keys.raw(name) or {}
    if not isinstance(given, dict):
        raise keys.error(f"{name} must be an object, not a {type(given).__name__}")
    return JsonKeys(given, f"{keys.where}: {name}")


def _parse_dbrx(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    plain = _mosaic(keys, architecture)
    for key in ("emb_pdrop", *TRAINING):
        keys.raw(key)
    attention, experts = _object(keys, "attn_config"), _object(keys, "ffn_config")
    kv_heads = attention.whole("kv_n_heads", 1, most=plain.heads)
    if plain.heads % kv_heads:
        raise attention.error(f"{plain.heads} query heads cannot share {kv_heads} KV heads evenly; correct config.json")
    keys.only("num_key_value_heads", kv_heads, why="another number of KV heads than that of attn_config")
    theta = attention.number("rope_theta", _base(keys), above=1.0)
    clip = read_clip(attention)
    attention.finish(_INERT, "correct config.json, or remove the key")
    config = replace(
        plain,
        kv_heads=kv_heads,
        positions=Rope(theta),
        rotary=(True,) * plain.layers,
        gated=True,
        tied_head=keys.flag("tie_word_embeddings", False),
        qkv_clip=clip,
    )
    config = _with_experts(experts, config)
    return config, decoder(config)


def _base(keys: JsonKeys) -> float:
    """The rotary base of the model, where its attention has none."""
    part = _object(keys, "rope_parameters")
    part.only("rope_type", "default", why="scaled rotary positions in this architecture")
    return part.number("rope_theta", 10000.0, above=1.0)


def _with_experts(keys: JsonKeys, config: ModelConfig) -> ModelConfig:
    function = _object(keys, "ffn_act_fn")
    count, width = (
        keys.whole("moe_num_experts", 4, most=MOST_EXPERTS),
        expert_width(keys, "ffn_hidden_size", 3584, model=config.width),
    )
    chosen = keys.whole("moe_top_k", 1, most=count)
    keys.only("moe_normalize_expert_weights", 1.0, why="weights of experts with another norm than their sum")
    keys.only("hidden_size", config.width, why="experts of another width than the model's")
    for key in ("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment"):  # of training
        keys.raw(key)
    keys.finish(_INERT, "correct config.json, or remove the key")
    summed = not keys.is_null("moe_normalize_expert_weights")
    mixture = Mixture(count, chosen, width, (True,) * config.layers, renormalise=summed)
    return replace(config, mlp_width=width, mixture=mixture, activation=activation(function, "name", "silu"))


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

_EXPERTS = "blocks.{i}.ffn.experts.mlp"
DBRX = Family(
    architectures={"DbrxForCausalLM": "dbrx"},
    parse=_parse_dbrx,
    prefix="transformer.",
    names=named(
        {
            "embed": "wte",
            "norm": "norm_f",
            "head": "lm_head",
            "layers.{i}.attention_norm": "blocks.{i}.norm_attn_norm.norm_1",
            **{
                f"layers.{{i}}.attention.{one}": TensorSource("blocks.{i}.norm_attn_norm.attn.Wqkv", fused=True)
                for one in "qkv"
            },
            "layers.{i}.attention.o": "blocks.{i}.norm_attn_norm.attn.out_proj",
            "layers.{i}.mlp_norm": "blocks.{i}.norm_attn_norm.norm_2",
            "layers.{i}.mlp.router": "blocks.{i}.ffn.router.layer",
            "layers.{i}.mlp.experts.{e}.gate": TensorSource(f"{_EXPERTS}.w1", stacked=True),
            "layers.{i}.mlp.experts.{e}.up": TensorSource(f"{_EXPERTS}.v1", stacked=True),
            "layers.{i}.mlp.experts.{e}.down": TensorSource(f"{_EXPERTS}.w2", transpose=True, stacked=True),
        }
    ),
    inert=re.compile(r"blocks\.\d+\.norm_attn_norm\.attn\.rotary_emb\.inv_freq"),
    renames=((re.compile(r"(blocks\.\d+\.ffn\.experts\.mlp\.[wv][12])"), r"\1.weight"),),
)
