"""Falcon-H1: attention and Mamba-2 side by side over one norm, then an MLP; constant factors everywhere.

A factor of attention's input is one of its scores and its result, as its q, k and v are linear in it.
"""

import re
from dataclasses import replace

from tokenwright.checkpoints.families.family import MOST_MLP, MOST_VOCAB, activation, dtype
from tokenwright.checkpoints.families.graph_builder import graph_of, numbered, side_by_side
from tokenwright.checkpoints.families.hybrids.mamba import BAMBA, read_ssd, ssd
from tokenwright.checkpoints.families.positions import read_attended
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.graph import Graph
from tokenwright.models.op import Op
from tokenwright.models.recurrent import Recurrent

# Of implementations, or repeated by others.
_UNUSED = ("num_logits_to_keep", "time_step_rank", "attn_layer_indices")
_UNUSED_FACTORS = ("time_step_min", "time_step_max", "time_step_floor")  # of the initialisation


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    attended = read_attended(keys, context=8192, kv_heads=8)
    layers, biases = attended["layers"], keys.flag("attention_bias", False)
    for key in (*_UNUSED, *_UNUSED_FACTORS):
        keys.raw(key)
    keys.only("mamba_use_mlp", True, why="layers without an MLP in this architecture")
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    gates, last = _numbers(keys, "mlp_multipliers", 2)
    config = ModelConfig(
        architecture=architecture,
        **attended,
        mlp_width=keys.whole("intermediate_size", 14336, most=MOST_MLP),
        vocab_size=keys.whole("vocab_size", 128000, most=MOST_VOCAB),
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        activation=activation(keys, "hidden_act", "silu"),
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=keys.flag("mlp_bias", False),
        scales=Scales(
            embedding=keys.number("embedding_multiplier", 1.0),
            attention=attended["head_size"] ** -0.5
            * keys.number("attention_in_multiplier", 1.0) ** 2
            * keys.number("key_multiplier", 1.0),
            logits=keys.number("lm_head_multiplier", 1.0),
            gates=gates,
        ),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    if biases:
        keys.only("attention_in_multiplier", 1.0, why="a factor of attention's input beside its biases")
    added = keys.number("attention_in_multiplier", 1.0) * keys.number("attention_out_multiplier", 1.0)
    blocks = list[Op]()
    for i in range(layers):
        blocks += side_by_side(config, i, _mamba(keys, config, i), (added, last))
    graph = graph_of(config, numbered(blocks))
    count = graph.layers
    return replace(config, layers=count, windows=(None,) * count, rotary=(True,) * count), graph


def _mamba(keys: JsonKeys, config: ModelConfig, layer: int) -> Recurrent:
    width = int(keys.number("mamba_expand", 2) * config.width)
    sizes = read_ssd(keys, width if keys.is_null("mamba_d_ssm") else keys.whole("mamba_d_ssm", 1024, most=1 << 24))
    if sizes.bias:
        keys.only("ssm_in_multiplier", 1.0, why="a factor of Mamba's input beside its biases")
    op, shared = ssd(config, layer, sizes), sizes.groups * sizes.state
    normed, first = keys.flag("mamba_rms_norm", False), not keys.flag("mamba_norm_before_gate", True)
    rule = replace(op.recurrence, norm=op.recurrence.norm if normed else None, gate_first=first)
    rows, whole = (sizes.inner, sizes.inner, shared, shared, sizes.heads), keys.number("ssm_in_multiplier", 1.0)
    each = [whole * one for one in _numbers(keys, "ssm_multipliers", 5)]
    return replace(
        op,
        recurrence=rule,
        out=replace(op.out, bias=keys.flag("projectors_bias", False)),
        residual_scale=keys.number("ssm_out_multiplier", 1.0),
        factors=tuple(zip(rows, each, strict=True)) if set(each) != {1.0} else (),
    )


def _numbers(keys: JsonKeys, key: str, count: int) -> list[float]:
    given = keys.raw(key)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list) or len(given) != count or not all(type(one) in (int, float) for one in given):
        raise keys.error(f"{key} must be a list of {count} numbers")
    return [float(one) for one in given]


FALCON_H1 = replace(
    BAMBA,
    architectures={"FalconH1ForCausalLM": "falcon_h1"},
    parse=_parse,
    inert=re.compile(rf"{BAMBA.inert.pattern}|layers\.\d+\.mamba\.mup_vector"),
)
