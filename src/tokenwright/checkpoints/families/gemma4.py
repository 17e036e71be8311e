"""Gemma 4: heads of two sizes, values without a projection, shared K and V in the last layers, inputs of each layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from tokenwright.checkpoints.families import family, gemma
from tokenwright.checkpoints.families.graph_builder import block, graph_of
from tokenwright.checkpoints.families.llama import EACH_HEAD, FOUR_NORMS, LLAMA
from tokenwright.checkpoints.families.llama_like import Facts, LlamaLike, Sizes, around, by_config
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, expert_width
from tokenwright.checkpoints.families.positions import read_rope, windows_but
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import LinearScaling, Mixture, ModelConfig, NoScaling, Rope, Scales
from tokenwright.models.combined import Mixed
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.op import Norm, Op

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True, slots=True)
class _Positions4:
    window: int = 512

    def read(self, keys: JsonKeys, facts: Facts, context: int | None) -> Facts:
        layers, base = facts["layers"], (facts["kv_heads"], facts["head_size"])
        context = keys.whole("max_position_embeddings", context, most=MAX_TOKENS)
        family.check_repeats(keys, context)
        windows = (*windows_but(6, self.window)(keys, layers)[:-1], None)
        full, local = read_ropes(keys, _full_heads(keys, windows, base)[1], base[1], context)
        return {
            "context": context,
            "positions": full,
            "local": local,
            "windows": windows,
            "rotary": (True,) * layers,
            "kv_shared": gemma.read_shared(keys, windows, 0),
        }


@dataclass(frozen=True, slots=True)
class _Layers:
    full: tuple[int, int]  # KV heads and head size of full attention
    keys_alone: bool  # whether full attention makes K and V by one projection
    wide: bool  # whether MLPs of layers that share K and V are twice as wide
    inputs: int  # numbers of each layer's inputs; 0: none


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    if not keys.flag("enable_moe_block", False):
        keys.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    experts = keys.whole("num_experts", most=MOST_EXPERTS)
    width = expert_width(keys, "moe_intermediate_size", 0)
    return Mixture(experts, keys.whole("top_k_experts", most=experts), width, (True,) * layers)


def _full_heads(keys: JsonKeys, windows: Sequence[int | None], base: tuple[int, int]) -> tuple[int, int]:
    """KV heads and head size of full attention; transformers saves them by layer, in per_layer_config."""
    keys_alone = keys.flag("attention_k_eq_v", False)
    size = keys.whole("global_head_dim", 512, most=1 << 16)
    kv_heads = keys.whole("num_global_key_value_heads", base[0], most=1 << 16)
    listed = keys.raw("per_layer_config")
    if listed is None:
        return kv_heads if keys_alone else base[0], size
    if not isinstance(listed, dict) or not all(key.isdecimal() and isinstance(listed[key], dict) for key in listed):
        raise keys.error("per_layer_config must be an object with one for each layer that differs")
    given = {int(layer): one for layer, one in listed.items()}  # saved as 04 beside 10
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for layer, window in enumerate(windows):
        one = JsonKeys(given.get(layer, {}), f"{keys.where}: layer {layer} of per_layer_config")
        own = one.whole("num_key_value_heads", base[0], most=1 << 16), one.whole("head_dim", base[1], most=1 << 16)
        one.finish((), "Tokenwright has heads alone that differ by layer")
        found[window is None].add(own)
    if len(found[True]) > 1 or found[False] - {base}:
        raise keys.error("per_layer_config gives layers of one kind heads that differ, which Tokenwright does not have")
    return found[True].pop()


def read_ropes(
    keys: JsonKeys, full_size: int, size: int, context: int, default: Mapping[str, Any] = _ROPES
) -> tuple[Rope, Rope]:
    """The rotations of full attention, which may rotate a share of the pairs, and of layers with a window."""
    given = keys.raw("rope_parameters")
    if not isinstance(given, dict | None):
        raise keys.error("rope_parameters must be an object")
    both, at = default if given is None else given, f"{keys.where}: rope_parameters"
    part, sliding = (
        JsonKeys({"rope_parameters": both.get(f"{kind}_attention")}, f"{at}: {kind}_attention")
        for kind in ("full", "sliding")
    )
    local = read_rope(sliding, 1e4, size, context)[0]
    values = both.get("full_attention")
    full = JsonKeys(values if isinstance(values, dict) else {}, part.where)
    if full.text("rope_type", "default") != "proportional":
        rope = read_rope(part, 1e6, full_size, context)[0]
        if not isinstance(rope.scaling, NoScaling):
            raise part.error("it asks for a scaling that Tokenwright has not in layers with heads of another size")
        return replace(rope, spread=full_size), local
    share, factor = full.number("partial_rotary_factor", 1.0), full.number("factor", 1.0)
    theta, pairs = full.number("rope_theta", 1e6, above=1.0), int(share * full_size // 2)
    full.finish((), "a proportional rotation does not know it: correct config.json, or remove the key")
    if full_size % 2 or not 1 <= pairs <= full_size // 2:
        raise full.error(f"{pairs} pairs of dimensions turn of a head with {full_size}; correct partial_rotary_factor")
    scaling = NoScaling() if factor == 1 else LinearScaling(factor)
    return Rope(theta, scaling, None if 2 * pairs == full_size else 2 * pairs, full_size), local


def _cap(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    keys.only("use_bidirectional_attention", "vision", why="attention to later tokens")  # only within images
    cap = "final_logit_softcapping"
    return {"logit_cap": None if keys.raw(cap) is None else keys.number(cap)}


def embedding_scale(keys: JsonKeys, facts: Facts) -> Scales:  # noqa: ARG001
    return Scales(embedding=gemma.rounded(sqrt(facts["width"]), facts["dtype"]), attention=1.0)


def _graph(keys: JsonKeys, config: ModelConfig, inputs: int = 256) -> tuple[ModelConfig, Graph]:
    full = _full_heads(keys, config.windows, (config.kv_heads, config.head_size))
    if config.heads % full[0]:
        raise keys.error(
            f"{config.heads} query heads cannot share {full[0]} key-value heads evenly; correct config.json"
        )
    none = keys.is_null("hidden_size_per_layer_input")
    inputs = keys.whole("hidden_size_per_layer_input", 0 if none else inputs, least=0, most=family.MOST_WIDTH)
    vocab = gemma.read_inputs_vocab(keys)
    if inputs and vocab < config.vocab_size:
        raise keys.error(f"vocab_size_per_layer_input is {vocab:,}, fewer than the tokens of vocab_size")
    keys_alone, wide = keys.flag("attention_k_eq_v", False), keys.flag("use_double_wide_mlp", False)
    differ = _Layers(full, keys_alone, wide, inputs)
    graph = graph_of(config, [op for i in range(config.layers) for op in _block(config, differ, i)])
    return config, gemma.with_inputs(config, graph, inputs, vocab) if inputs else graph


def _block(config: ModelConfig, differ: _Layers, layer: int) -> tuple[Op, ...]:
    shares = layer >= config.layers - config.kv_shared
    kv_heads, size = differ.full if config.windows[layer] is None else (config.kv_heads, config.head_size)
    width = config.mlp_width * (2 if shares and differ.wide else 1)
    own = replace(config, kv_heads=kv_heads, head_size=size, mlp_width=width)
    attention, mlp = block(replace(own, mixture=None), layer)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP), "a layer has both"
    gate, stream = gemma.input_gate(config, differ.inputs, layer) if differ.inputs else None, f"layers.{layer}.stream"
    if config.mixture is None:
        return _attention(config, differ, attention), replace(mlp, stream=stream, inputs=gate)
    assert mlp.post_norm is not None, "all norms are there"
    first, second = (replace(mlp.post_norm, name=f"layers.{layer}.{one}_post_norm") for one in ("dense", "experts"))
    experts = _experts(own, layer, second)
    mixed = Mixed(replace(mlp, post_norm=first), experts, mlp.post_norm, gate, stream)
    return _attention(config, differ, attention), mixed


def _experts(config: ModelConfig, layer: int, post_norm: Norm) -> Experts:
    _, op = block(config, layer)
    assert isinstance(op, Experts) and op.norm is not None, "the layer has experts"
    return replace(
        op,
        norm=replace(op.norm, name=f"layers.{layer}.experts_norm"),
        post_norm=post_norm,
        router_norm=replace(op.norm, name=f"layers.{layer}.router_norm"),
        router_scale=config.width**-0.5,
        weight_scales=f"layers.{layer}.mlp.weight_scales",
    )


def _attention(config: ModelConfig, differ: _Layers, op: Attention) -> Attention:
    op = gemma.own_or_shared(config, op)
    if op.source is None and differ.keys_alone and op.window is None:
        return replace(op, qkv=replace(op.qkv, parts=op.qkv.parts[:2]), values="keys")
    return op


_STACKS = r"experts\.(?:gate_up|down)_proj"
_LIKE = LlamaLike(
    by_config(),
    around(1e-6),
    EACH_HEAD,
    _Positions4(),
    Sizes(heads=8, kv_heads=4, head_size=256, vocab_size=262144, context=131072),
    gemma.GELU,
    mixture=_mixture,
    scales=embedding_scale,
    tied=True,
    more=(_cap,),
    graph=_graph,
)
_UNIFIED = replace(  # the 12B: without experts and inputs of layers
    _LIKE,
    positions=_Positions4(window=1024),
    sizes=replace(_LIKE.sizes, context=262144),
    graph=lambda keys, config: _graph(keys, config, inputs=0),
)
GEMMA4 = replace(
    LLAMA,
    architectures={"Gemma4ForCausalLM": "gemma4_text", "Gemma4ForConditionalGeneration": "gemma4"},
    parse=_LIKE.parse,
    names=LLAMA.names
    | gemma.INPUT_NAMES
    | FOUR_NORMS
    | family.in_layers("""
        dense_post_norm=post_feedforward_layernorm_1 experts_norm=pre_feedforward_layernorm_2
        experts_post_norm=post_feedforward_layernorm_2 router_norm=router.scale mlp.router=router.proj
    """)
    | {
        "layers.{i}.stream": family.TensorSource("layers.{i}.layer_scalar", wide=True),
        "layers.{i}.mlp.weight_scales": family.TensorSource("layers.{i}.router.per_expert_scale", wide=True),
    }
    | family.stacked_experts("experts.gate_up_proj", "experts.down_proj"),
    renames=(family.without_ending(rf"layer_scalar|router\.(?:per_expert_)?scale|{_STACKS}"),),
    stacks=re.compile(rf"layers\.\d+\.{_STACKS}\.weight"),
    shared_kv=gemma.SHARED_KV,
    orders=lambda name, graph: None,  # noqa: ARG005  files have our order
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    architectures={
        "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
        "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    },
    parse=_UNIFIED.parse,
)
