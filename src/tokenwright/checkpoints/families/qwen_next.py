"""Qwen3-Next and Qwen3.5: gated delta rules in most layers, gated attention in the others, an MLP or experts in each.

Norms multiply by 1 + weight, but for the one behind a delta rule. Qwen3.5 beside an image encoder is read as its text
model alone. Absent keys take transformers' defaults (configuration_qwen3_next.py, ..._qwen3_5.py, ..._qwen3_5_moe.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    Order,
    TensorSource,
    activation,
    check_repeats,
    dtype,
    heads_of,
    named,
)
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.mixtures import QWEN_NAMES, read_mixture
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Graph, Matrix, Norm
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

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
    experts: bool


_NEXT = QwenLike(48, 2048, 5632, 151936, 2, grouped=True, experts=True)
_DENSE = QwenLike(32, 4096, 12288, 248320, 4, grouped=False, experts=False)
_MIXED = QwenLike(40, 2048, 5632, 248320, 2, grouped=False, experts=True)
_LIKE: Mapping[str, QwenLike] = {
    "Qwen3NextForCausalLM": _NEXT,
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5ForConditionalGeneration": _DENSE,
    "Qwen3_5MoeForCausalLM": _MIXED,
    "Qwen3_5MoeForConditionalGeneration": _MIXED,
}


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


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    like = _LIKE[architecture]
    layers = keys.whole("num_hidden_layers", like.layers, most=MOST_LAYERS)
    heads, kv_heads = heads_of(keys, 16, like.kv_heads)
    head_size = keys.whole("head_dim", 256, most=1 << 16)
    context = keys.whole("max_position_embeddings", 32768, most=MAX_TOKENS)
    rope, reach = read_rope(keys, 10000.0, head_size, context, 0.25)
    check_repeats(keys, context, reach)
    keys.only("attn_output_gate", True, why="attention without its gate in this architecture")
    for key in _UNUSED:
        keys.raw(key)
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        family="qwen-next",
        architecture=architecture,
        layers=layers,
        width=keys.whole("hidden_size", like.width, most=MOST_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=keys.whole("intermediate_size", like.mlp_width, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", like.vocab_size, most=MOST_VOCAB),
        context=reach,
        positions=rope,
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm="rms",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation(keys, "hidden_act", "silu"),
        gated=True,
        qkv_bias=biases,
        out_bias=biases,
        qk_norm="head",
        out_gate=True,
        mixture=read_mixture(keys, "qwen3-next" if like.grouped else "qwen3.5", layers) if like.experts else None,
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    sizes = _delta_heads(keys)
    return config, decoder(
        config, {i: _delta(config, i, sizes, like.grouped) for i, full in enumerate(_full(keys, layers)) if not full}
    )


def _full(keys: JsonKeys, layers: int) -> list[bool]:
    """Whether each layer has attention."""
    types, every = keys.raw("layer_types"), keys.whole("full_attention_interval", 4)
    if types is None:
        return [(i + 1) % every == 0 for i in range(layers)]
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(one in known for one in types):
        raise keys.error(f"layer_types must list {layers} times {' or '.join(known)}, one for each layer")
    return [one == "full_attention" for one in types]


def _delta_heads(keys: JsonKeys) -> DeltaHeads:
    key_heads = keys.whole("linear_num_key_heads", 16, most=1 << 16)
    heads = keys.whole("linear_num_value_heads", 32, most=1 << 16)
    if heads % key_heads:
        raise keys.error(f"{heads} value heads cannot share {key_heads} key heads evenly; correct config.json")
    key_size, value_size = (keys.whole(f"linear_{one}_head_dim", 128, most=1 << 16) for one in ("key", "value"))
    return DeltaHeads(
        key_heads, heads, key_size, value_size, keys.whole("linear_conv_kernel_dim", 4, least=2, most=MOST_TAPS)
    )


def _delta(config: ModelConfig, layer: int, sizes: DeltaHeads, grouped: bool) -> Recurrent:
    """The rows of the projection are those of q, k, v, the gate, and of each head b and a."""
    at, width = f"layers.{layer}.delta", config.width
    channels = 2 * sizes.keys + sizes.values
    gate, b = channels, channels + sizes.values
    places = Places(query=0, key=sizes.keys, value=2 * sizes.keys, gate=gate, beta=b, decay=b + sizes.heads)
    parts = {"qkv": channels, "z": sizes.values, "b": sizes.heads, "a": sizes.heads}
    if grouped:
        parts = {"qkvz": channels + sizes.values, "ba": 2 * sizes.heads}
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
    )
    project = Matrix(f"{at}.in", tuple((f"{at}.{name}", rows) for name, rows in parts.items()), width)
    return Recurrent(layer, before, project, recurrence, Matrix.single(f"{at}.out", width, sizes.values), after)


def _order(base: str, graph: Graph) -> Order | None:
    """The order of the rows that Qwen3-Next's files have key head by key head."""
    part = base.rsplit(".", 1)[-1]
    if part not in ("qkvz", "ba"):
        return None
    of = next(op.recurrence for op in graph.blocks if isinstance(op, Recurrent))
    values = of.heads // of.key_heads
    each = (of.key_size, of.key_size, *([values * of.value_size] * 2)) if part == "qkvz" else (values, values)
    block, rows = sum(each), []
    for i, size in enumerate(each):
        first = sum(each[:i])
        rows += [head * block + first + row for head in range(of.key_heads) for row in range(size)]
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
    **{f"layers.{{i}}.delta.{one}": f"layers.{{i}}.linear_attn.in_proj_{one}" for one in ("qkvz", "ba", *"zba", "qkv")},
    "layers.{i}.delta.conv": "layers.{i}.linear_attn.conv1d",
    "layers.{i}.delta.a_log": "layers.{i}.linear_attn.A_log",
    "layers.{i}.delta.dt": "layers.{i}.linear_attn.dt_bias",
    "layers.{i}.delta.norm": "layers.{i}.linear_attn.norm",
    "layers.{i}.delta.out": "layers.{i}.linear_attn.out_proj",
}

QWEN_NEXT = replace(
    LLAMA,
    architectures={
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_5_text",
        "Qwen3_5ForConditionalGeneration": "qwen3_5",
    },
    parse=_parse,
    names={**_one_more(LLAMA.names), **_GATED, **named({**QWEN_NAMES, **_DELTA})},
    renames=((re.compile(r"(layers\.\d+\.linear_attn\.(?:A_log|dt_bias))"), r"\1.weight"),),
    stacks=re.compile(r"layers\.\d+\.linear_attn\.conv1d\.weight"),  # [channels, 1, taps]
    own_orders=_order,
)

_EXPERTS = "layers.{i}.mlp.experts"
# The files of Qwen3.5 have the experts of a layer in one tensor, [experts, 2 m, width] and [experts, width, m].
QWEN_MIXED = replace(
    QWEN_NEXT,
    architectures={"Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"},
    names={
        **QWEN_NEXT.names,
        f"{_EXPERTS}.{{e}}.gate": TensorSource(f"{_EXPERTS}.gate_up_proj", stacked=True, turn=(0, 2), halves=True),
        f"{_EXPERTS}.{{e}}.up": TensorSource(f"{_EXPERTS}.gate_up_proj", stacked=True, turn=(1, 2), halves=True),
        f"{_EXPERTS}.{{e}}.down": TensorSource(f"{_EXPERTS}.down_proj", stacked=True),
    },
    renames=(
        *QWEN_NEXT.renames,
        (re.compile(r"(layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj)"), r"\1.weight"),
    ),
    stacks=re.compile(r"layers\.\d+\.(?:linear_attn\.conv1d|mlp\.experts\.(?:gate_up|down)_proj)\.weight"),
)
