"""LFM2 and 3: short convolutions between two gates in most layers, attention in the others; LFM2-MoE has experts."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families.gemma4 import read_ropes
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.llama import EACH_HEAD
from tokenwright.checkpoints.families.llama_like import Facts, LlamaLike, Norms, Positions, Sizes, rope
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, check_same, expert_width, listed_layers
from tokenwright.checkpoints.families.positions import read_states
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Mixture, ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix
from tokenwright.models.recurrent import MOST_TAPS, Places, Recurrence, Recurrent


def _own(keys: JsonKeys, facts: Facts) -> Facts:
    keys.only("block_use_swiglu", True, why="an MLP without gates in this architecture")
    keys.only("use_pos_enc", True, why="attention without positions in this architecture")
    family.only_silu(keys)
    return {"tied_head": keys.flag("tie_embedding", facts["tied_head"])}


def _with_states(keys: JsonKeys, config: ModelConfig, taps: int, states: list[bool]) -> tuple[ModelConfig, Graph]:
    taps, bias = keys.whole("conv_L_cache", taps, least=2, most=MOST_TAPS), keys.flag("conv_bias", False)
    return config, decoder(config, {i: _convolution(config, i, taps, bias) for i, one in enumerate(states) if one})


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    dense = keys.whole("num_dense_layers", 2, least=0)
    experts = keys.whole("num_experts", 32, least=0, most=MOST_EXPERTS)
    check_same(keys, "num_local_experts", "num_experts", experts)
    chosen = keys.whole("num_experts_per_tok", 4, most=experts or MOST_EXPERTS)
    width, factor = expert_width(keys, "moe_intermediate_size", 1792), keys.number("routed_scaling_factor", 1.0)
    normalised, corrected = keys.flag("norm_topk_prob", True), keys.flag("use_expert_bias", True)
    if dense >= layers or not experts:
        return None
    mixed = tuple(i >= dense for i in range(layers))
    return Mixture(experts, chosen, width, mixed, "sigmoid", renormalise=normalised, corrected=corrected, factor=factor)


def _mlp_width(keys: JsonKeys) -> int:
    width = keys.whole(
        "block_ff_dim", keys.whole("intermediate_size", 12288, most=family.MOST_MLP), most=family.MOST_MLP
    )
    factor, multiple = keys.number("block_ffn_dim_multiplier", 1.0), keys.whole("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _convolved(keys: JsonKeys, layers: int) -> list[bool]:
    types, listed = keys.raw("layer_types"), "full_attn_idxs" in keys.names
    full = listed_layers(keys, "full_attn_idxs", layers) if listed else range(layers)
    if types is None:
        return [i not in full for i in range(layers)]
    return read_states(keys, types, layers, ("conv",), ("full_attention",))


def _convolution(config: ModelConfig, layer: int, taps: int, bias: bool) -> Recurrent:
    """The projection has rows for the gates before and after the convolution, then for its channels."""
    at, width = f"layers.{layer}.conv", config.width
    places = Places(conv=2 * width, before=0, gate=width)
    before, after = mixer_norms(config, layer)
    return Recurrent(
        layer,
        before,
        Matrix.single(f"{at}.in", 3 * width, width, bias),
        Recurrence(at, "convolution", width, taps, places, bias, activated=False),
        Matrix.single(f"{at}.out", width, width, bias),
        after,
        config.scales.residual,
    )


class _Positions3:
    """Layers of one type have windows and another rotation; full attention rotates half of the pairs."""

    def read(self, keys: JsonKeys, facts: Facts, context: int | None) -> Facts:
        layers, size = facts["layers"], facts["head_size"]
        context = keys.whole("max_position_embeddings", context, most=MAX_TOKENS)
        family.check_repeats(keys, context)
        window, types = keys.whole("sliding_window", 256, most=MAX_TOKENS), keys.raw("layer_types")
        slides = [one == "sliding_attention" for one in types] if isinstance(types, list) else []
        full, local = read_ropes(keys, size, size, context, _ROPES)
        windows = tuple(window if one else None for one in slides)
        return {"context": context, "positions": full, "local": local, "windows": windows, "rotary": (True,) * layers}


def _own3(keys: JsonKeys, facts: Facts) -> Facts:  # noqa: ARG001
    family.only_silu(keys)
    return {"post_norm": keys.flag("use_sandwich_norm", True), "out_gate": keys.flag("use_attention_gate", True)}


def _graph3(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    types, attention = keys.raw("layer_types"), ("full_attention", "sliding_attention")
    return _with_states(keys, config, 7, read_states(keys, types, config.layers, ("conv",), attention))


_SIZES = Sizes(32, None, 32, 8, mlp_width=_mlp_width, vocab_size=65536, context=128000)
_LIKE = LlamaLike(
    norms=Norms(1e-5, key="norm_eps"),
    qk_norm=EACH_HEAD,
    positions=Positions(rope(1000000.0), windows=None),
    sizes=_SIZES,
    tied=True,
    more=(_own,),
    unused=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
    ),
    graph=lambda keys, config: _with_states(keys, config, 3, _convolved(keys, config.layers)),
)
_MIXED = replace(_LIKE, sizes=replace(_SIZES, mlp_width=7168), mixture=_mixture)
LFM2 = family.Family(
    architectures={"Lfm2ForCausalLM": "lfm2"},
    parse=_LIKE.parse,
    prefix="model.",
    names=family.named("embed=embed_tokens norm=embedding_norm head=lm_head")
    | family.in_layers("""
        attention_norm=operator_norm attention.q=self_attn.q_proj attention.k=self_attn.k_proj
        attention.v=self_attn.v_proj attention.o=self_attn.out_proj attention.q_norm=self_attn.q_layernorm
        attention.k_norm=self_attn.k_layernorm conv.in=conv.in_proj conv.conv=conv.conv conv.out=conv.out_proj
        mlp_norm=ffn_norm
    """)
    | family.mlp_names("mlp", "feed_forward", "w1 w3 w2"),
    stacks=re.compile(r"layers\.\d+\.conv\.conv\.weight"),  # [channels, 1, taps]
)
LFM2_MOE = replace(
    LFM2,
    architectures={"Lfm2MoeForCausalLM": "lfm2_moe"},
    parse=_MIXED.parse,
    names=LFM2.names
    | family.in_layers("mlp.router=feed_forward.gate")
    | family.mlp_names("mlp.experts.{e}", "feed_forward.experts.{e}", "w1 w3 w2")
    | {"layers.{i}.mlp.correction": family.TensorSource("layers.{i}.feed_forward.expert_bias", wide=True)},
    renames=(family.without_ending(r"feed_forward\.expert_bias"),),
)
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LFM3 = replace(
    LFM2,
    architectures={"Lfm3ForCausalLM": "lfm3"},
    parse=replace(
        _LIKE,
        positions=_Positions3(),
        sizes=Sizes(24, 2048, 16, 4, 128, mlp_width=7680, vocab_size=128000, context=128000),
        more=(_own3,),
        graph=_graph3,
    ).parse,
    names=LFM2.names
    | family.in_layers("""
        attention.o=self_attn.o_proj attention.q_norm=self_attn.q_norm attention.k_norm=self_attn.k_norm
        attention.out_gate=self_attn.gate_proj attention_post_norm=post_operator_norm mlp_post_norm=post_ffn_norm
    """),
    # The file has one gate for each head, and our op has one for each of a head's numbers.
    orders=lambda base, graph: family.Order(1, (0,) * graph.rotary_size) if base.endswith(".out_gate") else None,
)
