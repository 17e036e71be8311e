"""Layouts of the GGUF files of models with DeepSeek's experts, with latent attention or without."""

from collections.abc import Mapping
from dataclasses import replace

from tokenwright.checkpoints.families.deepseek import kv_order, turned_order
from tokenwright.checkpoints.families.family import Order
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf import file_layout as layouts
from tokenwright.checkpoints.gguf.file_layout import EXPERTS_USED, PATTERN, SECTIONS, WINDOW
from tokenwright.models.graph import Graph

_KEYS = f"""
    {EXPERTS_USED} expert_gating_func=_scores expert_group_count=n_group expert_group_used_count=topk_group
    expert_shared_feed_forward_length=_shared expert_weights_norm=norm_topk_prob
    expert_weights_scale=routed_scaling_factor leading_dense_block_count=first_k_dense_replace
    nextn_predict_layers=num_nextn_predict_layers expert_feed_forward_length=moe_intermediate_size
"""
_OURS = "expert_count=n_routed_experts expert_shared_count=n_shared_experts"
_POST = layouts.layered("mlp_norm=post_attention_norm")
LATENT_NAMES = layouts.layered("""
    attention.q_a=attn_q_a attention.q_b=attn_q_b attention.q_a_norm=attn_q_a_norm attention.kv_a_norm=attn_kv_a_norm
    attention.kv_a=attn_kv_a_mqa attention.k_up=attn_k_b attention.v_up=attn_v_b
""")
LATENT_KEYS = """
    attention.key_length_mla=_key attention.kv_lora_rank=kv_lora_rank attention.q_lora_rank=q_lora_rank
    attention.value_length=_value attention.value_length_mla=v_head_dim
"""
_WHOLE = layouts.layered("attention.k_up=attn_kv_b attention.v_up=attn_kv_b")
# Layers and experts of V3, R1 and V2, whose first files lack the groups of experts.
_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3)}


def whole_kv(layout: layouts.Layout) -> layouts.Layout:
    first = layout.orders

    def orders(base: str, graph: Graph) -> Order | None:
        return kv_order(base, graph) or (first(base, graph) if first is not None else None)

    return replace(layout, names={**layout.names, **_WHOLE}, orders=orders)


def _deepseek(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """The first files' scores are V2's; key sizes are sums of a head's two sizes."""
    biased = any(".exp_probs_b" in name for name in tensors)
    scores = layouts.scores_of(found, "sigmoid" if biased else "softmax")
    rope = found["_turns"]
    layers, experts = found["num_hidden_layers"], found.get("n_routed_experts", 0)
    groups = {"n_group": 1, "topk_group": 1}
    if "n_group" not in found and (layers, experts) in _GROUPS:
        groups = dict(zip(groups, _GROUPS[layers, experts], strict=True))
    limited = {**groups, **found}["n_group"] > 1
    methods = {"sigmoid": "noaux_tc", "softmax": "group_limited_greedy" if limited else "greedy"}
    usual = {"norm_topk_prob": False, "q_lora_rank": None, "routed_scaling_factor": 1.0, "v_head_dim": found["_value"]}
    return usual | groups | {key: one for key, one in found.items() if key != "head_dim"} | {
        "architectures": ["DeepseekV3ForCausalLM" if scores == "sigmoid" else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": found["num_attention_heads"],
        "qk_nope_head_dim": found.get("_key", found["head_dim"]) - rope,
        "qk_rope_head_dim": rope,
        "scoring_func": scores,
        "topk_method": methods[scores],
    }  # fmt: skip


def _exaone(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    """The list of layers may go beyond the last one."""
    layers = found["num_hidden_layers"]
    return {**found, "layer_types": found.get("layer_types", ["full_attention"] * layers)[:layers]}


_ROUTED = layouts.Layout(
    "Dots1ForCausalLM", names=layouts.CORRECTION, keys=f"{_KEYS} {_OURS}", scores="scoring_func", following=layouts.NEXT
)
ROUTED_FILES: Mapping[str, layouts.Layout] = {
    "deepseek2": layouts.Layout(
        "DeepseekV3ForCausalLM",
        names=LATENT_NAMES | layouts.CORRECTION,
        keys=f"{_KEYS} {_OURS} {LATENT_KEYS} rope.dimension_count=_turns",
        more=_deepseek,
        bias=None,
        orders=turned_order,
        turned=False,
        latent=True,
        log_factor=10.0,
        following=layouts.NEXT,
    ),
    "glm4moe": replace(
        _ROUTED,
        model="Glm4MoeForCausalLM",
        present="use_qk_norm=attn_q_norm.weight",
        names=_POST | layouts.CORRECTION,
        keys=f"{_KEYS} {_OURS} {SECTIONS}",
        share="partial_rotary_factor",
    ),
    "bailingmoe2": replace(
        _ROUTED,
        model="Glm4MoeForCausalLM",
        present="use_qk_norm=attn_q_norm.weight",
        share="partial_rotary_factor",
        following=replace(layouts.NEXT, norm="layer_output_norm"),
    ),
    "dots1": _ROUTED,
    "exaone-moe": replace(
        _ROUTED,
        model="ExaoneMoeForCausalLM",
        defaults={"sliding_window": None},
        more=_exaone,
        keys=f"{_KEYS} {WINDOW} {PATTERN} expert_count=num_experts expert_shared_count=num_shared_experts",
        bias=None,
    ),
    "afmoe": layouts.Layout(
        "AfmoeForCausalLM",
        names=layouts.layered("attention.out_gate=attn_gate") | layouts.CORRECTION,
        keys=f"""
            {WINDOW} {EXPERTS_USED} expert_count=num_experts expert_shared_count=num_shared_experts
            expert_feed_forward_length=moe_intermediate_size expert_gating_func=_scores expert_group_count=n_group
            expert_group_used_count=topk_group expert_weights_norm=route_norm expert_weights_scale=route_scale
            leading_dense_block_count=num_dense_layers
        """,
        fixed={"mup_enabled": True},  # and windows in three of four layers
        scores="score_func",
    ),
    "minimax-m2": layouts.Layout(
        "MiniMaxM2ForCausalLM",
        names=layouts.CORRECTION,
        keys=f"""
            {EXPERTS_USED} expert_count=num_local_experts expert_feed_forward_length=intermediate_size
            expert_gating_func=_scores rope.dimension_count=rotary_dim
        """,
        scores="scoring_func",
        share="_share",
        bias=None,
    ),
    "ernie4_5-moe": layouts.Layout(
        "Ernie4_5_MoeForCausalLM",
        names=layouts.CORRECTION,
        neighbours=True,
        keys="""
            expert_count=moe_num_experts expert_shared_count=moe_num_shared_experts
            expert_feed_forward_length=moe_intermediate_size expert_used_count=moe_k
            interleave_moe_layer_step=moe_layer_interval leading_dense_block_count=moe_layer_start_index
            expert_shared_feed_forward_length=_shared
        """,  # the converter's, which no model has
        defaults={"moe_num_experts": 0},
        bias="use_bias",
    ),
    "hunyuan-moe": layouts.Layout(
        "HunYuanMoEV1ForCausalLM",
        keys="""
            expert_count=num_experts expert_shared_count=num_shared_expert
            expert_feed_forward_length=moe_intermediate_size expert_shared_feed_forward_length=_shared
            expert_used_count=moe_topk
        """,
    ),
}
