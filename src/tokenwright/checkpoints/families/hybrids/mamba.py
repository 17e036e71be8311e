"""Models of Mamba-2 layers; Granite 4 and Bamba have attention in some layers."""

import re
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.llama import LLAMA, SINK_RENAME, SINKS
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, expert_width, granite, listed_layers
from tokenwright.checkpoints.families.positions import read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig, Rope
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

_CONTEXT = 1 << 20  # tokens: the context of files that give none
_STATES, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Ssd:
    """The sizes of a Mamba-2 layer: its heads share the B and C of `groups`, of `state` numbers each."""

    heads: int
    groups: int
    state: int
    head_size: int
    taps: int
    conv_bias: bool
    bias: bool
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        return self.heads * self.head_size


def _shared_width(keys: JsonKeys) -> int:
    return keys.whole("shared_intermediate_size", 1024, most=family.MOST_MLP)


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    experts = keys.whole("num_local_experts", 8, least=0, most=MOST_EXPERTS)
    chosen = keys.whole("num_experts_per_tok", 2, least=0, most=experts or MOST_EXPERTS)
    if not experts:
        keys.raw("intermediate_size")
        return None
    width = expert_width(keys, "intermediate_size", 11008)
    return Mixture(experts, chosen, width, (True,) * layers, shared_width=_shared_width(keys))


def _granite_positions(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    keys.only("normalization_function", "rmsnorm", why="another norm in this architecture")
    keys.only("position_embedding_type", "rope", "nope", why="other positions in this architecture")
    return {"rotary": (keys.raw("position_embedding_type") == "rope",) * facts["layers"]}


def _bamba_graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    assert isinstance(config.positions, Rope), "its attention turns"
    keys.only("attn_rotary_emb", config.positions.rotated, why="another part of heads that turns in this architecture")
    attends, types = listed_layers(keys, "attn_layer_indices", config.layers), keys.raw("layer_types")
    if types is None:
        types = [_ATTENTION[0] if i in attends else _STATES[0] for i in range(config.layers)]
    return _hybrid(keys, config, types)


def _hybrid(keys: JsonKeys, config: ModelConfig, types: object) -> tuple[ModelConfig, Graph]:
    family.only_silu(keys)
    layers, sizes = config.layers, read_ssd(keys, keys.whole("mamba_expand", 2) * config.width)
    states = [True] * layers if types is None else read_states(keys, types, layers, _STATES, _ATTENTION)
    return config, decoder(config, {i: ssd(config, i, sizes) for i, state in enumerate(states) if state})


def read_ssd(keys: JsonKeys, inner: int) -> Ssd:
    keys.raw("mamba_chunk_size")  # of an implementation; the recurrence has none
    heads = keys.whole("mamba_n_heads", 128, most=1 << 16)
    if inner % heads:
        raise keys.error(f"{inner} numbers cannot be divided into {heads} heads of Mamba; correct config.json")
    keys.only("mamba_d_head", "auto", inner // heads, why="heads that are not the layer's width together")
    return sized(keys, heads, inner // heads, "n_groups d_state d_conv conv_bias proj_bias", "mamba_", (1, 256))


def sized(
    keys: JsonKeys, heads: int, size: int, names: str, prefix: str = "", defaults: tuple[int, int] = (8, 128)
) -> Ssd:
    """The sizes by the keys `names`: groups, states, taps, and biases of the convolution and the projections."""
    groups, states, taps, biased, bias = (prefix + one for one in names.split())
    return Ssd(
        heads,
        groups_of(keys, groups, defaults[0], heads),
        keys.whole(states, defaults[1], most=1 << 16),
        size,
        keys.whole(taps, 4, least=2, most=MOST_TAPS),
        keys.flag(biased, True),
        keys.flag(bias, False),
        step_limits(keys),
    )


def alone(keys: JsonKeys, architecture: str, layers: int, **more: Any) -> ModelConfig:
    """The config of a model without attention and MLPs. more: heads, kv_heads and head_size."""
    family.only_silu(keys)
    layers = keys.whole("num_hidden_layers", layers, most=family.MOST_LAYERS)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        width=keys.whole("hidden_size", most=family.MOST_WIDTH),
        mlp_width=0,
        vocab_size=keys.whole("vocab_size", most=family.MOST_VOCAB),
        context=_CONTEXT,
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        dtype=family.dtype(keys),
        **more,
    )


def _parse_alone(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    heads, size = keys.whole("num_heads", 128, most=1 << 16), keys.whole("head_dim", 64, most=1 << 16)
    tied = keys.flag("tie_word_embeddings", False)
    config = alone(keys, architecture, 64, heads=heads, kv_heads=heads, head_size=size, tied_head=tied)
    if heads * size != keys.whole("expand", 2) * config.width:
        raise keys.error("num_heads times head_dim must be expand times hidden_size; correct config.json")
    keys.skip("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "rms_norm", "norm_before_gate")
    keys.skip("time_step_rank", "time_step_min", "time_step_max", "time_step_floor")
    sizes = sized(keys, heads, size, "n_groups state_size conv_kernel use_conv_bias use_bias")
    return config, decoder(config, {i: ssd(config, i, sizes) for i in range(config.layers)})


def groups_of(keys: JsonKeys, key: str, default: int, heads: int) -> int:
    groups = keys.whole(key, default, most=1 << 16)
    if heads % groups:
        raise keys.error(f"{heads} heads of Mamba cannot share {groups} groups evenly; correct config.json")
    return groups


def step_limits(keys: JsonKeys) -> tuple[float, float]:
    given = keys.raw("time_step_limit")
    if given is None:
        return 0.0, inf
    both = [inf if one == {"__float__": "Infinity"} else one for one in given] if isinstance(given, list) else []
    if len(both) != 2 or not all(type(one) in (int, float) for one in both):
        raise keys.error("time_step_limit must be a list of two numbers")
    return float(both[0]), float(both[1])


def ssd(config: ModelConfig, layer: int, sizes: Ssd) -> Recurrent:
    """The projection has rows for the gate; the channels x, B and C; each head's step."""
    at, width, inner, shared = f"layers.{layer}.mamba", config.width, sizes.inner, sizes.groups * sizes.state
    channels = inner + 2 * shared
    step = inner + channels
    places = Places(conv=inner, value=inner, key=2 * inner, query=2 * inner + shared, gate=0, decay=step)
    before, after = mixer_norms(config, layer)
    recurrence = Recurrence(
        at,
        "ssd",
        channels,
        sizes.taps,
        places,
        sizes.conv_bias,
        heads=sizes.heads,
        key_heads=sizes.groups,
        key_size=sizes.state,
        value_size=sizes.head_size,
        norm=Norm(f"{at}.norm", "rms", inner, config.norm_eps, parts=sizes.groups),
        gate_first=True,
        least_step=sizes.limits[0],
        most_step=sizes.limits[1],
    )
    project = Matrix.single(f"{at}.in", step + sizes.heads, width, sizes.bias)
    out = Matrix.single(f"{at}.out", width, inner, sizes.bias)
    return Recurrent(layer, before, project, recurrence, out, after, config.scales.residual)


def names_of(at: str) -> dict[str, family.TensorSource]:
    return family.in_layers(
        """
        mamba.in=in_proj mamba.conv=conv1d mamba.a_log=A_log mamba.dt=dt_bias mamba.skip=D mamba.norm=norm
        mamba.out=out_proj
        """,
        f"layers.{{i}}.{at}",
    )


RENAMES = (
    family.without_ending(r"(?:mamba|mixer)\.(?:A_log|dt_bias|D)"),
    (re.compile(r"embedding\.weight"), "embeddings.weight"),
    (re.compile(r"(layers\.\d+\.block_sparse_moe\.router)\.weight"), r"\1.layer.weight"),  # transformers' name
)
CONV = r"layers\.\d+\.(?:mamba|mixer)\.conv1d\.weight"  # [channels, 1, taps]

_GRANITE_HYBRID = parts.LlamaLike(
    parts.by_config(),
    positions=parts.FULL,
    sizes=parts.Sizes(32, None, 32, mlp_width=_shared_width, context=2048),
    mixture=_mixture,
    scales=parts.granite_scales,
    more=(_granite_positions,),
    unused=("init_method", "logits_to_keep"),
    graph=lambda keys, config: _hybrid(keys, config, keys.raw("layer_types") or keys.raw("layers_block_type")),
)
GRANITE_HYBRID = replace(
    LLAMA,
    architectures={"GraniteMoeHybridForCausalLM": "granitemoehybrid"},
    parse=_GRANITE_HYBRID.parse,
    names=LLAMA.names
    | names_of("mamba")
    | family.in_layers("""
        mlp.down=shared_mlp.output_linear mlp.shared.down=shared_mlp.output_linear
        mlp.router=block_sparse_moe.router.layer
    """)
    | {
        f"layers.{{i}}.mlp.{one}": family.TensorSource("layers.{i}.shared_mlp.input_linear", fused=True)
        for one in ("gate", "up", "shared.gate", "shared.up")
    }
    | family.stacked_experts("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    renames=RENAMES,
    stacks=re.compile(rf"{CONV}|layers\.\d+\.block_sparse_moe\.(?:input|output)_linear\.weight"),
)
_GRANITE_MOE = parts.LlamaLike(parts.by_config(), mixture=granite, scales=parts.granite_scales)
GRANITE_MOE = replace(
    GRANITE_HYBRID,
    architectures={"GraniteMoeForCausalLM": "granitemoe", "GraniteMoeSharedForCausalLM": "granitemoeshared"},
    parse=_GRANITE_MOE.parse,
)
_GRANITE_SWA = replace(
    _GRANITE_MOE, positions=parts.Positions(windows="fourth", without="based"), facts={"sink_logits": True}
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    architectures={"GraniteMoeSWAForCausalLM": "granitemoe_swa"},
    parse=_GRANITE_SWA.parse,
    names=GRANITE_MOE.names | SINKS,
    renames=(
        *RENAMES,
        SINK_RENAME,
        (re.compile(r"(layers\.\d+\.block_sparse_moe)\.experts\.gate_up_proj"), r"\1.input_linear.weight"),
        (re.compile(r"(layers\.\d+\.block_sparse_moe)\.experts\.down_proj"), r"\1.output_linear.weight"),
    ),
)
_BAMBA = parts.LlamaLike(
    parts.by_config(),
    parts.Norms(1e-5),
    positions=parts.Positions(parts.rope(partial=0.5), windows=None),
    sizes=parts.Sizes(32, None, 32, context=262144),
    unused=("num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"),
    graph=_bamba_graph,
)
BAMBA = replace(
    LLAMA,
    architectures={"BambaForCausalLM": "bamba"},
    parse=_BAMBA.parse,
    names=LLAMA.names
    | names_of("mamba")
    | family.named("norm=final_layernorm")
    | family.in_layers("mlp_norm=pre_ff_layernorm")
    | family.mlp_names("mlp", "feed_forward"),
    renames=RENAMES,
    stacks=re.compile(CONV),
)
MAMBA2 = replace(
    LLAMA,
    architectures={"Mamba2ForCausalLM": "mamba2"},
    parse=_parse_alone,
    prefix="backbone.",
    names=names_of("mixer")
    | family.named("embed=embeddings norm=norm_f head=lm_head")
    | family.in_layers("attention_norm=norm"),
    renames=RENAMES,
    stacks=re.compile(CONV),
)
