"""DeepSeek V2 and V3, GLM-4.7-Flash: latent attention (MLA), experts behind some dense layers, shared experts.

Where transformers ignores a key that the authors' own code reads (moe_layer_freq, and V2's norm_topk_prob), it means
here what it means there.
"""

import math
from dataclasses import replace
from functools import partial

from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_WIDTH,
    Family,
    Order,
    activation,
    check_repeats,
    dtype,
    head_order,
    heads_of,
    named,
    sizes,
)
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, ROUTED_NEXT, ROUTED_RENAMES, Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import LatentHeads, ModelConfig, Rope, Scales, YarnScaling
from tokenwright.models.graph import Graph
from tokenwright.models.latent import LatentAttention

_GROUP, _BLOCK = 32, 16  # numbers of a row that share a scale in the cache; outputs of a block of packed weights
_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")


def _parse(
    keys: JsonKeys, architecture: str, like: Routed, eps: float = 1e-6, tied: bool = False
) -> tuple[ModelConfig, Graph]:
    found = sizes(keys)
    layers = found["layers"]
    heads, shared = heads_of(keys)
    if shared != heads:
        raise keys.error(
            f"num_key_value_heads is {shared}, but latent attention has one cache row for all {heads} heads"
        )
    latent = latent_heads(keys)
    for key, size in (("head_dim", latent.rope), ("qk_head_dim", latent.nope + latent.rope)):
        if keys.whole(key, size) != size:
            raise keys.error(f"{key} is {keys.raw(key)}, but by the other sizes it is {size}; correct config.json")
    context = keys.whole("max_position_embeddings", most=MAX_TOKENS)
    rope, reach = read_rope(keys, 10000.0, latent.rope, context)
    check_repeats(keys, context, reach)
    for key in (*_TRAINING, "embedding_initializer_range"):
        keys.raw(key)
    keys.only("attention_bias", False, why="biases of latent attention")
    keys.only("mlp_bias", False, why="biases in the MLP in this architecture")
    keys.only("rope_interleave", True, why="rotation of the halves of a head in this architecture")
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=1,
        head_size=latent.nope + latent.rope,
        context=reach,
        positions=rope,
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm_eps=keys.number("rms_norm_eps", eps),
        activation=activation(keys, "hidden_act", "silu"),
        scales=Scales(attention=_score_scale(keys, rope, latent)),
        mixture=read_routed(keys, like, layers),
        latent=latent,
        next_layers=keys.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS),
        tied_head=keys.flag("tie_word_embeddings", tied),
        dtype=dtype(keys),
    )
    return config, decoder(config)


def latent_heads(keys: JsonKeys) -> LatentHeads:
    """The sizes of attention. Raises CheckpointError for those that the cache or packed weights cannot hold."""
    rank, rope = keys.whole("kv_lora_rank", most=MOST_WIDTH), keys.whole("qk_rope_head_dim", most=MOST_WIDTH)
    nope, value = keys.whole("qk_nope_head_dim", most=MOST_WIDTH), keys.whole("v_head_dim", most=MOST_WIDTH)
    q_rank = 0 if keys.is_null("q_lora_rank") else keys.whole("q_lora_rank", most=MOST_WIDTH)
    if rank % _GROUP:
        raise keys.error(
            f"kv_lora_rank is {rank:,}: Tokenwright needs a multiple of {_GROUP}, because so many numbers of a cache "
            "row share a scale"
        )
    if value % _BLOCK:
        raise keys.error(f"v_head_dim is {value:,}: Tokenwright packs the values of a head in multiples of {_BLOCK}")
    return LatentHeads(rank, q_rank, nope, rope, value)


def _score_scale(keys: JsonKeys, rope: Rope, latent: LatentHeads) -> float:
    """The factor of scores: under YaRN with mscale_all_dim, m^2 times the usual one, with m = 0.1 mscale ln(s) + 1."""
    scale: float = (latent.nope + latent.rope) ** -0.5
    if not isinstance(rope.scaling, YarnScaling):
        return scale
    spelled = keys.raw("rope_scaling") or keys.raw("rope_parameters")
    mscale = spelled.get("mscale_all_dim") or 0.0  # a number: `read_rope` has seen it
    return scale * (0.1 * mscale * math.log(rope.scaling.factor) + 1.0) ** 2


def _orders(base: str, graph: Graph) -> Order | None:
    return turned_order(base, graph) or kv_order(base, graph)


def turned_order(base: str, graph: Graph) -> Order | None:
    """The order of the rows that turn, in q and beside the latent."""
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
    """Rows that do not turn, then rows that turn, of which the file has pairs that turn together as neighbours."""
    turned = head_order(rope, rope, neighbours=True)
    rows = range(rope) if turned is None else turned.rows
    return Order(still + rope, (*range(still), *(still + row for row in rows)))


_AT = "layers.{i}."
DEEPSEEK = replace(
    LLAMA,
    architectures={"DeepseekV2ForCausalLM": "deepseek_v2"},
    parse=partial(_parse, like=Routed("softmax", ("greedy", "group_limited_greedy"), 0, 1.0, renormalise=False)),
    orders=_orders,
    names={name: one for name, one in LLAMA.names.items() if not name.startswith(f"{_AT}attention.")}
    | named(
        {
            f"{_AT}attention.q": f"{_AT}self_attn.q_proj",
            f"{_AT}attention.q_a": f"{_AT}self_attn.q_a_proj",
            f"{_AT}attention.q_a_norm": f"{_AT}self_attn.q_a_layernorm",
            f"{_AT}attention.q_b": f"{_AT}self_attn.q_b_proj",
            f"{_AT}attention.kv_a": f"{_AT}self_attn.kv_a_proj_with_mqa",
            f"{_AT}attention.kv_a_norm": f"{_AT}self_attn.kv_a_layernorm",
            f"{_AT}attention.k_up": f"{_AT}self_attn.kv_b_proj",
            f"{_AT}attention.v_up": f"{_AT}self_attn.kv_b_proj",
            f"{_AT}attention.o": f"{_AT}self_attn.o_proj",
        }
    )
    | ROUTED_NAMES,
    renames=ROUTED_RENAMES,
    following=ROUTED_NEXT,
)
_BIASED = Routed("sigmoid", ("noaux_tc",), 1, 1.8, renormalise=True)
_YOUTU = replace(_BIASED, dense=0, factor=1.0)  # without experts
_V3 = replace(_BIASED, dense=3, factor=2.5, groups=(8, 4))
DEEPSEEKS: tuple[Family, ...] = (
    DEEPSEEK,
    replace(DEEPSEEK, architectures={"DeepseekV3ForCausalLM": "deepseek_v3"}, parse=partial(_parse, like=_V3)),
    replace(
        DEEPSEEK,
        architectures={"Glm4MoeLiteForCausalLM": "glm4_moe_lite"},
        parse=partial(_parse, like=_BIASED, eps=1e-5),
    ),
    replace(DEEPSEEK, architectures={"YoutuForCausalLM": "youtu"}, parse=partial(_parse, like=_YOUTU, tied=True)),
)
