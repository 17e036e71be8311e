"""Cohere's Command-R, Aya, Command-A: attention and MLP side by side over one LayerNorm without bias, scaled logits."""

import re
from dataclasses import replace
from functools import partial

from tokenwright.checkpoints.families.family import activation, dtype, heads_of, size_of_head, sizes
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_both_ropes, read_layer_types, read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.graph import Graph


def _parse(keys: JsonKeys, architecture: str, second: bool = False, third: bool = False) -> tuple[ModelConfig, Graph]:
    found = sizes(keys)
    layers, width = found["layers"], found["width"]
    heads, kv_heads = heads_of(keys)
    head_size = keys.whole("head_dim", size_of_head(keys, width, heads), most=1 << 16)
    context = keys.whole("max_position_embeddings", 8192, most=MAX_TOKENS)
    if third:
        rope, reach, local = read_both_ropes(keys, 10000.0, None, head_size, context)
        windows, rotary = _kinds(keys, layers)
    else:
        rope, reach = read_rope(keys, 10000.0 if second else 500000.0, head_size, context)
        local, windows = None, _windows(keys, layers) if second else (None,) * layers
        rotary = tuple(not second or window is not None for window in windows)
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=keys.whole("model_max_length", reach, most=MAX_TOKENS),  # Command-R: 131,072 beside 8,192
        positions=rope,
        windows=windows,
        rotary=rotary,
        local=local,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        norm_bias=False,
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="own" if keys.flag("use_qk_norm", False) else None,
        parallel="one norm",
        scales=Scales(logits=keys.number("logit_scale", 1.0 if third else 0.0625)),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )
    return config, decoder(config)


def _windows(keys: JsonKeys, layers: int) -> tuple[int | None, ...]:
    """The windows of the second architecture. The first files have keys for what transformers takes for granted."""
    keys.only("order_of_interleaved_layers", "local_attn_first", why="another order of layers")
    keys.only("position_embedding_type", "rope_gptj", why="other positions")
    keys.only("rotary_pct", 1, 1.0, why="rotation of a part of each head in this architecture")
    keys.only("use_gated_activation", True, why="an MLP without gates")
    keys.only("use_parallel_block", True, why="attention and MLP one after the other")
    keys.only("use_embedding_sharing", True, keys.raw("tie_word_embeddings") is not False, why="another head")
    window = keys.whole("sliding_window", 4096, most=MAX_TOKENS)
    every = keys.whole("sliding_window_pattern", 4)
    keys.only("layer_switch", every, why="another pattern of layers")
    types = keys.raw("layer_types")
    sliding = [(i + 1) % every != 0 for i in range(layers)] if types is None else read_layer_types(keys, types, layers)
    return tuple(window if slides else None for slides in sliding)


def _kinds(keys: JsonKeys, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The windows of the third architecture, and which layers have a rotation: not those of a kind with null."""
    keys.raw("pooling")  # of embedding models
    window = keys.whole("sliding_window", 4096, most=MAX_TOKENS)
    types, ropes = keys.raw("layer_types"), keys.raw("rope_parameters") or {}
    sliding = [False] * layers if types is None else read_layer_types(keys, types, layers)
    turned = [ropes.get(f"{kind}_attention", ropes) is not None for kind in ("full", "sliding")]
    return tuple(window if slides else None for slides in sliding), tuple(turned[slides] for slides in sliding)


COHERE = replace(
    LLAMA,
    architectures={"CohereForCausalLM": "cohere"},
    parse=_parse,
    neighbours=True,
    stacks=re.compile(r"layers\.\d+\.self_attn\.[qk]_norm\.weight"),  # [heads, head_dim]
)

COHERE2 = replace(COHERE, architectures={"Cohere2ForCausalLM": "cohere2"}, parse=partial(_parse, second=True))
COMPASS = replace(
    COHERE,
    architectures={
        "CohereCompassForCausalLM": "cohere_compass_text",
        "CohereCompassForConditionalGeneration": "cohere_compass",
    },
    parse=partial(_parse, third=True),
    neighbours=False,
)
