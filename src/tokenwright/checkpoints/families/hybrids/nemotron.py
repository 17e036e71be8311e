"""Nemotron-H: each layer is one op by itself, Mamba-2, attention without positions, an MLP or experts.

Steps are limited by time_step_limit, as in the authors' own code, and not as in transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_MLP,
    MOST_VOCAB,
    MOST_WIDTH,
    TensorSource,
    activation,
    check_repeats,
    dtype,
    heads_of,
    named,
)
from tokenwright.checkpoints.families.graph_builder import block, graph_of, numbered
from tokenwright.checkpoints.families.hybrids.mamba import CONV, Ssd, groups_of, names_of, ssd, step_limits
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.mixtures import TRAINING
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Op
from tokenwright.models.recurrent import MOST_TAPS

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]
_EXPERTS = Routed("sigmoid", ("noaux_tc",), 0, 1.0, renormalise=True, shared_count=1, gated=False)
# Of training, of further tokens, or repeated by the other sizes.
_UNUSED = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "mamba_proj_bias", "moe_shared_expert_overlap"),
    *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers"),
    *("rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "time_step_floor", "time_step_max"),
    *("time_step_min", "time_step_rank", "use_mamba_kernels", "rope_theta", "partial_rotary_factor"),
)


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    kinds = _kinds(keys)
    layers, width = len(kinds), keys.whole("hidden_size", 4096, most=MOST_WIDTH)
    if keys.whole("num_hidden_layers", layers) != layers:
        raise keys.error(f"num_hidden_layers is not the {layers} of the layers' kinds; correct config.json")
    heads, kv_heads = heads_of(keys, 32, 8)
    context = keys.whole("max_position_embeddings", 4096, most=MAX_TOKENS)
    check_repeats(keys, context)
    for key in (*_UNUSED, *TRAINING):
        keys.raw(key)
    keys.only("attention_bias", False, why="biases of attention in this architecture")
    keys.only("sliding_window", why="a sliding window in this architecture")
    keys.only("mamba_hidden_act", "silu", "swish", why="another activation behind a convolution")
    keys.only("moe_latent_size", why="experts of a projection of the row")
    size = keys.whole("head_dim", keys.whole("attention_head_dim", 128, most=1 << 16), most=1 << 16)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        mlp_width=keys.whole("intermediate_size", 21504, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", 131072, most=MOST_VOCAB),
        context=context,
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=activation(keys, "mlp_hidden_act", "relu2"),
        gated=False,
        mlp_bias=keys.flag("mlp_bias", False),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    config = _with_experts(keys, config, tuple(kind == "moe" for kind in kinds))
    blocks, mamba = list[Op](), _mamba(keys)
    for i, kind in enumerate(kinds):
        mixer, rest = block(config, i, ssd(config, i, mamba) if kind == "linear_attention" else None)
        blocks.append(rest if kind in ("mlp", "moe") else mixer)
    graph = graph_of(config, numbered(blocks))
    count = graph.layers
    return replace(config, layers=count, windows=(None,) * count, rotary=(False,) * count), graph


def _kinds(keys: JsonKeys) -> list[str]:
    letters = keys.text("hybrid_override_pattern", "")
    listed = keys.raw("layers_block_type") or keys.raw("layer_types")
    kinds = [_LETTERS.get(letter, letter) for letter in letters] if listed is None and letters else listed or _DEFAULT
    if not isinstance(kinds, list) or len(kinds) > MOST_LAYERS:
        raise keys.error("layers_block_type must list the kind of each layer")
    kinds = [_OLDER.get(str(kind), str(kind)) for kind in kinds]
    unknown = [kind for kind in kinds if kind not in _LETTERS.values()]
    if unknown:
        raise keys.error(f"a layer is {unknown[0]!r}; Tokenwright has {', '.join(_LETTERS.values())}")
    if not {"linear_attention", "full_attention"} & set(kinds):
        raise keys.error("no layer reads earlier tokens; correct config.json")
    return kinds


def _with_experts(keys: JsonKeys, config: ModelConfig, mixed: tuple[bool, ...]) -> ModelConfig:
    shared = keys.whole("moe_shared_expert_intermediate_size", 7688, most=MOST_MLP)
    if not any(mixed):
        for key in ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "n_group"):
            keys.raw(key)
        for key in ("topk_group", "num_experts_per_tok", "routed_scaling_factor", "num_local_experts"):
            keys.raw(key)
        return config
    found = read_routed(keys, _EXPERTS, config.layers)
    assert found is not None, "some layer has experts"
    return replace(config, mixture=replace(found, layers=mixed, shared_width=shared if found.shared_width else 0))


def _mamba(keys: JsonKeys) -> Ssd:
    heads = keys.whole("mamba_num_heads", 128, most=1 << 16)
    bias = keys.flag("use_bias", False)
    return Ssd(
        heads,
        groups_of(keys, "n_groups", 8, heads),
        keys.whole("ssm_state_size", 128, most=1 << 16),
        keys.whole("mamba_head_dim", 64, most=1 << 16),
        keys.whole("conv_kernel", 4, least=2, most=MOST_TAPS),
        keys.flag("use_conv_bias", True),
        bias,
        step_limits(keys),
    )


def _at_mixer(names: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The names of parts, which all stand in one place of a layer."""
    place = re.compile(r"layers\.\{i\}\.(?:self_attn|mlp|mixer)\.")
    return {ours: replace(one, name=place.sub("layers.{i}.mixer.", one.name)) for ours, one in names.items()}


_TOP: dict[str, Any] = {"embed": "embeddings", "norm": "norm_f", "head": "lm_head"}
_NORMS = {f"layers.{{i}}.{one}_norm": "layers.{i}.norm" for one in ("attention", "mlp")}
NEMOTRON = replace(
    LLAMA,
    architectures={"NemotronHForCausalLM": "nemotron_h"},
    parse=_parse,
    prefix="backbone.",
    names=_at_mixer({**LLAMA.names, **ROUTED_NAMES, **named(names_of("layers.{i}.mixer") | _NORMS | _TOP)}),
    renames=(
        (re.compile(r"(?:model\.)?(layers\.\d+\.mixer\.(?:A_log|dt_bias|D))"), r"\1.weight"),
        (
            re.compile(r"(?:model\.)?(layers\.\d+\.mixer\.gate\.e_score_correction_bias)"),
            r"\1.weight",
        ),
        (re.compile(r"(?:model\.)?embedding\.weight"), "embeddings.weight"),
        (re.compile(r"model\.(.+)"), r"\1"),
    ),
    stacks=re.compile(CONV),
)
