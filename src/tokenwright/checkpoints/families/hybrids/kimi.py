"""Kimi-Linear: delta rules with a decay for each number of a key (KDA), beside latent attention without positions."""

import re
from dataclasses import dataclass, replace

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families.deepseek import DEEPSEEK, LatentSizes, kv_order
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.llama_like import LlamaLike, NoPositions, Norms, next_layers
from tokenwright.checkpoints.families.positions import read_states
from tokenwright.checkpoints.families.routed import Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.recurrent import MOST_TAPS, Inner, Places, Recurrence, Recurrent

_ROUTED = Routed("sigmoid", ("noaux_tc",), 1, 2.446, renormalise=True, shared_count=1)
_SPELLED = {
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "scoring_func": "moe_router_activation_func",
}
_SHARED = (
    *("first_k_dense_replace", "hidden_size", "mlp_layer_types", "moe_intermediate_size", "moe_layer_freq"),
    *("num_local_experts", "routed_scaling_factor", "topk_group", "topk_method"),
)


@dataclass(frozen=True, slots=True)
class KeyDecays:
    heads: int
    size: int
    taps: int

    @property
    def rows(self) -> int:
        return self.heads * self.size


def _graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    family.only_silu(keys)
    keys.only("mla_use_nope", True, why="latent attention with positions in this architecture")
    rules, states = _rules(keys, config.layers)
    return config, decoder(config, {i: _delta(config, i, rules) for i, state in enumerate(states) if state})


def _rules(keys: JsonKeys, layers: int) -> tuple[KeyDecays, list[bool]]:
    """The kinds of the layers, which published files count from 1."""
    given = keys.raw("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise keys.error(f"linear_attn_config must be an object, not a {type(given).__name__}")
    part = JsonKeys(given, f"{keys.where}: linear_attn_config")
    rules = KeyDecays(
        part.whole("num_heads", keys.whole("linear_num_heads", 32, most=1 << 16), most=1 << 16),
        part.whole("head_dim", keys.whole("linear_head_dim", 128, most=family.MOST_WIDTH), most=family.MOST_WIDTH),
        part.whole(
            "short_conv_kernel_size",
            keys.whole("linear_conv_kernel_dim", 4, least=2, most=MOST_TAPS),
            least=2,
            most=MOST_TAPS,
        ),
    )
    types, delta, full = keys.raw("layer_types"), part.raw("kda_layers"), part.raw("full_attn_layers")
    part.only("use_full_rank_gate", False, why="gates of a full rank")
    part.only("gate_lower_bound", why="decays with a lower bound")
    part.finish((), "Tokenwright cannot tell whether that changes the arithmetic")
    if types is None and delta is not None and full is not None:
        if not isinstance(delta, list) or not isinstance(full, list) or {*delta, *full} != {*range(1, layers + 1)}:
            raise part.error(f"kda_layers and full_attn_layers must have the layers from 1 to {layers}")
        return rules, [i + 1 in delta for i in range(layers)]
    if types is None:
        return rules, [i == 0 or i % 4 != 0 for i in range(layers)]
    return rules, read_states(keys, types, layers, ("linear_attention",), ("full_attention",))


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    spelled = {ours: keys.raw(ours) if keys.raw(key) is None else keys.raw(key) for ours, key in _SPELLED.items()}
    values = spelled | {key: keys.raw(key) for key in _SHARED}
    return read_routed(
        JsonKeys({key: one for key, one in values.items() if one is not None}, keys.where), _ROUTED, layers
    )


def _delta(config: ModelConfig, layer: int, sizes: KeyDecays) -> Recurrent:
    """A row is q, k and v, the inputs of decays and gates, and b of each head; then decays and gates."""
    at, rows, size, width = f"layers.{layer}.delta", sizes.rows, sizes.size, config.width
    parts = {"q": rows, "k": rows, "v": rows, "f_a": size, "g_a": size, "b": sizes.heads}
    low = 3 * rows
    beta = low + 2 * size
    decay = beta + sizes.heads
    recurrence = Recurrence(
        at,
        "delta",
        3 * rows,
        sizes.taps,
        Places(query=0, key=rows, value=2 * rows, beta=beta, decay=decay, gate=decay + rows),
        heads=sizes.heads,
        key_heads=sizes.heads,
        key_size=size,
        value_size=size,
        norm=Norm(f"{at}.norm", "rms", size, config.norm_eps),
        conv_parts=tuple((f"conv_{one}", rows) for one in "qkv"),
        key_decays=True,
        gated_by="sigmoid",
    )
    before, after = mixer_norms(config, layer)
    return Recurrent(
        layer,
        before,
        Matrix(f"{at}.in", tuple((f"{at}.{name}", count) for name, count in parts.items()), width),
        recurrence,
        Matrix.single(f"{at}.out", width, rows),
        after,
        inner=(
            Inner(Matrix.single(f"{at}.f_b", rows, size), low),
            Inner(Matrix.single(f"{at}.g_b", rows, size), low + size),
        ),
    )


_LIKE = LlamaLike(
    norms=Norms(1e-5),
    positions=NoPositions(key="model_max_length"),
    sizes=LatentSizes(context=1 << 20),
    mixture=_mixture,
    more=(next_layers,),
    unused=("head_dim", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "use_grouped_topk"),
    graph=_graph,
)
KIMI_LINEAR = replace(
    DEEPSEEK,
    architectures={"KimiLinearForCausalLM": "kimi_linear"},
    parse=_LIKE.parse,
    orders=kv_order,
    names=DEEPSEEK.names
    | family.in_layers(
        """
        delta.q=q_proj delta.k=k_proj delta.v=v_proj delta.b=b_proj delta.f_a=f_a_proj delta.f_b=f_b_proj
        delta.g_a=g_a_proj delta.g_b=g_b_proj delta.conv_q=q_conv1d delta.conv_k=k_conv1d delta.conv_v=v_conv1d
        delta.a_log=A_log delta.dt=dt_bias delta.norm=o_norm delta.out=o_proj
    """,
        "layers.{i}.self_attn",
    )
    | family.in_layers("mlp.router=block_sparse_moe.gate")
    | family.mlp_names("mlp.experts.{e}", "block_sparse_moe.experts.{e}", "w1 w3 w2")
    | family.mlp_names("mlp.shared", "block_sparse_moe.shared_experts")
    | {
        "layers.{i}.mlp.correction": family.TensorSource(
            "layers.{i}.block_sparse_moe.gate.e_score_correction_bias", wide=True
        )
    },
    renames=(
        family.without_ending(r"self_attn\.(?:A_log|dt_bias)|block_sparse_moe\.gate\.e_score_correction_bias"),
        # as transformers computes with them, and writes layers without experts
        (re.compile(r"(layers\.\d+\.self_attn)\.forget_gate\.(A_log|dt_bias)"), r"\1.\2.weight"),
        (re.compile(r"(layers\.\d+\.self_attn)\.forget_gate\.(.+)"), r"\1.\2"),
        (re.compile(r"(layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)"), r"\1.mlp.\2"),
    ),
    stacks=re.compile(r"layers\.\d+\.self_attn\.(?:(?:[qkv]_)?conv1d\.weight|A_log\.weight)"),
)
