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
    in_layers,
    named,
    size_of_head,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama_like import Biases, Facts, LlamaLike, MLPs, Norms, Positions, Sizes
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Learned, ModelConfig, Rope
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


_LINEARS = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "attention.o": "attn.c_proj"}
GPT2 = Family(
    architectures={"GPT2LMHeadModel": "gpt2"},
    parse=_parse_gpt2,
    prefix="transformer.",
    names=named("embed=wte positions=wpe norm=ln_f head=lm_head")
    | in_layers("attention_norm=ln_1 mlp_norm=ln_2", "h.{i}")
    | {f"layers.{{i}}.{ours}": TensorSource(f"h.{{i}}.{theirs}", transpose=True) for ours, theirs in _LINEARS.items()}
    | {f"layers.{{i}}.attention.{one}": TensorSource("h.{i}.attn.c_attn", transpose=True, fused=True) for one in "qkv"},
    inert=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
)


def _neox_biases(keys: JsonKeys) -> Biases:
    both = keys.flag("attention_bias", True)
    return Biases(both, both, True)


def _neox_rope(keys: JsonKeys, head_size: int, context: int) -> tuple[Rope, int, None]:
    theta, partial = keys.number("rotary_emb_base", 10000.0, above=1.0), keys.number("rotary_pct", 0.25)
    return (*read_rope(keys, theta, head_size, context, partial), None)


def _neox_blocks(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    keys.only("tie_word_embeddings", False, why="a head tied to the embeddings in this architecture")
    return {"parallel": "two norms" if keys.flag("use_parallel_residual", True) else None}


_NEOX = LlamaLike(
    _neox_biases,
    Norms(1e-5, {"norm": "layer"}, key="layer_norm_eps"),
    positions=Positions(_neox_rope, windows=None),
    sizes=Sizes(context=2048),
    mlps=MLPs("gelu", gated=False),
    more=(_neox_blocks,),
)
NEOX = Family(
    architectures={"GPTNeoXForCausalLM": "gpt_neox"},
    parse=_NEOX.parse,
    prefix="gpt_neox.",
    names=named("embed=embed_in norm=final_layer_norm head=embed_out")
    | in_layers("""
        attention_norm=input_layernorm attention.o=attention.dense mlp_norm=post_attention_layernorm
        mlp.up=mlp.dense_h_to_4h mlp.down=mlp.dense_4h_to_h
    """)
    | {  # the file has q, k and v head by head
        f"layers.{{i}}.attention.{one}": TensorSource("layers.{i}.attention.query_key_value", turn=(at, 3))
        for at, one in enumerate("qkv")
    },
    aliases={"lm_head.weight": "embed_out.weight"},  # as transformers 5 writes it
    inert=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
