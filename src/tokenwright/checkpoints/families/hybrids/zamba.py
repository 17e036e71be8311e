"""Zamba2: Mamba-2 layers; before some of them a block of attention and an MLP whose weights they share in turn.

The block reads a row beside its token's embedding. What it makes goes through a matrix of the layer into the input of
the layer's Mamba-2, not into the residual stream. Each layer adds low ranks of its own to the block's first matrices.
Absent keys take transformers' defaults (configuration_zamba2.py). Steps are limited by time_step_limit, as in
Nemotron-H: transformers has time_step_min there in a prompt, and no limit behind it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    TensorSource,
    activation,
    dtype,
    heads_of,
    named,
    size_of_head,
)
from tokenwright.checkpoints.families.graph_builder import graph_of, shared_block
from tokenwright.checkpoints.families.hybrids.mamba import CONV, Ssd, groups_of, names_of, ssd, step_limits
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_attended, read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.combined import SharedBlock
from tokenwright.models.graph import Graph
from tokenwright.models.op import LowRankPart, Matrix, Op
from tokenwright.models.recurrent import MOST_TAPS, Recurrent

_STATES = ("linear_attention", "mamba", "mamba2")
_NORM_EPS = 1e-5  # of the norm behind the recurrence; no config has it
# Of implementations, of the initialisation, or repeated by others.
_UNUSED = (
    *("attention_hidden_size", "chunk_size", "ffn_hidden_size", "hybrid_layer_ids", "kv_channels"),
    *("num_logits_to_keep", "num_query_groups", "time_step_floor", "time_step_max", "time_step_min"),
    *("use_mamba_kernels", "use_mem_eff_path"),
)


@dataclass(frozen=True, slots=True)
class _Shares:
    """How layers share blocks: `blocks` of them in turn. rank: of what each layer adds to a block's matrices."""

    hybrid: tuple[int, ...]  # the layers with a block
    blocks: int
    rank: int
    attention: bool  # whether layers add to q, k and v as well


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    width = keys.whole("hidden_size", 2560, most=MOST_WIDTH)
    heads, _ = heads_of(keys)
    size = size_of_head(keys, 2 * width, heads)
    keys.only("attention_head_dim", size, why="heads of another size in this architecture")
    attended = read_attended(keys, context=4096, layers=54, width=width, head_size=size)
    for key in _UNUSED:
        keys.raw(key)
    keys.only("use_long_context", False, why="positions scaled for a longer context in this architecture")
    turned, biases = keys.flag("use_mem_rope", False), keys.flag("add_bias_linear", False)
    config = ModelConfig(
        family="zamba",
        architecture=architecture,
        **attended | {"rotary": (turned,) * attended["layers"]},
        mlp_width=keys.whole("intermediate_size", 4 * width, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", 32000, most=MOST_VOCAB),
        norm="rms",
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        activation=activation(keys, "hidden_act", "gelu"),
        gated=True,
        mlp_bias=biases,
        scales=Scales(attention=(size / 2) ** -0.5),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )
    mamba, shares = _mamba(keys, width, biases), _shares(keys, config.layers)
    blocks = list[Op]()
    for i in range(config.layers):
        place = sum(op.kv is not None for op in blocks)
        mixer = ssd(config, i, mamba)
        if i in shares.hybrid:
            blocks.append(_shared(config, i, place, shares))
            place += 1
        blocks.append(replace(_plain(mixer), layer=place, beside=i in shares.hybrid))
    graph = graph_of(config, blocks)
    count = graph.layers
    return replace(config, layers=count, windows=(None,) * count, rotary=(turned,) * count), graph


def _shares(keys: JsonKeys, layers: int) -> _Shares:
    types = keys.raw("layers_block_type") or keys.raw("layer_types")
    if types is None:
        raise keys.error("layers_block_type must list the kind of each layer")
    states = read_states(keys, types, layers, _STATES, ("hybrid",))
    return _Shares(
        tuple(i for i, state in enumerate(states) if not state),
        keys.whole("num_mem_blocks", 1, most=MOST_LAYERS),
        keys.whole("adapter_rank", 128, most=MOST_WIDTH),
        keys.flag("use_shared_attention_adapter", False),
    )


def _mamba(keys: JsonKeys, width: int, biases: bool) -> Ssd:
    inner, heads = int(keys.number("mamba_expand", 2) * width), keys.whole("n_mamba_heads", 8, most=1 << 16)
    if inner % heads:
        raise keys.error(f"{inner} numbers cannot be divided into {heads} heads of Mamba; correct config.json")
    keys.only("mamba_headdim", inner // heads, why="heads that are not the layer's width together")
    keys.only("use_conv_bias", True, why="convolutions without biases in this architecture")
    return Ssd(
        heads,
        groups_of(keys, "mamba_ngroups", 1, heads),
        keys.whole("mamba_d_state", 64, most=1 << 16),
        inner // heads,
        keys.whole("mamba_d_conv", 4, least=2, most=MOST_TAPS),
        conv_bias=True,
        bias=biases,
        limits=step_limits(keys),
    )


def _plain(op: Recurrent) -> Recurrent:
    norm = op.recurrence.norm
    assert norm is not None, "Mamba-2 has one"
    return replace(op, recurrence=replace(op.recurrence, norm=replace(norm, eps=_NORM_EPS)))


def _shared(config: ModelConfig, layer: int, place: int, shares: _Shares) -> SharedBlock:
    """The block before a layer's Mamba-2. Its weights are named after the first layer that has it."""
    use = shares.hybrid.index(layer)
    first = shares.hybrid[use % shares.blocks]
    at = f"layers.{first}.uses.{use}"
    op = shared_block(config, first, f"layers.{layer}.shared_out", place)
    qkv, up = op.attention.qkv, op.mlp.up
    starts = accumulate((rows for _, rows in qkv.parts), initial=0)
    parts = [(one, start, rows) for one, start, (_, rows) in zip("qkv", starts, qkv.parts, strict=False)]
    low = _low_ranks(at, qkv.inner, shares.rank, parts) if shares.attention else ()
    gates = _low_ranks(at, up.inner, shares.rank, [("mlp", 0, up.out)])
    return replace(op, attention=replace(op.attention, low_ranks=low), mlp=replace(op.mlp, low_ranks=gates))


def _low_ranks(at: str, inner: int, rank: int, parts: Sequence[tuple[str, int, int]]) -> tuple[LowRankPart, ...]:
    """The low-rank products that a layer adds to parts of a matrix, by name, first output and number of outputs."""
    return tuple(
        LowRankPart(
            first,
            Matrix.single(f"{at}.{name}_down", rank, inner),
            Matrix.single(f"{at}.{name}_up", out, rank),
        )
        for name, first, out in parts
    )


_BLOCK = "layers.{i}.shared_transformer"
_ADAPTERS = {one: f"self_attn.linear_{one}_adapter_list" for one in "qkv"} | {
    "mlp": "feed_forward.gate_up_proj_adapter_list"
}
_OUTSIDE = {
    "norm": "final_layernorm",
    "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
    "layers.{i}.shared_norm": f"{_BLOCK}.input_layernorm",
    "layers.{i}.mlp_norm": f"{_BLOCK}.pre_ff_layernorm",
    "layers.{i}.mlp.down": f"{_BLOCK}.feed_forward.down_proj",
    "layers.{i}.shared_out": "layers.{i}.linear",
}
ZAMBA2 = replace(
    LLAMA,
    architectures={"Zamba2ForCausalLM": "zamba2"},
    parse=_parse,
    names={
        **LLAMA.names,
        **named(names_of("layers.{i}.mamba") | _OUTSIDE),
        **named({f"layers.{{i}}.attention.{one}": f"{_BLOCK}.self_attn.{one}_proj" for one in "qkvo"}),
        **{
            f"layers.{{i}}.mlp.{one}": TensorSource(f"{_BLOCK}.feed_forward.gate_up_proj", fused=True)
            for one in ("gate", "up")
        },
        **named(
            {
                f"layers.{{i}}.uses.{{e}}.{one}_{half}": f"{_BLOCK}.{adapters}.{{e}}.{number}"
                for one, adapters in _ADAPTERS.items()
                for number, half in enumerate(("down", "up"))
            }
        ),
    },
    renames=(
        (re.compile(r"(layers\.\d+\.)(?:mamba_decoder\.)?(mamba\.(?:A_log|dt_bias|D))"), r"\1\2.weight"),
        (re.compile(r"(layers\.\d+\.)mamba_decoder\.(.+)"), r"\1\2"),
    ),
    stacks=re.compile(CONV),
)
