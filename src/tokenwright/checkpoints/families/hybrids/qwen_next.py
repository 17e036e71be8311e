"""Qwen3-Next, Qwen3.5, Lara Mini and Olmo-Hybrid: gated delta rules in most layers, attention in the others."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenwright.checkpoints.families.family import (
    MOST_MLP,
    MOST_VOCAB,
    NextNames,
    Order,
    TensorSource,
    activation,
    dtype,
    named,
)
from tokenwright.checkpoints.families.graph_builder import block, decoder, graph_of, mixer_norms
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.mixtures import LARA, QWEN3_5, QWEN3_NEXT, QWEN_NAMES, Reader, read_mixture
from tokenwright.checkpoints.families.positions import read_attended, read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

_OLMO_EPS = 1e-5  # of the norm behind a delta rule; no config has it
_OLMO_UNUSED = (
    *("fla_hybrid_attention_indices", "linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
_LARA_TYPES = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
_UNUSED = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


@dataclass(frozen=True, slots=True)
class QwenLike:
    """The differences between the generations; each number is the default of an absent key."""

    layers: int
    width: int
    mlp_width: int
    vocab_size: int
    kv_heads: int
    grouped: bool  # whether files have the rows of q, k, v and the gate of a key head side by side
    experts: Reader | None


_NEXT = QwenLike(48, 2048, 5632, 151936, 2, grouped=True, experts=QWEN3_NEXT)
_DENSE = QwenLike(32, 4096, 12288, 248320, 4, grouped=False, experts=None)
_MIXED = QwenLike(40, 2048, 5632, 248320, 2, grouped=False, experts=QWEN3_5)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The sizes of a gated delta rule: its heads share `key_heads` queries and keys."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.heads * self.value_size


def _parse(keys: JsonKeys, architecture: str, like: QwenLike) -> tuple[ModelConfig, Graph]:
    attended = read_attended(
        keys,
        context=32768,
        layers=like.layers,
        width=like.width,
        heads=16,
        kv_heads=like.kv_heads,
        head_size=256,
        partial=0.25,
    )
    layers = attended["layers"]
    keys.only("attn_output_gate", True, why="attention without its gate in this architecture")
    for key in _UNUSED:
        keys.raw(key)
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        **attended,
        mlp_width=keys.whole("intermediate_size", like.mlp_width, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", like.vocab_size, most=MOST_VOCAB),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head",
        out_gate=True,
        mixture=read_mixture(keys, like.experts, layers),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    sizes = _delta_heads(keys, DeltaHeads(16, 32, 128, 128, 4))
    parts = {"qkv": 2 * sizes.keys + sizes.values, "z": sizes.values, "b": sizes.heads, "a": sizes.heads}
    in_turn = keys.flag("linear_heads_in_turn", False) and sizes.heads > sizes.key_heads  # of GGUF files alone
    return config, decoder(
        config, {i: _delta(config, i, sizes, parts, in_turn) for i, full in enumerate(_full(keys, layers)) if not full}
    )


def _parse_lara(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    """Layers of three types: delta rules, attention with a window, and attention without positions."""
    attended = read_attended(
        keys, context=131072, layers=34, width=1024, heads=16, kv_heads=4, head_size=128, theta=10000.0
    )
    layers, window = attended["layers"], keys.whole("sliding_window", 512, most=MAX_TOKENS)
    types = keys.raw("layer_types") or [_LARA_TYPES[i % len(_LARA_TYPES)] for i in range(layers)]
    states = read_states(keys, types, layers, ("linear_attention",), ("sliding_attention", "full_attention"))
    windows = tuple(window if one == "sliding_attention" else None for one in types)
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        **(attended | {"windows": windows, "rotary": tuple(one is not None for one in windows)}),
        mlp_width=keys.whole("intermediate_size", 5632, most=MOST_MLP),  # its layers have experts alone
        vocab_size=keys.whole("vocab_size", 151936, most=MOST_VOCAB),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head",
        mixture=read_mixture(keys, LARA, layers),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    sizes = _delta_heads(keys, DeltaHeads(8, 16, 128, 128, 4))
    parts = {"qkv": 2 * sizes.keys + sizes.values, "z": sizes.values, "b": sizes.heads, "a": sizes.heads}
    return config, decoder(config, {i: _delta(config, i, sizes, parts) for i, state in enumerate(states) if state})


def _parse_olmo(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    """Norms stand before the ops of layers with a delta rule, and behind those of layers with attention."""
    rope = keys.raw("rope_parameters")
    nope = isinstance(rope, dict) and rope.get("rope_theta", 0) is None  # null: no positions; absent: the default base
    attended = read_attended(keys, context=65536, width=3840, heads=30)
    layers, heads = attended["layers"], attended["heads"]
    for key in _OLMO_UNUSED:
        keys.raw(key)
    keys.only("linear_use_gate", True, why="a delta rule without its gate in this architecture")
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        **(attended | {"rotary": (not nope,) * layers}),
        mlp_width=keys.whole("intermediate_size", 11008, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", 100352, most=MOST_VOCAB),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="whole",
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    key_heads = keys.whole("linear_num_key_heads", heads, most=1 << 16)
    key_size = keys.whole("linear_key_head_dim", int(0.75 * config.width / key_heads), most=1 << 16)
    sizes = _delta_heads(keys, DeltaHeads(heads, heads, key_size, 2 * key_size, 4))
    factor = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
    behind, blocks = replace(config, pre_norm=False, post_norm=True), list[Op]()
    parts = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values, "z": sizes.values, "b": sizes.heads, "a": sizes.heads}
    full = _full(keys, layers)
    full[-1] |= not any(full) and keys.raw("layer_types") is None
    for i, attends in enumerate(full):
        delta = _delta(config, i, sizes, parts)
        convolutions = tuple((f"conv_{one}", parts[one]) for one in "qkv")
        norm = Norm(f"{delta.recurrence.name}.norm", "rms", sizes.value_size, _OLMO_EPS)
        rule = replace(delta.recurrence, beta_factor=factor, conv_parts=convolutions, norm=norm)
        delta = replace(delta, recurrence=rule)
        blocks += block(behind, i) if attends else block(config, i, delta)
    return config, graph_of(config, blocks)


def _full(keys: JsonKeys, layers: int) -> list[bool]:
    types, every = keys.raw("layer_types"), keys.whole("full_attention_interval", 4)
    if types is None:
        return [(i + 1) % every == 0 for i in range(layers)]
    return [not state for state in read_states(keys, types, layers, ("linear_attention",), ("full_attention",))]


def _delta_heads(keys: JsonKeys, default: DeltaHeads) -> DeltaHeads:
    key_heads = keys.whole("linear_num_key_heads", default.key_heads, most=1 << 16)
    heads = keys.whole("linear_num_value_heads", default.heads, most=1 << 16)
    if heads % key_heads:
        raise keys.error(f"{heads} value heads cannot share {key_heads} key heads evenly; correct config.json")
    key_size = keys.whole("linear_key_head_dim", default.key_size, most=1 << 16)
    value_size = keys.whole("linear_value_head_dim", default.value_size, most=1 << 16)
    taps = keys.whole("linear_conv_kernel_dim", default.taps, least=2, most=MOST_TAPS)
    return DeltaHeads(key_heads, heads, key_size, value_size, taps)


def _delta(
    config: ModelConfig,
    layer: int,
    sizes: DeltaHeads,
    parts: Mapping[str, int],
    in_turn: bool = False,
) -> Recurrent:
    """The rows of the projection are those of q, k, v, the gate, and of each head b and a; `parts` are the file's."""
    at, width = f"layers.{layer}.delta", config.width
    channels = 2 * sizes.keys + sizes.values
    gate, b = channels, channels + sizes.values
    places = Places(query=0, key=sizes.keys, value=2 * sizes.keys, gate=gate, beta=b, decay=b + sizes.heads)
    before, after = mixer_norms(config, layer)
    recurrence = Recurrence(
        at,
        "delta",
        channels,
        sizes.taps,
        places,
        heads=sizes.heads,
        key_heads=sizes.key_heads,
        key_size=sizes.key_size,
        value_size=sizes.value_size,
        norm=Norm(f"{at}.norm", "rms", sizes.value_size, config.norm_eps),
        in_turn=in_turn,
    )
    project = Matrix(f"{at}.in", tuple((f"{at}.{name}", rows) for name, rows in parts.items()), width)
    return Recurrent(layer, before, project, recurrence, Matrix.single(f"{at}.out", width, sizes.values), after)


def delta_order(base: str, graph: Graph) -> Order | None:
    """The order of the rows that Qwen3-Next's files have key head by key head: q, k, v and the gate; b and a."""
    part = base.rsplit(".", 1)[-1]
    if part not in ("qkv", "z", "b", "a"):
        return None
    of = next(op.recurrence for op in graph.blocks if isinstance(op, Recurrent))
    values = of.heads // of.key_heads
    each = (of.key_size, of.key_size, *([values * of.value_size] * 2)) if part in ("qkv", "z") else (values, values)
    ours = {"qkv": (0, 1, 2), "z": (3,), "b": (0,), "a": (1,)}[part]
    block, firsts = sum(each), [sum(each[:i]) for i in ours]
    rows = [
        head * block + first + row
        for first, i in zip(firsts, ours, strict=True)
        for head in range(of.key_heads)
        for row in range(each[i])
    ]
    return Order(block * of.key_heads, tuple(rows))


def _one_more(names: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Norms multiply by 1 + weight, as the loaded one does, but for that behind a delta rule."""
    of_norms = {name: replace(one, plus=1.0) for name, one in names.items() if name.endswith("norm")}
    return {**names, **of_norms}


_GATED: dict[str, Any] = {
    f"layers.{{i}}.attention.{ours}": TensorSource("layers.{i}.self_attn.q_proj", turn=(turn, 2))
    for ours, turn in (("q", 0), ("out_gate", 1))
}
_DELTA = {
    **{f"layers.{{i}}.delta.{one}": f"layers.{{i}}.linear_attn.in_proj_{one}" for one in ("qkv", "z", "b", "a")},
    "layers.{i}.delta.conv": "layers.{i}.linear_attn.conv1d",
    "layers.{i}.delta.a_log": "layers.{i}.linear_attn.A_log",
    "layers.{i}.delta.dt": "layers.{i}.linear_attn.dt_bias",
    "layers.{i}.delta.norm": "layers.{i}.linear_attn.norm",
    "layers.{i}.delta.out": "layers.{i}.linear_attn.out_proj",
}

# The layer that predicts one token further has attention. Its tensors beside the usual ones lie outside `mtp.layers.0`.
_NEXT_PARTS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_NEXT_NAMES = NextNames(*_NEXT_PARTS, at="mtp.layers.0", plus=1.0)
_NEXT_RENAME = re.compile(rf"mtp\.((?:{'|'.join(_NEXT_PARTS)})\.weight)"), r"mtp.layers.0.\1"

QWEN_DENSE = replace(
    LLAMA,
    architectures={"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5ForConditionalGeneration": "qwen3_5"},
    parse=partial(_parse, like=_DENSE),
    names={**_one_more(LLAMA.names), **_GATED, **named({**QWEN_NAMES, **_DELTA})},
    renames=((re.compile(r"(layers\.\d+\.linear_attn\.(?:A_log|dt_bias))"), r"\1.weight"), _NEXT_RENAME),
    stacks=re.compile(r"layers\.\d+\.linear_attn\.conv1d\.weight"),  # [channels, 1, taps]
    following=_NEXT_NAMES,
)
_GROUPED = {"qkv": "qkvz", "z": "qkvz", "b": "ba", "a": "ba"}
QWEN_NEXT = replace(
    QWEN_DENSE,
    architectures={"Qwen3NextForCausalLM": "qwen3_next"},
    parse=partial(_parse, like=_NEXT),
    names=QWEN_DENSE.names
    | named({f"layers.{{i}}.delta.{a}": f"layers.{{i}}.linear_attn.in_proj_{b}" for a, b in _GROUPED.items()}),
    own_orders=delta_order,
)

_EXPERTS = "layers.{i}.mlp.experts"
_APART = tuple(f"{_EXPERTS}.{{e}}.{one}" for one in ("gate", "up", "down"))
# The files of Qwen3.5 have the experts of a layer in one tensor, [experts, 2 m, width] and [experts, width, m].
QWEN_MIXED = replace(
    QWEN_DENSE,
    architectures={"Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"},
    parse=partial(_parse, like=_MIXED),
    names={
        **QWEN_DENSE.names,
        f"{_EXPERTS}.{{e}}.gate": TensorSource(f"{_EXPERTS}.gate_up_proj", stacked=True, turn=(0, 2), halves=True),
        f"{_EXPERTS}.{{e}}.up": TensorSource(f"{_EXPERTS}.gate_up_proj", stacked=True, turn=(1, 2), halves=True),
        f"{_EXPERTS}.{{e}}.down": TensorSource(f"{_EXPERTS}.down_proj", stacked=True),
    },
    renames=(
        *QWEN_DENSE.renames,
        (re.compile(r"((?:mtp\.)?layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj)"), r"\1.weight"),
    ),
    stacks=re.compile(r"(?:mtp\.)?layers\.\d+\.(?:linear_attn\.conv1d|mlp\.experts\.(?:gate_up|down)_proj)\.weight"),
    following=replace(_NEXT_NAMES, apart={one: QWEN_DENSE.names[one] for one in _APART}),
)

# Its files have q, k, v, the gate, b and a of a layer in one tensor.
LARA_MINI = replace(
    QWEN_MIXED,
    architectures={"LaraMiniForCausalLM": "lara_mini"},
    parse=_parse_lara,
    names={
        **LLAMA.names,
        **named({**QWEN_NAMES, **_DELTA}),
        **{name: QWEN_MIXED.names[name] for name in _APART},
        **{
            f"layers.{{i}}.delta.{one}": TensorSource("layers.{i}.linear_attn.in_proj", fused=True)
            for one in ("qkv", "z", "b", "a")
        },
        "layers.{i}.delta.norm": TensorSource("layers.{i}.linear_attn.out_norm"),
    },
    following=None,
)

_OLMO_DELTA = {
    f"layers.{{i}}.delta.{ours}": f"layers.{{i}}.linear_attn.{theirs}_proj"
    for ours, theirs in {**dict(zip("qkvba", "qkvba", strict=True)), "z": "g", "out": "o"}.items()
}
OLMO_HYBRID = replace(
    LLAMA,
    architectures={"OlmoHybridForCausalLM": "olmo_hybrid"},
    parse=_parse_olmo,
    names={
        **LLAMA.names,
        **named({**_DELTA, **_OLMO_DELTA}),
        **named({f"layers.{{i}}.delta.conv_{one}": f"layers.{{i}}.linear_attn.{one}_conv1d" for one in "qkv"}),
        **named(
            {
                "layers.{i}.delta.norm": "layers.{i}.linear_attn.o_norm",
                "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
                "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
            }
        ),
    },
    renames=(
        *QWEN_DENSE.renames,
        (re.compile(r"(layers\.\d+)\.attention_layer_norm\.weight"), r"\1.input_layernorm.weight"),
        (re.compile(r"(layers\.\d+)\.feedforward_layer_norm\.weight"), r"\1.post_attention_layernorm.weight"),
    ),
    stacks=re.compile(r"layers\.\d+\.linear_attn\.[qkv]_conv1d\.weight"),
)
