"""Qwen3-Next, Qwen3.5, Lara Mini and Olmo-Hybrid: gated delta rules in most layers, attention in the others."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families.graph_builder import block, decoder, graph_of, mixer_norms
from tokenwright.checkpoints.families.llama import ALL_HEADS, EACH_HEAD, LLAMA, POST_NORMS
from tokenwright.checkpoints.families.llama_like import FULL, Facts, LlamaLike, Positions, Sizes, by_config, rope
from tokenwright.checkpoints.families.mixtures import EXPERT_NAMES, LARA, QWEN3_5, QWEN3_NEXT, QWEN_NAMES
from tokenwright.checkpoints.families.positions import read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

_OLMO_EPS = 1e-5  # the epsilon of the norm after a delta rule, which no config has
_LARA_TYPES = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Value heads share `key_heads` queries and keys."""

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

    @property
    def parts(self) -> Mapping[str, int]:
        return {"qkv": 2 * self.keys + self.values, "z": self.values, "b": self.heads, "a": self.heads}


def _gated(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    keys.only("attn_output_gate", True, why="attention without its gate in this architecture")
    return {"out_gate": True}


def _graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    family.only_silu(keys)
    sizes = _delta_heads(keys, DeltaHeads(16, 32, 128, 128, 4))
    in_turn = keys.flag("linear_heads_in_turn", False) and sizes.heads > sizes.key_heads  # only in GGUF files
    full = enumerate(_full(keys, config.layers))
    mixers = {i: _delta(config, i, sizes, sizes.parts, in_turn) for i, attends in full if not attends}
    return config, decoder(config, mixers)


def _lara_types(keys: JsonKeys, layers: int) -> list[str]:
    types: list[str] = keys.raw("layer_types") or [_LARA_TYPES[i % len(_LARA_TYPES)] for i in range(layers)]
    read_states(keys, types, layers, ("linear_attention",), ("sliding_attention", "full_attention"))
    return types


def _lara_windows(keys: JsonKeys, layers: int) -> tuple[int | None, ...]:
    window = keys.whole("sliding_window", 512, most=MAX_TOKENS)
    return tuple(window if one == "sliding_attention" else None for one in _lara_types(keys, layers))


def _lara_graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    family.only_silu(keys)
    sizes = _delta_heads(keys, DeltaHeads(8, 16, 128, 128, 4))
    states = (i for i, one in enumerate(_lara_types(keys, config.layers)) if one == "linear_attention")
    return config, decoder(config, {i: _delta(config, i, sizes, sizes.parts) for i in states})


def _olmo_rotary(keys: JsonKeys, facts: Facts) -> Facts:
    """A null base means no positions; an absent one means the default."""
    given = keys.raw("rope_parameters")
    nope = isinstance(given, dict) and given.get("rope_theta", 0) is None
    keys.only("linear_use_gate", True, why="a delta rule without its gate in this architecture")
    return {"rotary": (not nope,) * facts["layers"]}


def _olmo_graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    family.only_silu(keys)
    heads = config.heads
    key_heads = keys.whole("linear_num_key_heads", heads, most=1 << 16)
    key_size = keys.whole("linear_key_head_dim", int(0.75 * config.width / key_heads), most=1 << 16)
    sizes = _delta_heads(keys, DeltaHeads(heads, heads, key_size, 2 * key_size, 4))
    factor = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
    behind, blocks = replace(config, pre_norm=False, post_norm=True), list[Op]()
    parts = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values, "z": sizes.values, "b": sizes.heads, "a": sizes.heads}
    full = _full(keys, config.layers)
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
    config: ModelConfig, layer: int, sizes: DeltaHeads, parts: Mapping[str, int], in_turn: bool = False
) -> Recurrent:
    """Rows of the projection: q, k, v, the gate, and each head's b and a; `parts` are the file's."""
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


def delta_order(base: str, graph: Graph) -> family.Order | None:
    """Qwen3-Next's files store q, k, v and the gate, and b and a, key head by key head."""
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
    return family.Order(block * of.key_heads, tuple(rows))


_DELTA = family.in_layers(
    """
    delta.qkv=in_proj_qkv delta.z=in_proj_z delta.b=in_proj_b delta.a=in_proj_a delta.conv=conv1d delta.a_log=A_log
    delta.dt=dt_bias delta.norm=norm delta.out=out_proj
    """,
    "layers.{i}.linear_attn",
)
_GATED = {
    "layers.{i}.attention.q": family.TensorSource("layers.{i}.self_attn.q_proj", turn=(0, 2)),
    "layers.{i}.attention.out_gate": family.TensorSource("layers.{i}.self_attn.q_proj", turn=(1, 2)),
}
# Tensors that only the MTP layer has lie outside `mtp.layers.0`.
_NEXT_PARTS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_NEXT_NAMES = family.NextNames(*_NEXT_PARTS, at="mtp.layers.0", plus=1.0)
_NEXT_RENAME = re.compile(rf"mtp\.((?:{'|'.join(_NEXT_PARTS)})\.weight)"), r"mtp.layers.0.\1"
_DECAYS = family.without_ending(r"linear_attn\.(?:A_log|dt_bias)")

_DENSE = LlamaLike(
    by_config(),
    qk_norm=EACH_HEAD,
    positions=Positions(rope(partial=0.25), windows=None),
    sizes=Sizes(32, 4096, 16, 4, 256, 12288, 248320, 32768),
    more=(_gated,),
    unused=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    graph=_graph,
)
_MIXED = replace(_DENSE, sizes=Sizes(40, 2048, 16, 2, 256, 5632, 248320, 32768), mixture=QWEN3_5)
_NEXT = replace(_DENSE, sizes=Sizes(48, 2048, 16, 2, 256, 5632, 151936, 32768), mixture=QWEN3_NEXT)
_LARA = LlamaLike(
    by_config(),
    qk_norm=EACH_HEAD,
    positions=Positions(windows=_lara_windows, without="full"),
    sizes=Sizes(34, 1024, 16, 4, 128, 5632, 151936, 131072),  # only experts
    mixture=LARA,
    tied=True,
    graph=_lara_graph,
)
_OLMO = LlamaLike(
    by_config(),
    qk_norm=ALL_HEADS,
    positions=FULL,
    sizes=Sizes(32, 3840, 30, mlp_width=11008, vocab_size=100352, context=65536),
    more=(_olmo_rotary,),
    unused=(
        *("fla_hybrid_attention_indices", "linear_a_log_min", "linear_a_log_max"),
        *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
    graph=_olmo_graph,
)
QWEN_DENSE = replace(
    LLAMA,
    architectures={"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5ForConditionalGeneration": "qwen3_5"},
    parse=_DENSE.parse,
    names=family.one_more(LLAMA.names) | _GATED | QWEN_NAMES | _DELTA,  # the norm after a delta rule includes the 1
    renames=(_DECAYS, _NEXT_RENAME),
    stacks=re.compile(r"layers\.\d+\.linear_attn\.conv1d\.weight"),  # [channels, 1, taps]
    following=_NEXT_NAMES,
)
QWEN_NEXT = replace(
    QWEN_DENSE,
    architectures={"Qwen3NextForCausalLM": "qwen3_next"},
    parse=_NEXT.parse,
    names=QWEN_DENSE.names
    | family.in_layers(
        "delta.qkv=in_proj_qkvz delta.z=in_proj_qkvz delta.b=in_proj_ba delta.a=in_proj_ba", "layers.{i}.linear_attn"
    ),
    own_orders=delta_order,
)
_STACKED = family.stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
QWEN_MIXED = replace(
    QWEN_DENSE,
    architectures={"Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"},
    parse=_MIXED.parse,
    names=QWEN_DENSE.names | _STACKED,
    renames=(*QWEN_DENSE.renames, family.without_ending(r"mlp\.experts\.(?:gate_up|down)_proj")),
    stacks=re.compile(r"(?:mtp\.)?layers\.\d+\.(?:linear_attn\.conv1d|mlp\.experts\.(?:gate_up|down)_proj)\.weight"),
    following=replace(_NEXT_NAMES, apart=EXPERT_NAMES),
)
LARA_MINI = replace(  # its files fuse q, k, v, the gate, b and a of a layer
    QWEN_MIXED,
    architectures={"LaraMiniForCausalLM": "lara_mini"},
    parse=_LARA.parse,
    names=LLAMA.names
    | QWEN_NAMES
    | _DELTA
    | _STACKED
    | {
        f"layers.{{i}}.delta.{one}": family.TensorSource("layers.{i}.linear_attn.in_proj", fused=True)
        for one in ("qkv", "z", "b", "a")
    }
    | family.in_layers("delta.norm=linear_attn.out_norm"),
    following=None,
)
OLMO_HYBRID = replace(
    LLAMA,
    architectures={"OlmoHybridForCausalLM": "olmo_hybrid"},
    parse=_OLMO.parse,
    names=LLAMA.names
    | _DELTA
    | family.in_layers(
        """
        delta.q=q_proj delta.k=k_proj delta.v=v_proj delta.b=b_proj delta.a=a_proj delta.z=g_proj delta.out=o_proj
        delta.conv_q=q_conv1d delta.conv_k=k_conv1d delta.conv_v=v_conv1d delta.norm=o_norm
        """,
        "layers.{i}.linear_attn",
    )
    | POST_NORMS,
    renames=(
        _DECAYS,
        (re.compile(r"(layers\.\d+)\.attention_layer_norm\.weight"), r"\1.input_layernorm.weight"),
        (re.compile(r"(layers\.\d+)\.feedforward_layer_norm\.weight"), r"\1.post_attention_layernorm.weight"),
    ),
    stacks=re.compile(r"layers\.\d+\.linear_attn\.(?:[qkv]_)?conv1d\.weight"),
)
