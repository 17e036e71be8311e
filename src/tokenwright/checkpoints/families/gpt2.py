"""GPT-2, with learned positions and linear layers stored as [in, out], and GPT-NeoX (Pythia)."""

import re

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    Family,
    TensorSource,
    activation,
    check_repeats,
    dtype,
    named,
    size_of_head,
    sizes,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Learned, ModelConfig
from tokenwright.models.graph import Graph


def _parse_gpt2(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers = keys.whole("n_layer", most=MOST_LAYERS)
    width = keys.whole("n_embd", most=MOST_WIDTH)
    heads = keys.whole("n_head", most=1 << 16)
    context = keys.whole("n_positions", most=MAX_TOKENS)
    check_repeats(keys, context)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=size_of_head(keys, width, heads),
        mlp_width=keys.whole("n_inner", 4 * width, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", most=MOST_VOCAB),
        context=context,
        positions=Learned(),
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=activation(keys, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )
    return config, decoder(config)


GPT2 = Family(
    architectures={"GPT2LMHeadModel": "gpt2"},
    parse=_parse_gpt2,
    prefix="transformer.",
    names=named(
        {
            "embed": "wte",
            "positions": "wpe",
            "norm": "ln_f",
            "head": "lm_head",
            "layers.{i}.attention_norm": "h.{i}.ln_1",
            "layers.{i}.attention.q": TensorSource("h.{i}.attn.c_attn", transpose=True, fused=True),
            "layers.{i}.attention.k": TensorSource("h.{i}.attn.c_attn", transpose=True, fused=True),
            "layers.{i}.attention.v": TensorSource("h.{i}.attn.c_attn", transpose=True, fused=True),
            "layers.{i}.attention.o": TensorSource("h.{i}.attn.c_proj", transpose=True),
            "layers.{i}.mlp_norm": "h.{i}.ln_2",
            "layers.{i}.mlp.up": TensorSource("h.{i}.mlp.c_fc", transpose=True),
            "layers.{i}.mlp.down": TensorSource("h.{i}.mlp.c_proj", transpose=True),
        }
    ),
    inert=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
)


def _parse_neox(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    found = sizes(keys)
    layers, width = found["layers"], found["width"]
    heads = keys.whole("num_attention_heads", most=1 << 16)
    head_size = size_of_head(keys, width, heads)
    context = keys.whole("max_position_embeddings", 2048, most=MAX_TOKENS)
    theta, partial = keys.number("rotary_emb_base", 10000.0, above=1.0), keys.number("rotary_pct", 0.25)
    rope, reach = read_rope(keys, theta, head_size, context, partial)
    check_repeats(keys, context, reach)
    biases = keys.flag("attention_bias", True)
    keys.only("tie_word_embeddings", False, why="a head tied to the embeddings in this architecture")
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=heads,
        head_size=head_size,
        context=reach,
        positions=rope,
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        activation=activation(keys, "hidden_act", "gelu"),
        gated=False,
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=True,
        parallel="two norms" if keys.flag("use_parallel_residual", True) else None,
        dtype=dtype(keys),
    )
    return config, decoder(config)


def _in_turn(index: int) -> TensorSource:
    """q, k or v, which the file has head by head."""
    return TensorSource("layers.{i}.attention.query_key_value", turn=(index, 3))


NEOX = Family(
    architectures={"GPTNeoXForCausalLM": "gpt_neox"},
    parse=_parse_neox,
    prefix="gpt_neox.",
    names=named(
        {
            "embed": "embed_in",
            "norm": "final_layer_norm",
            "head": "embed_out",
            "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
            "layers.{i}.attention.q": _in_turn(0),
            "layers.{i}.attention.k": _in_turn(1),
            "layers.{i}.attention.v": _in_turn(2),
            "layers.{i}.attention.o": "layers.{i}.attention.dense",
            "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp.up": "layers.{i}.mlp.dense_h_to_4h",
            "layers.{i}.mlp.down": "layers.{i}.mlp.dense_4h_to_h",
        }
    ),
    aliases={"lm_head.weight": "embed_out.weight"},  # as transformers 5 writes it
    inert=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
