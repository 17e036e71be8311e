"""Kimi-Linear: delta rules with a decay for each number of a key (KDA), beside latent attention without positions."""

import re
from dataclasses import dataclass, replace

from tokenwright.checkpoints.families.deepseek import DEEPSEEK, kv_order, latent_heads
from tokenwright.checkpoints.families.family import (
    MOST_LAYERS,
    MOST_WIDTH,
    TensorSource,
    check_repeats,
    dtype,
    heads_of,
    named,
    sizes,
)
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.positions import read_states
from tokenwright.checkpoints.families.routed import Routed, read_routed
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
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
# Of attention without positions, of training, or repeated by others; head_dim is that of no layer.
_UNUSED = (
    *("head_dim", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "output_router_logits"),
    *("router_aux_loss_coef", "use_grouped_topk"),
)
_STATES, _ATTENTION = ("linear_attention",), ("full_attention",)


@dataclass(frozen=True, slots=True)
class KeyDecays:
    heads: int
    size: int  # of each head
    taps: int

    @property
    def rows(self) -> int:
        return self.heads * self.size


def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    found = sizes(keys)
    layers = found["layers"]
    heads, _ = heads_of(keys)
    latent = latent_heads(keys)
    context = keys.whole("model_max_length", keys.raw("max_position_embeddings") or 1 << 20, most=MAX_TOKENS)
    check_repeats(keys, context)
    for key in _UNUSED:
        keys.raw(key)
    keys.only("attention_bias", False, why="biases of latent attention")
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")
    keys.only("mla_use_nope", True, why="latent attention with positions in this architecture")
    rules, states = _rules(keys, layers)
    config = ModelConfig(
        architecture=architecture,
        **found,
        heads=heads,
        kv_heads=1,
        head_size=latent.nope + latent.rope,
        context=context,
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        mixture=_mixture(keys, layers),
        latent=latent,
        next_layers=keys.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=dtype(keys),
    )
    return config, decoder(config, {i: _delta(config, i, rules) for i, state in enumerate(states) if state})


def _rules(keys: JsonKeys, layers: int) -> tuple[KeyDecays, list[bool]]:
    """The sizes of the delta rules, and whether each layer has one; published files count layers from 1."""
    given = keys.raw("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise keys.error(f"linear_attn_config must be an object, not a {type(given).__name__}")
    part = JsonKeys(given, f"{keys.where}: linear_attn_config")
    rules = KeyDecays(
        part.whole("num_heads", keys.whole("linear_num_heads", 32, most=1 << 16), most=1 << 16),
        part.whole("head_dim", keys.whole("linear_head_dim", 128, most=MOST_WIDTH), most=MOST_WIDTH),
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
    return rules, read_states(keys, types, layers, _STATES, _ATTENTION)


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    spelled = {ours: keys.raw(ours) if keys.raw(key) is None else keys.raw(key) for ours, key in _SPELLED.items()}
    values = spelled | {key: keys.raw(key) for key in _SHARED}
    return read_routed(
        JsonKeys({key: one for key, one in values.items() if one is not None}, keys.where), _ROUTED, layers
    )


def _delta(config: ModelConfig, layer: int, sizes: KeyDecays) -> Recurrent:
    """The numbers of a row: q, k and v; what decays and gates come from; of each head b; then decays and gates."""
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


_ATTENTION_AT, _MIXED = "layers.{i}.self_attn", "layers.{i}.block_sparse_moe"
_DELTA = {
    **{f"layers.{{i}}.delta.{one}": f"{_ATTENTION_AT}.{one}_proj" for one in (*"qkvb", "f_a", "f_b", "g_a", "g_b")},
    **{f"layers.{{i}}.delta.conv_{one}": f"{_ATTENTION_AT}.{one}_conv1d" for one in "qkv"},
    "layers.{i}.delta.a_log": f"{_ATTENTION_AT}.A_log",
    "layers.{i}.delta.dt": f"{_ATTENTION_AT}.dt_bias",
    "layers.{i}.delta.norm": f"{_ATTENTION_AT}.o_norm",
    "layers.{i}.delta.out": f"{_ATTENTION_AT}.o_proj",
}
_EXPERTS = {
    "layers.{i}.mlp.router": f"{_MIXED}.gate",
    **{
        f"layers.{{i}}.mlp.experts.{{e}}.{ours}": f"{_MIXED}.experts.{{e}}.{theirs}"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    **{f"layers.{{i}}.mlp.shared.{one}": f"{_MIXED}.shared_experts.{one}_proj" for one in ("gate", "up", "down")},
}
KIMI_LINEAR = replace(
    DEEPSEEK,
    architectures={"KimiLinearForCausalLM": "kimi_linear"},
    parse=_parse,
    orders=kv_order,
    names={
        **DEEPSEEK.names,
        **named(_DELTA | _EXPERTS),
        "layers.{i}.mlp.correction": TensorSource(f"{_MIXED}.gate.e_score_correction_bias", wide=True),
    },
    renames=(
        (re.compile(r"(layers\.\d+\.self_attn\.(?:A_log|dt_bias))"), r"\1.weight"),
        (re.compile(r"(layers\.\d+\.block_sparse_moe\.gate\.e_score_correction_bias)"), r"\1.weight"),
        # As transformers writes the layers without experts.
        (re.compile(r"(layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)"), r"\1.mlp.\2"),
    ),
    stacks=re.compile(r"layers\.\d+\.self_attn\.(?:[qkv]_conv1d\.weight|A_log\.weight)"),
)
