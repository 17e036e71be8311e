"""Nemotron-H: each layer is one op. time_step_limit limits steps, as in the authors' code, not as in transformers."""

import re
from collections.abc import Mapping
from dataclasses import replace

from tokenwright.checkpoints.families.family import MOST_LAYERS, MOST_MLP, TensorSource, in_layers, named
from tokenwright.checkpoints.families.graph_builder import block, graph_of, numbered
from tokenwright.checkpoints.families.hybrids.mamba import CONV, Ssd, names_of, sized, ssd
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.llama_like import Biases, LlamaLike, MLPs, NoPositions, Norms, Sizes
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Op

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]
_EXPERTS = Routed("sigmoid", ("noaux_tc",), 0, 1.0, renormalise=True, shared_count=1, gated=False)


def _biases(keys: JsonKeys) -> Biases:
    keys.only("attention_bias", False, why="biases of attention in this architecture")
    return Biases(False, False, keys.flag("mlp_bias", False))


def _layers(keys: JsonKeys) -> int:
    layers = len(_kinds(keys))
    if keys.whole("num_hidden_layers", layers) != layers:
        raise keys.error(f"num_hidden_layers is not the {layers} of the layers' kinds; correct config.json")
    return layers


def _head_size(keys: JsonKeys) -> int:
    return keys.whole("head_dim", keys.whole("attention_head_dim", 128, most=1 << 16), most=1 << 16)


def _graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    keys.only("sliding_window", why="a sliding window in this architecture")
    keys.only("mamba_hidden_act", "silu", "swish", why="another activation behind a convolution")
    keys.only("moe_latent_size", why="experts of a projection of the row")
    blocks, mamba = list[Op](), _mamba(keys)
    for i, kind in enumerate(_kinds(keys)):
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


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    shared = keys.whole("moe_shared_expert_intermediate_size", 7688, most=MOST_MLP)
    mixed = tuple(kind == "moe" for kind in _kinds(keys))
    if not any(mixed):
        keys.skip("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "n_group")
        keys.skip("topk_group", "num_experts_per_tok", "routed_scaling_factor", "num_local_experts")
        return None
    found = read_routed(keys, _EXPERTS, layers)
    if found is None:
        raise keys.error("layers have experts, but n_routed_experts gives none; correct config.json")
    return replace(found, layers=mixed, shared_width=shared if found.shared_width else 0)


def _mamba(keys: JsonKeys) -> Ssd:
    heads, size = keys.whole("mamba_num_heads", 128, most=1 << 16), keys.whole("mamba_head_dim", 64, most=1 << 16)
    return sized(keys, heads, size, "n_groups ssm_state_size conv_kernel use_conv_bias use_bias")


def _at_mixer(names: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    place = re.compile(r"layers\.\{i\}\.(?:self_attn|mlp|mixer)\.")
    return {ours: replace(one, name=place.sub("layers.{i}.mixer.", one.name)) for ours, one in names.items()}


_LIKE = LlamaLike(
    _biases,
    Norms(1e-5, key="layer_norm_epsilon"),
    positions=NoPositions(),
    sizes=Sizes(_layers, 4096, 32, 8, _head_size, 21504, 131072, 4096),
    mlps=MLPs("relu2", gated=False, key="mlp_hidden_act"),
    mixture=_mixture,
    unused=(  # of training or of further tokens, or repeated by other sizes
        *("chunk_size", "expand", "mamba_ssm_cache_dtype", "mamba_proj_bias", "moe_shared_expert_overlap"),
        *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers"),
        *("rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "time_step_floor", "time_step_max"),
        *("time_step_min", "time_step_rank", "use_mamba_kernels", "rope_theta", "partial_rotary_factor"),
    ),
    graph=_graph,
)
NEMOTRON = replace(
    LLAMA,
    architectures={"NemotronHForCausalLM": "nemotron_h"},
    parse=_LIKE.parse,
    prefix="backbone.",
    names=_at_mixer(LLAMA.names | ROUTED_NAMES | names_of("mixer"))
    | named("embed=embeddings norm=norm_f head=lm_head")
    | in_layers("attention_norm=norm mlp_norm=norm"),
    renames=(
        (
            re.compile(r"(?:model\.)?(layers\.\d+\.mixer\.(?:A_log|dt_bias|D|gate\.e_score_correction_bias))"),
            r"\1.weight",
        ),
        (re.compile(r"(?:model\.)?embedding\.weight"), "embeddings.weight"),
        (re.compile(r"model\.(.+)"), r"\1"),
    ),
    stacks=re.compile(CONV),
)
