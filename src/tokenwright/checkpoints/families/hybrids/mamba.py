"""Models of Mamba-2 layers, which stand beside attention in Granite 4 and Bamba."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    TensorSource,
    activation,
    dtype,
    named,
)
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.llama import LLAMA, SINK_RENAME, SINKS
from tokenwright.checkpoints.families.llama_like import LlamaLike, Positions, by_config, granite_scales, sink_logits
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, TRAINING, expert_width, granite, listed_layers
from tokenwright.checkpoints.families.positions import read_attended, read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig, Rope
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent

_ALONE = 1 << 20  # tokens: the context of a model whose files name none
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


def _parse_granite(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    config = _attention_config(keys, architecture, context=2048, partial=None)
    keys.only("normalization_function", "rmsnorm", why="another norm in this architecture")
    for key in ("init_method", "logits_to_keep", *TRAINING):
        keys.raw(key)
    turned = keys.raw("position_embedding_type") == "rope"
    keys.only("position_embedding_type", "rope", "nope", why="other positions in this architecture")
    shared = keys.whole("shared_intermediate_size", 1024, most=MOST_MLP)
    experts = keys.whole("num_local_experts", 8, least=0, most=MOST_EXPERTS)
    chosen = keys.whole("num_experts_per_tok", 2, least=0, most=experts or MOST_EXPERTS)
    mixed = (True,) * config.layers
    width = expert_width(keys, "intermediate_size", 11008) if experts else 0
    config = replace(
        config,
        mlp_width=shared,
        rotary=(turned,) * config.layers,
        mixture=Mixture(experts, chosen, width, mixed, shared_width=shared) if experts else None,
        scales=granite_scales(keys),
    )
    types = keys.raw("layer_types") or keys.raw("layers_block_type")
    return _hybrid(keys, config, types)


def _parse_bamba(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    config = _attention_config(keys, architecture, context=262144, partial=0.5)
    assert isinstance(config.positions, Rope), "its attention turns"
    keys.only("attn_rotary_emb", config.positions.rotated, why="another part of heads that turns in this architecture")
    keys.only("mlp_bias", False, why="biases in the MLP")
    for key in ("num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"):
        keys.raw(key)
    attends, types = listed_layers(keys, "attn_layer_indices", config.layers), keys.raw("layer_types")
    if types is None:
        types = [_ATTENTION[0] if i in attends else _STATES[0] for i in range(config.layers)]
    return _hybrid(keys, config, types)


def _attention_config(keys: JsonKeys, architecture: str, context: int, partial: float | None) -> ModelConfig:
    biases = keys.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        **read_attended(keys, context=context, partial=partial),
        mlp_width=keys.whole("intermediate_size", most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", most=MOST_VOCAB),
        norm_eps=keys.number("rms_norm_eps", 1e-6 if partial is None else 1e-5),
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )


def _hybrid(keys: JsonKeys, config: ModelConfig, types: object) -> tuple[ModelConfig, Graph]:
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    layers, sizes = config.layers, read_ssd(keys, keys.whole("mamba_expand", 2) * config.width)
    states = [True] * layers if types is None else read_states(keys, types, layers, _STATES, _ATTENTION)
    return config, decoder(config, {i: ssd(config, i, sizes) for i, state in enumerate(states) if state})


def read_ssd(keys: JsonKeys, inner: int) -> Ssd:
    keys.raw("mamba_chunk_size")  # of an implementation; the recurrence has none
    heads = keys.whole("mamba_n_heads", 128, most=1 << 16)
    if inner % heads:
        raise keys.error(f"{inner} numbers cannot be divided into {heads} heads of Mamba; correct config.json")
    keys.only("mamba_d_head", "auto", inner // heads, why="heads that are not the layer's width together")
    return Ssd(
        heads,
        groups_of(keys, "mamba_n_groups", 1, heads),
        keys.whole("mamba_d_state", 256, most=1 << 16),
        inner // heads,
        keys.whole("mamba_d_conv", 4, least=2, most=MOST_TAPS),
        keys.flag("mamba_conv_bias", True),
        keys.flag("mamba_proj_bias", False),
        step_limits(keys),
    )


def _parse_alone(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers, width = keys.whole("num_hidden_layers", 64, most=MOST_LAYERS), keys.whole("hidden_size", most=MOST_WIDTH)
    heads, size = keys.whole("num_heads", 128, most=1 << 16), keys.whole("head_dim", 64, most=1 << 16)
    if heads * size != keys.whole("expand", 2) * width:
        raise keys.error("num_heads times head_dim must be expand times hidden_size; correct config.json")
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    for key in ("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "rms_norm", "norm_before_gate"):
        keys.raw(key)
    for key in ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"):  # of the initialisation
        keys.raw(key)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=size,
        mlp_width=0,
        vocab_size=keys.whole("vocab_size", most=MOST_VOCAB),
        context=_ALONE,
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    sizes = Ssd(
        heads,
        groups_of(keys, "n_groups", 8, heads),
        keys.whole("state_size", 128, most=1 << 16),
        size,
        keys.whole("conv_kernel", 4, least=2, most=MOST_TAPS),
        keys.flag("use_conv_bias", True),
        keys.flag("use_bias", False),
        step_limits(keys),
    )
    return config, decoder(config, {i: ssd(config, i, sizes) for i in range(layers)})


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
    """The rows of the projection: a gate; the channels, which are x, B and C; and of each head its step."""
    at, width, inner, shared = f"layers.{layer}.mamba", config.width, sizes.inner, sizes.groups * sizes.state
    channels = inner + 2 * shared
    step = inner + channels
    places = Places(
        conv=inner,
        value=inner,
        key=2 * inner,
        query=2 * inner + shared,
        gate=0,
        decay=step,
    )
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


def names_of(at: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv": "conv1d", "a_log": "A_log", "dt": "dt_bias", "skip": "D", "norm": "norm"}
    return {f"layers.{{i}}.mamba.{ours}": f"{at}.{theirs}" for ours, theirs in (parts | {"out": "out_proj"}).items()}


RENAMES = (
    (re.compile(r"(layers\.\d+\.(?:mamba|mixer)\.(?:A_log|dt_bias|D))"), r"\1.weight"),
    (re.compile(r"embedding\.weight"), "embeddings.weight"),
    (re.compile(r"(layers\.\d+\.block_sparse_moe\.router)\.weight"), r"\1.layer.weight"),  # as transformers has it
)
CONV = r"layers\.\d+\.(?:mamba|mixer)\.conv1d\.weight"  # [channels, 1, taps]
_UP = "layers.{i}.block_sparse_moe.input_linear"
_GRANITE: Mapping[str, TensorSource] = {
    f"layers.{{i}}.mlp.{part}{one}": TensorSource("layers.{i}.shared_mlp.input_linear", fused=True)
    for part in ("", "shared.")
    for one in ("gate", "up")
} | {
    "layers.{i}.mlp.experts.{e}.gate": TensorSource(_UP, stacked=True, turn=(0, 2), halves=True),
    "layers.{i}.mlp.experts.{e}.up": TensorSource(_UP, stacked=True, turn=(1, 2), halves=True),
    "layers.{i}.mlp.experts.{e}.down": TensorSource("layers.{i}.block_sparse_moe.output_linear", stacked=True),
}

GRANITE_HYBRID = replace(
    LLAMA,
    architectures={"GraniteMoeHybridForCausalLM": "granitemoehybrid"},
    parse=_parse_granite,
    names={
        **LLAMA.names,
        **named(
            names_of("layers.{i}.mamba")
            | {
                "layers.{i}.mlp.down": "layers.{i}.shared_mlp.output_linear",
                "layers.{i}.mlp.shared.down": "layers.{i}.shared_mlp.output_linear",
                "layers.{i}.mlp.router": "layers.{i}.block_sparse_moe.router.layer",
            }
        ),
        **_GRANITE,
    },
    renames=RENAMES,
    stacks=re.compile(rf"{CONV}|layers\.\d+\.block_sparse_moe\.(?:input|output)_linear\.weight"),
)
_GRANITE_MOE = LlamaLike(by_config(), mixture=granite, scales=granite_scales)
GRANITE_MOE = replace(
    GRANITE_HYBRID,
    architectures={"GraniteMoeForCausalLM": "granitemoe", "GraniteMoeSharedForCausalLM": "granitemoeshared"},
    parse=_GRANITE_MOE.parse,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    architectures={"GraniteMoeSWAForCausalLM": "granitemoe_swa"},
    parse=replace(_GRANITE_MOE, positions=Positions(windows="fourth", without="based"), more=(sink_logits,)).parse,
    names=GRANITE_MOE.names | SINKS,
    renames=(
        *RENAMES,
        SINK_RENAME,
        (re.compile(r"(layers\.\d+\.block_sparse_moe)\.experts\.gate_up_proj"), r"\1.input_linear.weight"),
        (re.compile(r"(layers\.\d+\.block_sparse_moe)\.experts\.down_proj"), r"\1.output_linear.weight"),
    ),
)
BAMBA = replace(
    LLAMA,
    architectures={"BambaForCausalLM": "bamba"},
    parse=_parse_bamba,
    names={
        **LLAMA.names,
        **named(
            names_of("layers.{i}.mamba")
            | {"norm": "final_layernorm", "layers.{i}.mlp_norm": "layers.{i}.pre_ff_layernorm"}
            | {f"layers.{{i}}.mlp.{one}": f"layers.{{i}}.feed_forward.{one}_proj" for one in ("gate", "up", "down")}
        ),
    },
    renames=RENAMES,
    stacks=re.compile(CONV),
)
MAMBA2 = replace(
    LLAMA,
    architectures={"Mamba2ForCausalLM": "mamba2"},
    parse=_parse_alone,
    prefix="backbone.",
    names=named(
        names_of("layers.{i}.mixer")
        | {"embed": "embeddings", "norm": "norm_f", "head": "lm_head", "layers.{i}.attention_norm": "layers.{i}.norm"}
    ),
    renames=RENAMES,
    stacks=re.compile(CONV),
)
