"""GPT-2: learned positions, LayerNorm, and linear layers that are stored as [in, out]."""

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
)
from tokenwright.checkpoints.families.graph_builder import decoder
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
        family="gpt2",
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
