"""Cohere's Command-R, Aya and Command-A: parallel attention and MLP over one LayerNorm without bias, scaled logits."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_layer_types, windows_but
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Scales


def _own(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    return {
        "context": keys.whole("model_max_length", facts["context"], most=MAX_TOKENS),
        "qk_norm": "own" if keys.flag("use_qk_norm", False) else None,
    }


def _first_files(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:  # noqa: ARG001
    """Keys of early Cohere2 files, for which transformers has one fixed value."""
    keys.only("order_of_interleaved_layers", "local_attn_first", why="another order of layers")
    keys.only("position_embedding_type", "rope_gptj", why="other positions")
    keys.only("rotary_pct", 1, 1.0, why="rotation of a part of each head in this architecture")
    keys.only("use_gated_activation", True, why="an MLP without gates")
    keys.only("use_parallel_block", True, why="attention and MLP one after the other")
    keys.only("use_embedding_sharing", True, keys.raw("tie_word_embeddings") is not False, why="another head")
    keys.only("layer_switch", keys.whole("sliding_window_pattern", 4), why="another pattern of layers")
    return {}


def _kinds(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    """Layers of a kind whose rope_parameters are null have no rotation."""
    layers = facts["layers"]
    window = keys.whole("sliding_window", 4096, most=MAX_TOKENS)
    types, ropes = keys.raw("layer_types"), keys.raw("rope_parameters") or {}
    sliding = [False] * layers if types is None else read_layer_types(keys, types, layers)
    turned = [ropes.get(f"{kind}_attention", ropes) is not None for kind in ("full", "sliding")]
    return {
        "windows": tuple(window if slides else None for slides in sliding),
        "rotary": tuple(turned[slides] for slides in sliding),
    }


_COMMAND_R = parts.LlamaLike(
    parts.by_config(),
    parts.Norms(1e-5, {"norm": "layer", "norm_bias": False}, key="layer_norm_eps"),
    positions=parts.Positions(parts.rope(500000.0), windows=None, repeated=False),
    sizes=parts.Sizes(context=8192),
    scales=lambda keys, _: Scales(logits=keys.number("logit_scale", 0.0625)),
    tied=True,
    facts={"parallel": "one norm"},
    more=(_own,),
)
_COHERE2 = replace(
    _COMMAND_R,
    positions=parts.Positions(windows=windows_but(4, 4096, "sliding_window_pattern"), without="full", repeated=False),
    more=(_own, _first_files),
)
_COMPASS = replace(
    _COMMAND_R,
    positions=parts.Positions(parts.two_ropes(10000.0, None), windows=None, repeated=False),
    scales=lambda keys, _: Scales(logits=keys.number("logit_scale", 1.0)),
    more=(_own, _kinds),
    unused=("pooling",),
)
COHERE = replace(
    LLAMA,
    architectures={"CohereForCausalLM": "cohere"},
    parse=_COMMAND_R.parse,
    neighbours=True,
    stacks=re.compile(r"layers\.\d+\.self_attn\.[qk]_norm\.weight"),  # [heads, head_dim]
)
COHERE2 = replace(COHERE, architectures={"Cohere2ForCausalLM": "cohere2"}, parse=_COHERE2.parse)
COMPASS = replace(
    COHERE,
    architectures={
        "CohereCompassForCausalLM": "cohere_compass_text",
        "CohereCompassForConditionalGeneration": "cohere_compass",
    },
    parse=_COMPASS.parse,
    neighbours=False,
)
