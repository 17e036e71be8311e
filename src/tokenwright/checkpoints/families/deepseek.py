"""DeepSeek V2, V3, GLM-4.7-Flash: latent attention (MLA), routed and shared experts after some dense layers."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenwright.checkpoints.families.family import MOST_WIDTH, Family, Order, head_order, heads_of, in_layers
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.llama_like import Facts, LlamaLike, Norms, Positions, Sizes, next_layers
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, ROUTED_NEXT, ROUTED_RENAMES, Routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.config import LatentHeads, ModelConfig, Scales, YarnScaling
from tokenwright.models.experts import Experts
from tokenwright.models.graph import Graph
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import Norm

_GROUP, _BLOCK = 32, 16  # numbers per scale in the cache; outputs per block of packed weights


@dataclass(frozen=True, slots=True)
class LatentSizes(Sizes):
    def read_heads(self, keys: JsonKeys, width: int) -> Facts:
        heads = heads_of(keys)[0]
        latent = latent_heads(keys, width // heads)
        return {"heads": heads, "kv_heads": 1, "head_size": latent.nope + latent.rope, "latent": latent}


def latent_heads(keys: JsonKeys, value: int | None = None) -> LatentHeads:
    rank, rope = keys.whole("kv_lora_rank", most=MOST_WIDTH), keys.whole("qk_rope_head_dim", most=MOST_WIDTH)
    nope, value = keys.whole("qk_nope_head_dim", most=MOST_WIDTH), keys.whole("v_head_dim", value, most=MOST_WIDTH)
    q_rank = 0 if keys.is_null("q_lora_rank") else keys.whole("q_lora_rank", most=MOST_WIDTH)
    if rank % _GROUP:
        raise keys.error(
            f"kv_lora_rank is {rank:,}: Tokenwright needs a multiple of {_GROUP}, because so many numbers of a cache "
            "row share a scale"
        )
    if value % _BLOCK:
        raise keys.error(f"v_head_dim is {value:,}: Tokenwright packs the values of a head in multiples of {_BLOCK}")
    return LatentHeads(rank, q_rank, nope, rope, value)


def _one_row(keys: JsonKeys, facts: Facts) -> Facts:
    heads, shared = heads_of(keys)
    if shared != heads:
        raise keys.error(
            f"num_key_value_heads is {shared}, but latent attention has one cache row for all {heads} heads"
        )
    for key, size in (("head_dim", facts["latent"].rope), ("qk_head_dim", facts["head_size"])):
        if keys.whole(key, size) != size:
            raise keys.error(f"{key} is {keys.raw(key)}, but by the other sizes it is {size}; correct config.json")
    keys.only("rope_interleave", True, why="rotation of the halves of a head in this architecture")
    return {}


def _scales(keys: JsonKeys, facts: Facts) -> Scales:
    """The factor of scores: under YaRN with mscale_all_dim, m^2 times the usual one, with m = 0.1 mscale ln(s) + 1."""
    scale, scaling = facts["head_size"] ** -0.5, facts["positions"].scaling
    if isinstance(scaling, YarnScaling):
        spelled = keys.raw("rope_scaling") or keys.raw("rope_parameters")
        mscale = spelled.get("mscale_all_dim") or 0.0  # a number: `read_rope` has checked it
        scale *= (0.1 * mscale * math.log(scaling.factor) + 1.0) ** 2
    return Scales(attention=scale)


def _minicpm_scales(keys: JsonKeys, facts: Facts) -> Scales:
    """null switches a factor off; an absent key has the factor of the published model."""
    layers, width = facts["layers"], facts["width"]
    depth = layers**0.5 if keys.is_null("scale_depth") else keys.number("scale_depth", 1.4)
    base = width if keys.is_null("dim_model_base") else keys.number("dim_model_base", 256.0)
    return replace(
        _scales(keys, facts),
        embedding=keys.number("scale_emb", 12.0),
        residual=depth / layers**0.5,
        logits=base / width,
    )


def turned_order(base: str, graph: Graph) -> Order | None:
    attention = next(op for op in graph.blocks if isinstance(op, LatentAttention))
    match base.rsplit(".", 1)[-1]:
        case "q" | "q_b":
            return _turned(attention.nope_size, attention.rope_size)
        case "kv_a":
            return _turned(attention.rank, attention.rope_size)
    return None


def kv_order(base: str, graph: Graph) -> Order | None:
    part = base.rsplit(".", 1)[-1]
    if part not in ("k_up", "v_up"):
        return None
    attention = next(op for op in graph.blocks if isinstance(op, LatentAttention))
    nope, value = attention.nope_size, attention.value_size
    if part == "k_up":
        return Order(nope + value, tuple(range(nope)), attention.rank)
    return Order(nope + value, tuple(range(nope, nope + value)))


def _turned(still: int, rope: int) -> Order:
    """The order of rows that do not rotate, then rows that do, which the file stores as neighbouring pairs."""
    turned = head_order(rope, rope, neighbours=True)
    rows = range(rope) if turned is None else turned.rows
    return Order(still + rope, (*range(still), *(still + row for row in rows)))


def _chosen_tokens(keys: JsonKeys, facts: Facts) -> Facts:
    """The context ends at index_topk tokens, beyond which an indexer, which is not computed, would choose tokens."""
    keys.skip(
        *("layer_types", "index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq"),
        *("index_skip_topk_offset", "index_topk_pattern", "indexer_rope_interleave", "index_share_for_mtp_iteration"),
    )
    return {"context": min(facts["context"], keys.whole("index_topk", 2048))}


def _with_experts(graph: Graph, change: Callable[[Experts], Experts]) -> Graph:
    return replace(graph, blocks=tuple(change(op) if isinstance(op, Experts) else op for op in graph.blocks))


def _experts_norm(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:  # noqa: ARG001

    def normed(op: Experts) -> Experts:
        return replace(op, post_norm=Norm(f"layers.{op.layer}.mlp_post_norm", "rms", config.width, config.norm_eps))

    return config, _with_experts(decoder(config), normed)


def _as_published(graph: Graph, stored: dict[str, Stored]) -> Graph:
    """A.X K1's published files also have a norm after each dense layer, which is unused, and no biases of experts."""
    mixed = {f"layers.{op.layer}.post_mlp_layernorm.weight" for op in graph.blocks if isinstance(op, Experts)}
    for name in [one for one in stored if one.endswith(".post_mlp_layernorm.weight") and one not in mixed]:
        del stored[name]
    if any(name.endswith(".e_score_correction_bias.weight") for name in stored):
        return graph
    return _with_experts(graph, lambda op: replace(op, correction=None))


_BIASED = Routed("sigmoid", ("noaux_tc",), 1, 1.8, renormalise=True)
_V2 = LlamaLike(
    positions=Positions(windows=None),
    sizes=LatentSizes(),
    mixture=Routed("softmax", ("greedy", "group_limited_greedy"), 0, 1.0, renormalise=False),
    scales=_scales,
    more=(_one_row, next_layers),
    unused=("aux_loss_alpha", "seq_aux", "ep_size", "embedding_initializer_range"),
)
_V3 = replace(_V2, mixture=replace(_BIASED, dense=3, factor=2.5, groups=(8, 4)))
_V32 = replace(_V3, more=(*_V2.more, _chosen_tokens))
_AXK1_EXPERTS = replace(_BIASED, methods=("noaux_tc", "none"), dense=1, factor=2.5, groups=(8, 4))
_AXK1 = replace(_V3, mixture=_AXK1_EXPERTS, graph=_experts_norm)
_FLASH = replace(_V2, mixture=_BIASED, norms=Norms(1e-5))
_MINICPM3 = replace(_V2, mixture=None, norms=Norms(1e-5), scales=_minicpm_scales, tied=True)
_YOUTU = replace(_V2, mixture=replace(_BIASED, dense=0, factor=1.0), tied=True)
DEEPSEEK = replace(
    LLAMA,
    architectures={"DeepseekV2ForCausalLM": "deepseek_v2"},
    parse=_V2.parse,
    orders=lambda base, graph: turned_order(base, graph) or kv_order(base, graph),
    names={name: one for name, one in LLAMA.names.items() if ".attention." not in name}
    | in_layers("""
        attention.q=self_attn.q_proj attention.q_a=self_attn.q_a_proj attention.q_a_norm=self_attn.q_a_layernorm
        attention.q_b=self_attn.q_b_proj attention.kv_a=self_attn.kv_a_proj_with_mqa
        attention.kv_a_norm=self_attn.kv_a_layernorm attention.k_up=self_attn.kv_b_proj
        attention.v_up=self_attn.kv_b_proj attention.o=self_attn.o_proj
    """)
    | ROUTED_NAMES,
    renames=ROUTED_RENAMES,
    following=ROUTED_NEXT,
)
_INDEXED = replace(DEEPSEEK, inert=re.compile(r"layers\.\d+\.self_attn\.indexer\..+"))
DEEPSEEKS: tuple[Family, ...] = (
    replace(_INDEXED, architectures={"DeepseekV32ForCausalLM": "deepseek_v32"}, parse=_V32.parse),
    replace(
        _INDEXED,
        architectures={"GlmMoeDsaForCausalLM": "glm_moe_dsa"},
        parse=replace(_V32, norms=Norms(1e-5), mixture=replace(_BIASED, dense=3, factor=2.5)).parse,
    ),
    replace(
        DEEPSEEK,
        architectures={"AXK1ForCausalLM": "axk1"},
        parse=_AXK1.parse,
        names=DEEPSEEK.names | in_layers("mlp_post_norm=post_mlp_layernorm"),
        renames=(*ROUTED_RENAMES, (re.compile(r"(layers\.\d+)\.mlp\.(post_mlp_layernorm\.weight)"), r"\1.\2")),
        fitted=_as_published,
    ),
    DEEPSEEK,
    replace(DEEPSEEK, architectures={"DeepseekV3ForCausalLM": "deepseek_v3"}, parse=_V3.parse),
    replace(DEEPSEEK, architectures={"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}, parse=_FLASH.parse),
    replace(DEEPSEEK, architectures={"YoutuForCausalLM": "youtu"}, parse=_YOUTU.parse),
    replace(DEEPSEEK, architectures={"MiniCPM3ForCausalLM": "minicpm3"}, parse=_MINICPM3.parse, orders=kv_order),
)
