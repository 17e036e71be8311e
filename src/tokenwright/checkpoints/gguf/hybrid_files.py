"""Layouts of the GGUF files of models with recurrent layers."""

from collections.abc import Mapping
from dataclasses import replace

from tokenwright.checkpoints.families.family import TensorSource, named
from tokenwright.checkpoints.families.hybrids.qwen_next import delta_order
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf import file_layout as layouts
from tokenwright.checkpoints.gguf.file_layout import EXPERTS_USED, GRANITE_KEYS, SECTIONS
from tokenwright.checkpoints.gguf.routed_files import LATENT_KEYS, LATENT_NAMES


def _layers(found: layouts.Keys, kinds: tuple[str, str]) -> list[str]:
    return [kinds[heads > 0] for heads in found["_kv_heads"]]


def _lfm2(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    return {**found, "layer_types": _layers(found, ("conv", "full_attention"))}


def _granite_hybrid(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    inner = found.pop("_inner")
    return {
        "num_local_experts": 0,
        "shared_intermediate_size": found["intermediate_size"],
        **found,
        "layer_types": _layers(found, ("mamba", "attention")),
        "mamba_expand": inner // found["hidden_size"],
        "position_embedding_type": "rope" if found.get("position_embedding_type") else "nope",
    }


def _delta(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    values = found.pop("_inner") // found["linear_num_value_heads"]
    widths = layouts.qwen2_experts(found, tensors) if "num_experts" in found else found
    return {**widths, "linear_value_head_dim": values}


def _mamba(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    """Falcon-Mamba has norms of dt, B and C, whose epsilon is built in."""
    same = ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "layer_norm_epsilon", *_MAMBA)
    return {key: found[key] for key in same} | {
        "architectures": ["FalconMambaForCausalLM" if found.get("_norms") else "MambaForCausalLM"],
        "intermediate_size": found["_inner"],
    }


def _mamba2(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    inner, heads = found["_inner"], found["num_heads"]
    same = ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "layer_norm_epsilon", *_MAMBA2)
    return {key: found[key] for key in (*same, "architectures")} | {
        "expand": inner // found["hidden_size"],
        "head_dim": inner // heads,
    }


def _nemotron(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """Each layer is one op: attention has KV heads, Mamba-2 a recurrence, the others an MLP or experts."""
    layers = found["num_hidden_layers"]
    mixed = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(layers)]
    states = [f"blk.{i}.ssm_in.weight" in tensors for i in range(layers)]
    dense = [f"blk.{i}.ffn_up.weight" in tensors for i in range(layers)]
    kinds = zip(mixed, states, dense, strict=True)
    letters = ("E" if one else "M" if other else "-" if third else "*" for one, other, third in kinds)
    inner = found["_inner"]
    return {key: one for key, one in found.items() if not key.startswith("rope_")} | {
        "hybrid_override_pattern": "".join(letters),
        "mamba_head_dim": inner // found["mamba_num_heads"],
        "num_key_value_heads": max(found["_kv_heads"]),
    }


def _falcon_h1(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    inner = found["_inner"]
    return found | {"mamba_d_head": inner // found["mamba_n_heads"], "mamba_d_ssm": inner}


def _jamba(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """Layers with attention have KV heads, those with experts a router: each kind at equal distances."""
    layers = found["num_hidden_layers"]
    heads = found["_kv_heads"] if isinstance(found["_kv_heads"], list) else [found["_kv_heads"]] * layers
    attends = [i for i, count in enumerate(heads) if count]
    routed = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors]
    kinds = {"attn_layer": attends, "expert_layer": routed}
    for key, at in kinds.items():
        first, second = (*at, *[layers] * 2)[:2] if at else (layers, 2 * layers + 1)
        found |= {f"{key}_offset": first, f"{key}_period": max(second - first, first + 1)}
    return {key: value for key, value in found.items() if not key.startswith("rope_")} | {
        "mamba_expand": found["_inner"] // found["hidden_size"]
    }


def _kimi(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """Layers with attention have a KV head, the others none; key sizes are sums of a head's two sizes."""
    full = [i for i, count in enumerate(found["_kv_heads"]) if count]
    delta = [i for i in range(found["num_hidden_layers"]) if i not in full]
    rope = tensors[f"blk.{full[0]}.attn_kv_a_mqa.weight"].shape[0] - found["kv_lora_rank"]
    rules = {
        "full_attn_layers": [i + 1 for i in full],
        "head_dim": found["_size"],
        "kda_layers": [i + 1 for i in delta],
        "num_heads": tensors[f"blk.{delta[0]}.ssm_beta.weight"].shape[0],
        "short_conv_kernel_size": found["_taps"],
    }
    return {"q_lora_rank": None, **found} | {
        "linear_attn_config": rules,
        "qk_nope_head_dim": found["_key"] - rope,
        "qk_rope_head_dim": rope,
    }


_SSM = layouts.layered(
    " ".join(
        f"{kind}.in=ssm_in {kind}.conv=ssm_conv1d {kind}.dt=ssm_dt_bias {kind}.skip=ssm_d {kind}.norm=ssm_norm "
        f"{kind}.out=ssm_out"
        for kind in ("mamba", "delta")
    )
)
_SCANS = _SSM | layouts.layered("""
    mamba.select=ssm_x mamba.steps=ssm_dt mamba.dt_norm=ssm_dt_norm mamba.b_norm=ssm_b_norm mamba.c_norm=ssm_c_norm
""")
_IN_TURN = {"linear_heads_in_turn": True}  # Qwen3.5's files interleave the value heads of the key heads
_CONV_BIAS = "ssm_conv1d.bias"
_MAMBA = ("conv_kernel", "state_size", "time_step_rank", "use_conv_bias")
_MAMBA2 = ("conv_kernel", "state_size", "n_groups", "num_heads", "use_conv_bias")
_SSD_KEYS = """
    ssm.conv_kernel=mamba_d_conv ssm.group_count=mamba_n_groups ssm.inner_size=_inner ssm.state_size=mamba_d_state
    ssm.time_step_rank=mamba_n_heads
"""
_NEMOTRON_KEYS = """
    ssm.conv_kernel=conv_kernel ssm.group_count=n_groups ssm.inner_size=_inner ssm.state_size=ssm_state_size
    ssm.time_step_rank=mamba_num_heads
"""
_DECAYS = {
    f"layers.{{i}}.{kind}.a_log": TensorSource("blk.{i}.ssm_a", log=True, wide=True) for kind in ("mamba", "delta")
}
_DELTA_NAMES = {
    **_SSM,
    **_DECAYS,
    **layouts.layered("delta.qkv=attn_qkv delta.z=attn_gate mlp_norm=post_attention_norm"),
    "layers.{i}.attention.q": TensorSource("blk.{i}.attn_q", turn=(0, 2)),
    "layers.{i}.attention.out_gate": TensorSource("blk.{i}.attn_q", turn=(1, 2)),
}
_BA = layouts.layered("delta.b=ssm_ba delta.a=ssm_ba")
_BETA_ALPHA = layouts.layered("delta.b=ssm_beta delta.a=ssm_alpha")
_DELTA_KEYS = f"""
    {SECTIONS} ssm.conv_kernel=linear_conv_kernel_dim ssm.state_size=linear_key_head_dim
    ssm.group_count=linear_num_key_heads ssm.time_step_rank=linear_num_value_heads ssm.inner_size=_inner
    full_attention_interval=full_attention_interval
"""
_DELTA_EXPERTS = f"""
    {EXPERTS_USED} expert_count=num_experts expert_feed_forward_length=moe_intermediate_size
    expert_shared_feed_forward_length=shared_expert_intermediate_size
"""
_KIMI_NAMES = LATENT_NAMES | layouts.layered("""
    delta.q=attn_q delta.k=attn_k delta.v=attn_v delta.f_a=ssm_f_a delta.f_b=ssm_f_b delta.g_a=ssm_g_a
    delta.g_b=ssm_g_b delta.conv_q=ssm_conv1d_q delta.conv_k=ssm_conv1d_k delta.conv_v=ssm_conv1d_v
    delta.b=ssm_beta delta.dt=ssm_dt_bias delta.norm=ssm_norm delta.out=attn_output
""")
_CONVOLUTIONS = named("norm=token_embd_norm") | layouts.layered(
    "conv.in=shortconv.in_proj conv.conv=shortconv.conv conv.out=shortconv.out_proj"
)


_NEMOTRON = layouts.Layout(
    "NemotronHForCausalLM",
    names=_SSM | _DECAYS | layouts.layered("attention_norm=attn_norm mlp_norm=attn_norm"),
    keys=_NEMOTRON_KEYS,
    present=f"mlp_bias=ffn_up.bias use_bias=ssm_in.bias use_conv_bias={_CONV_BIAS}",
    more=_nemotron,
    epsilon=(layouts.RMS, "layer_norm_epsilon"),
    by_layer=True,
)
HYBRIDS: Mapping[str, layouts.Layout] = {
    "lfm2": layouts.Layout(
        "Lfm2ForCausalLM",
        names=_CONVOLUTIONS,
        keys="shortconv.l_cache=conv_L_cache",
        fixed={"block_auto_adjust_ff_dim": False},
        more=_lfm2,
        epsilon=(layouts.RMS, "norm_eps"),
        bias=None,
    ),
    "lfm2moe": layouts.Layout(
        "Lfm2MoeForCausalLM",
        names=_CONVOLUTIONS | layouts.layered("mlp.correction=exp_probs_b"),
        keys=f"""
            {EXPERTS_USED} shortconv.l_cache=conv_L_cache leading_dense_block_count=num_dense_layers
            expert_count=num_experts expert_feed_forward_length=moe_intermediate_size expert_gating_func=_scores
        """,
        present="use_expert_bias=exp_probs_b.bias",
        more=_lfm2,
        epsilon=(layouts.RMS, "norm_eps"),
        bias=None,
    ),
    "granitehybrid": layouts.Layout(
        "GraniteMoeHybridForCausalLM",
        names=_SSM | _DECAYS,
        neighbours=True,
        keys=f"""
            {GRANITE_KEYS} {_SSD_KEYS} {EXPERTS_USED} expert_count=num_local_experts
            expert_shared_feed_forward_length=shared_intermediate_size rope.scaling.finetuned=position_embedding_type
        """,
        present=f"mamba_conv_bias={_CONV_BIAS}",
        more=_granite_hybrid,
    ),
    "kimi-linear": layouts.Layout(
        "KimiLinearForCausalLM",
        names=_KIMI_NAMES | _DECAYS | layouts.CORRECTION,
        keys=f"""
            {LATENT_KEYS} expert_count=num_experts expert_feed_forward_length=moe_intermediate_size
            expert_gating_func=_scores expert_group_count=num_expert_group expert_group_used_count=topk_group
            expert_shared_count=num_shared_experts expert_used_count=num_experts_per_token
            expert_weights_norm=moe_renormalize expert_weights_scale=routed_scaling_factor kda.head_dim=_size
            leading_dense_block_count=first_k_dense_replace ssm.conv_kernel=_taps
        """,
        scores="moe_router_activation_func",
        more=_kimi,
        turned=False,
        latent=True,
    ),
    "mamba": layouts.Layout(
        "MambaForCausalLM",
        names=_SCANS | _DECAYS,
        keys="""
            ssm.conv_kernel=conv_kernel ssm.state_size=state_size ssm.time_step_rank=time_step_rank
            ssm.inner_size=_inner ssm.dt_b_c_rms=_norms
        """,
        present=f"use_conv_bias={_CONV_BIAS}",
        more=_mamba,
        epsilon=(layouts.RMS, "layer_norm_epsilon"),
        bias=None,
    ),
    "mamba2": layouts.Layout(
        "Mamba2ForCausalLM",
        names=_SSM | _DECAYS,
        keys="""
            ssm.conv_kernel=conv_kernel ssm.group_count=n_groups ssm.inner_size=_inner ssm.state_size=state_size
            ssm.time_step_rank=num_heads
        """,
        present=f"use_conv_bias={_CONV_BIAS}",
        more=_mamba2,
        epsilon=(layouts.RMS, "layer_norm_epsilon"),
        bias=None,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        names={**_NEMOTRON.names, **layouts.CORRECTION},
        keys=f"""
            {_NEMOTRON_KEYS} {EXPERTS_USED} expert_count=n_routed_experts
            expert_feed_forward_length=moe_intermediate_size expert_gating_func=_scores expert_group_count=n_group
            expert_group_used_count=topk_group expert_shared_count=n_shared_experts
            expert_shared_feed_forward_length=moe_shared_expert_intermediate_size expert_weights_norm=norm_topk_prob
            expert_weights_scale=routed_scaling_factor moe_latent_size=moe_latent_size
        """,
    ),
    "falcon-h1": layouts.Layout(
        "FalconH1ForCausalLM",
        names=_SSM | _DECAYS,
        keys=_SSD_KEYS,
        fixed={"mamba_norm_before_gate": False},
        present=f"mamba_conv_bias={_CONV_BIAS} mamba_rms_norm=ssm_norm.weight",
        more=_falcon_h1,
    ),
    "jamba": layouts.Layout(
        "JambaForCausalLM",
        names=_SCANS | _DECAYS,
        keys=f"""
            {EXPERTS_USED} expert_count=num_experts ssm.conv_kernel=mamba_d_conv ssm.inner_size=_inner
            ssm.state_size=mamba_d_state ssm.time_step_rank=mamba_dt_rank
        """,
        present=f"mamba_conv_bias={_CONV_BIAS}",
        more=_jamba,
        bias=None,
    ),
    "qwen3next": layouts.Layout(
        "Qwen3NextForCausalLM",
        names=_DELTA_NAMES | _BA,
        keys=f"{_DELTA_KEYS} {_DELTA_EXPERTS}",
        more=_delta,
        share="partial_rotary_factor",
        orders=lambda base, graph: delta_order(base, graph) if base.endswith((".b", ".a")) else None,  # as folders do
        following=layouts.NEXT,
    ),
    "qwen35": layouts.Layout(
        "Qwen3_5ForCausalLM",
        names=_DELTA_NAMES | _BETA_ALPHA,
        keys=_DELTA_KEYS,
        fixed=_IN_TURN,
        more=_delta,
        share="partial_rotary_factor",
        following=layouts.NEXT,
    ),
    "qwen35moe": layouts.Layout(
        "Qwen3_5MoeForCausalLM",
        names=_DELTA_NAMES | _BETA_ALPHA,
        keys=f"{_DELTA_KEYS} {_DELTA_EXPERTS}",
        fixed=_IN_TURN,
        more=_delta,
        share="partial_rotary_factor",
        following=layouts.NEXT,
    ),
}
