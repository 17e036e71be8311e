"""Gemma 4: heads of two sizes, values without a projection, shared K and V in the last layers, inputs of each layer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from tokenwright.checkpoints.families.family import (
    MOST_WIDTH,
    TensorSource,
    activation,
    check_repeats,
    dtype,
    heads_of,
    named,
    sizes,
)
from tokenwright.checkpoints.families.gemma import (
    INPUT_NAMES,
    input_gate,
    own_or_shared,
    read_inputs_vocab,
    read_shared,
    rounded,
    with_inputs,
)
from tokenwright.checkpoints.families.graph_builder import block, graph_of
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, expert_width
from tokenwright.checkpoints.families.positions import read_layer_types, read_rope
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
class _Layers:
    full: tuple[int, int]  # KV heads and head size of layers with full attention
    keys_alone: bool  # whether these make K and V by one projection
    shared: int  # the last layers, which read K and V of layers before
    wide: bool  # whether the MLPs of those have twice the width
    inputs: int  # numbers of each layer's inputs; 0: there are none
    inputs_vocab: int


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    found = sizes(keys, 262144)
    layers, width = found["layers"], found["width"]
    heads, kv_heads = heads_of(keys, 8, 4)
    head_size = keys.whole("head_dim", 256, most=1 << 16)
    unified = "Unified" in architecture  # the 12B: without experts and inputs of layers
    context = keys.whole("max_position_embeddings", 262144 if unified else 131072, most=MAX_TOKENS)
    check_repeats(keys, context)
    windows = _windows(keys, layers, 1024 if unified else 512)
    differ = _differences(keys, windows, (kv_heads, head_size), heads, 0 if unified else 256)
    rope, local = _ropes(keys, differ.full[1], head_size, context)
    biases = keys.flag("attention_bias", False)
    keys.only("use_bidirectional_attention", "vision", why="attention to later tokens")  # of images alone
    kept = dtype(keys)
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=context,
        positions=rope,
        windows=windows,
        rotary=(True,) * layers,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head",
        post_norm=True,
        local=local,
        logit_cap=None if keys.raw("final_logit_softcapping") is None else keys.number("final_logit_softcapping"),
        scales=Scales(embedding=rounded(sqrt(width), kept), attention=1.0),
        kv_shared=differ.shared,
        mixture=_mixture(keys, layers),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=kept,
    )
    return config, _graph(config, differ)


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    if not keys.flag("enable_moe_block", False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):  # without effect
            keys.raw(key)
        return None
    experts = keys.whole("num_experts", most=MOST_EXPERTS)
    width = expert_width(keys, "moe_intermediate_size", 0)
    return Mixture(experts, keys.whole("top_k_experts", most=experts), width, (True,) * layers)


def _windows(keys: JsonKeys, layers: int, size: int) -> tuple[int | None, ...]:
    """The attention window of each layer in tokens; None for full attention, which the last layer always has."""
    types, window = keys.raw("layer_types"), keys.whole("sliding_window", size, most=MAX_TOKENS)
    sliding = [(i + 1) % 6 != 0 for i in range(layers)] if types is None else read_layer_types(keys, types, layers)
    return tuple(window if slides and i < layers - 1 else None for i, slides in enumerate(sliding))


def _differences(
    keys: JsonKeys, windows: Sequence[int | None], base: tuple[int, int], heads: int, inputs: int
) -> _Layers:
    keys_alone = keys.flag("attention_k_eq_v", False)
    full = _full_heads(keys, windows, base, keys_alone)
    if heads % full[0]:
        raise keys.error(f"{heads} query heads cannot share {full[0]} key-value heads evenly; correct config.json")
    shared = read_shared(keys, windows, 0)
    none = keys.is_null("hidden_size_per_layer_input")
    inputs = keys.whole("hidden_size_per_layer_input", 0 if none else inputs, least=0, most=MOST_WIDTH)
    vocab = read_inputs_vocab(keys)
    if inputs and vocab < keys.whole("vocab_size", 262144):
        raise keys.error(f"vocab_size_per_layer_input is {vocab:,}, fewer than the tokens of vocab_size")
    return _Layers(full, keys_alone, shared, keys.flag("use_double_wide_mlp", False), inputs, vocab)


def _full_heads(
    keys: JsonKeys, windows: Sequence[int | None], base: tuple[int, int], keys_alone: bool
) -> tuple[int, int]:
    """KV heads and head size of layers with full attention. transformers saves them by layer: per_layer_config."""
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


def _ropes(keys: JsonKeys, full_size: int, size: int, context: int) -> tuple[Rope, Rope]:
    """The rotations of layers with full attention, by default of a quarter of the pairs, and of those with a window."""
    given = keys.raw("rope_parameters")
    if not isinstance(given, dict | None):
        raise keys.error("rope_parameters must be an object")
    both, at = _ROPES if given is None else given, f"{keys.where}: rope_parameters"
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


def _graph(config: ModelConfig, differ: _Layers) -> Graph:
    graph = graph_of(config, [op for i in range(config.layers) for op in _block(config, differ, i)])
    if not differ.inputs:
        return graph
    return with_inputs(config, graph, differ.inputs, differ.inputs_vocab)


def _block(config: ModelConfig, differ: _Layers, layer: int) -> tuple[Op, ...]:
    shares = layer >= config.layers - differ.shared
    kv_heads, size = differ.full if config.windows[layer] is None else (config.kv_heads, config.head_size)
    width = config.mlp_width * (2 if shares and differ.wide else 1)
    own = replace(config, kv_heads=kv_heads, head_size=size, mlp_width=width)
    attention, mlp = block(replace(own, mixture=None), layer)
    assert isinstance(attention, Attention) and isinstance(mlp, MLP), "a layer has both"
    gate, stream = input_gate(config, differ.inputs, layer) if differ.inputs else None, f"layers.{layer}.stream"
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
    op = own_or_shared(config, op)
    if op.source is None and differ.keys_alone and op.window is None:
        return replace(op, qkv=replace(op.qkv, parts=op.qkv.parts[:2]), values="keys")
    return op


_GATE_UP, _STACKS = "layers.{i}.experts.gate_up_proj", r"experts\.(?:gate_up|down)_proj"

GEMMA4 = replace(
    LLAMA,
    architectures={
        "Gemma4ForCausalLM": "gemma4_text",
        "Gemma4ForConditionalGeneration": "gemma4",
        "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
        "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    },
    parse=_parse,
    names=LLAMA.names
    | INPUT_NAMES
    | named(
        {
            "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
            "layers.{i}.stream": TensorSource("layers.{i}.layer_scalar", wide=True),
            "layers.{i}.dense_post_norm": "layers.{i}.post_feedforward_layernorm_1",
            "layers.{i}.experts_norm": "layers.{i}.pre_feedforward_layernorm_2",
            "layers.{i}.experts_post_norm": "layers.{i}.post_feedforward_layernorm_2",
            "layers.{i}.router_norm": "layers.{i}.router.scale",
            "layers.{i}.mlp.router": "layers.{i}.router.proj",
            "layers.{i}.mlp.weight_scales": TensorSource("layers.{i}.router.per_expert_scale", wide=True),
            "layers.{i}.mlp.experts.{e}.gate": TensorSource(_GATE_UP, stacked=True, turn=(0, 2), halves=True),
            "layers.{i}.mlp.experts.{e}.up": TensorSource(_GATE_UP, stacked=True, turn=(1, 2), halves=True),
            "layers.{i}.mlp.experts.{e}.down": TensorSource("layers.{i}.experts.down_proj", stacked=True),
        }
    ),
    renames=((re.compile(rf"(layers\.\d+\.(?:layer_scalar|router\.(?:per_expert_)?scale|{_STACKS}))"), r"\1.weight"),),
    stacks=re.compile(rf"layers\.\d+\.{_STACKS}\.weight"),
    shared_kv=re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj|k_norm)\.(?:weight|bias)"),
    orders=lambda name, graph: None,  # noqa: ARG005  files have our order
)
