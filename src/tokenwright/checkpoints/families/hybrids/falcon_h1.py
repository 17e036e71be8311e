"""Falcon-H1: attention beside Mamba-2, then an MLP. A factor of attention's input moves to its scores and result."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families.family import only_silu
from tokenwright.checkpoints.families.graph_builder import graph_of, numbered, side_by_side
from tokenwright.checkpoints.families.hybrids.mamba import BAMBA, read_ssd, ssd
from tokenwright.checkpoints.families.llama_like import FULL, Facts, LlamaLike, Norms, Sizes, by_config
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.config import ModelConfig, Scales
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Graph
from tokenwright.models.op import Op
from tokenwright.models.recurrent import Recurrent


def _scales(keys: JsonKeys, facts: Facts) -> Scales:
    inside, key = keys.number("attention_in_multiplier", 1.0), keys.number("key_multiplier", 1.0)
    return Scales(
        embedding=keys.number("embedding_multiplier", 1.0),
        attention=facts["head_size"] ** -0.5 * inside**2 * key,
        logits=keys.number("lm_head_multiplier", 1.0),
        gates=_numbers(keys, "mlp_multipliers", 2)[0],
    )


def _graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    keys.only("mamba_use_mlp", True, why="layers without an MLP in this architecture")
    only_silu(keys)
    if config.qkv_bias:
        keys.only("attention_in_multiplier", 1.0, why="a factor of attention's input beside its biases")
    added = keys.number("attention_in_multiplier", 1.0) * keys.number("attention_out_multiplier", 1.0)
    blocks, last = list[Op](), _numbers(keys, "mlp_multipliers", 2)[1]
    for i in range(config.layers):
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


def _unmultiplied(graph: Graph, stored: dict[str, Stored]) -> Graph:
    if any(name.endswith("mamba.conv1d.weight") and one.shape[-1] == 1 for name, one in stored.items()):
        what = "mlx-lm's copy of this model has the factors of config.json in its weights"
        raise CheckpointError(f"{what}, and would be multiplied twice; give the published files")
    return graph


_LIKE = LlamaLike(
    by_config(mlp=True),
    Norms(1e-5),
    positions=FULL,
    sizes=Sizes(32, None, 32, 8, mlp_width=14336, vocab_size=128000, context=8192),
    scales=_scales,
    unused=(  # of implementations or the initialisation, or repeated by others
        *("num_logits_to_keep", "time_step_rank", "attn_layer_indices", "time_step_min", "time_step_max"),
        "time_step_floor",
    ),
    graph=_graph,
)
FALCON_H1 = replace(
    BAMBA,
    architectures={"FalconH1ForCausalLM": "falcon_h1"},
    parse=_LIKE.parse,
    inert=re.compile(r"layers\.\d+\.mamba\.mup_vector"),
    fitted=_unmultiplied,
)
