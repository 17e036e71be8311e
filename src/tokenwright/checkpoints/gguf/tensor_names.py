"""Layouts of GGUF files by architecture: tensors' names, and the config keys of their metadata."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import nextafter
from statistics import NormalDist

from tokenwright.checkpoints.families.family import TensorSource, named, pairs
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf import file_layout as layouts
from tokenwright.checkpoints.gguf.file_layout import (
    CLAMP,
    EXPERTS_USED,
    GRANITE_KEYS,
    PATTERN,
    QWEN_EXPERTS,
    SECTIONS,
    WINDOW,
)
from tokenwright.checkpoints.gguf.hybrid_files import HYBRIDS
from tokenwright.checkpoints.gguf.routed_files import ROUTED_FILES, whole_kv
from tokenwright.models.op import XIELU
from tokenwright.models.residual_streams import MOST_STREAMS


def _gemma(found: layouts.Keys, _: Mapping[str, Stored], deepest: int = 46) -> layouts.Keys:
    """Scores are scaled by the head's size, but in the 27B models by the width of a head's share of it."""
    share = found["hidden_size"] / found["num_attention_heads"]
    scalar = share if found["num_hidden_layers"] == deepest else found["head_dim"]
    return {**found, "query_pre_attn_scalar": scalar, "torch_dtype": "bfloat16"}


def _gemma3(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    return _gemma(found if "sliding_window" in found else {**found, "sliding_window_pattern": 1}, tensors, 62)


def _gemma3n(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """In llama.cpp 20 layers have their own K and V; its files have deviations instead of shares."""
    shared = found.get("num_kv_shared_layers", max(found["num_hidden_layers"] - 20, 0))
    shares = found.get("_deviations")
    return found | {
        "activation_sparsity_pattern": shares and [round(NormalDist().cdf(one), 6) for one in shares],
        "intermediate_size": found["_widths"],
        "laurel_rank": tensors["blk.0.laurel_l.weight"].shape[0],
        "num_kv_shared_layers": int(shared),
        "torch_dtype": "bfloat16",
        "vocab_size_per_layer_input": tensors["per_layer_token_embd.weight"].shape[0],
    }


def _gemma4(found: layouts.Keys, tensors: Mapping[str, Stored]) -> layouts.Keys:
    """`key_length` is that of layers with full attention. Without V, K is both."""
    full = [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    own = [i for i in full if i < found["num_hidden_layers"] - found.get("num_kv_shared_layers", 0)]
    counts, widths = found["_kv_heads"], found["_widths"]
    if isinstance(counts, list):
        every = range(len(counts))
        found |= {"num_global_key_value_heads": counts[full[-1]]} if full else {}
        found |= {"num_key_value_heads": next((counts[i] for i in every if i not in full), counts[-1])}
    rope = {"rope_theta": found.pop("rope_theta"), **(found.pop("rope_scaling") or {"rope_type": "default"})}
    size = found.pop("_window_size", found["head_dim"])
    share = found.pop("_turns", size) / size
    sliding = {"rope_type": "default", "rope_theta": found.pop("rope_local_base_freq", 10000.0)}
    sliding |= {} if share == 1 else {"partial_rotary_factor": nextafter(share, 1)}
    table = tensors.get("per_layer_token_embd.weight")
    return {key: one for key, one in found.items() if not key.startswith("_")} | {
        "attention_k_eq_v": bool(own) and f"blk.{own[0]}.attn_v.weight" not in tensors,
        "enable_moe_block": bool(found.get("num_experts")),
        "global_head_dim": found["head_dim"],
        "head_dim": size,
        "hidden_size_per_layer_input": found.get("hidden_size_per_layer_input", 0),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
        "torch_dtype": "bfloat16",
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] > widths[0],
        "vocab_size_per_layer_input": found["vocab_size"] if table is None else table.shape[0],
    }


def _gpt_oss(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    scaling = found["rope_scaling"]
    return {**found, "rope_scaling": scaling and {**scaling, "truncate": False}}


def _olmo(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    return {**found, "architectures": ["Olmo3ForCausalLM"]} if "sliding_window" in found else found


_GPT2_KEYS = pairs("""
    n_embd=hidden_size n_head=num_attention_heads n_inner=intermediate_size n_layer=num_hidden_layers
    n_positions=max_position_embeddings
""")


def _gpt2(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    same = ("architectures", "layer_norm_epsilon", "vocab_size", "tie_word_embeddings")
    return {key: found[key] for key in same} | {ours: found[key] for ours, key in _GPT2_KEYS.items()}


def _mistral(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    """Ministral 3 scales queries beyond the original context; llama.cpp has no windows for either."""
    model, scaling = "MistralForCausalLM", found["rope_scaling"]
    if "_beta" in found:
        model, scaling = "Ministral3ForCausalLM", {**scaling, "llama_4_scaling_beta": found["_beta"]}
    return {**found, "architectures": [model], "rope_scaling": scaling, "sliding_window": None}


def _minicpm(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    """The first files lack the factors, which are MiniCPM 2B's."""
    depth = found["num_hidden_layers"] ** 0.5
    return {"scale_emb": 12.0, **found} | {
        "dim_model_base": round(found["hidden_size"] / found["_logits"]) if "_logits" in found else 256,
        "scale_depth": round(found["_residual"] * depth, 5) if "_residual" in found else 1.4,
    }


def _granite(found: layouts.Keys, _: Mapping[str, Stored]) -> layouts.Keys:
    shared = "shared_intermediate_size" in found
    return {**found, "architectures": ["GraniteMoeSharedForCausalLM"]} if shared else found


_INPUTS = layouts.layered("inputs.gate=inp_gate inputs.out=proj inputs.post_norm=post_norm") | named("""
    layer_inputs.table=per_layer_token_embd layer_inputs.project=per_layer_model_proj
    layer_inputs.norm=per_layer_proj_norm
""")
_CAPPED = "final_logit_softcapping=final_logit_softcapping"
_LOCAL_BASE = "rope.freq_base_swa=rope_local_base_freq"
_INPUT_KEYS = f"""
    {WINDOW} {PATTERN} {_CAPPED} {_LOCAL_BASE} attention.shared_kv_layers=num_kv_shared_layers
    feed_forward_length=_widths embedding_length_per_layer_input=hidden_size_per_layer_input
"""
_GEMMA3N = layouts.layered("""
    streams.norm=altup_router_norm streams.router=altup_router streams.predict.coefficients=altup_predict_coef
    streams.correct.coefficients=altup_correct_coef streams.scale=altup_correct_scale laurel.left=laurel_l
    laurel.right=laurel_r laurel.post_norm=laurel_post_norm
""")
_GEMMA4 = layouts.layered("""
    dense_post_norm=post_ffw_norm_1 experts_norm=pre_ffw_norm_2 experts_post_norm=post_ffw_norm_2
    router_norm=ffn_gate_inp_scale
""")

_LLAMA = layouts.Layout("LlamaForCausalLM", neighbours=True)
LAYOUTS: Mapping[str, layouts.Layout] = {
    **HYBRIDS,
    **ROUTED_FILES,
    "llama": _LLAMA,
    "gpt2": layouts.Layout("GPT2LMHeadModel", more=_gpt2, epsilon=(layouts.LAYER, "layer_norm_epsilon"), bias=None),
    "qwen2": layouts.Layout("Qwen2ForCausalLM", bias=None),
    "qwen3": layouts.Layout("Qwen3ForCausalLM"),
    "qwen2moe": layouts.Layout(
        "Qwen2MoeForCausalLM",
        keys=f"{QWEN_EXPERTS} expert_shared_feed_forward_length=shared_expert_intermediate_size",
        more=layouts.qwen2_experts,
        bias=None,
    ),
    "qwen3moe": layouts.Layout("Qwen3MoeForCausalLM", keys=QWEN_EXPERTS, defaults={"norm_topk_prob": True}),
    "gpt-oss": layouts.Layout(
        "GptOssForCausalLM",
        names=layouts.layered("mlp_norm=post_attention_norm"),
        keys=f"{EXPERTS_USED} {WINDOW} expert_count=num_local_experts expert_feed_forward_length=intermediate_size",
        more=_gpt_oss,
    ),
    "gemma2": layouts.Layout(
        "Gemma2ForCausalLM", keys=f"{WINDOW} {_CAPPED} attn_logit_softcapping=attn_logit_softcapping", more=_gemma
    ),
    "gemma3": layouts.Layout("Gemma3ForCausalLM", keys=f"{WINDOW} {PATTERN} {_LOCAL_BASE} {_CAPPED}", more=_gemma3),
    "gemma3n": layouts.Layout(
        "Gemma3nForCausalLM",
        names=_INPUTS
        | _GEMMA3N
        | {f"streams.spread.{j}": TensorSource("altup_proj", fused=True) for j in range(1, MOST_STREAMS)}
        | {f"streams.merge.{j}": TensorSource("altup_unembd_proj", stacked=True) for j in range(1, MOST_STREAMS)},
        keys=f"""
            {_INPUT_KEYS} activation_sparsity_scale=_deviations altup.active_idx=altup_active_idx
            altup.num_inputs=altup_num_inputs
        """,
        more=_gemma3n,
        by_layer=True,
    ),
    "gemma4": layouts.Layout(
        "Gemma4ForCausalLM",
        names=_INPUTS
        | _GEMMA4
        | {
            "layers.{i}.stream": TensorSource("blk.{i}.layer_output_scale", wide=True),
            "layers.{i}.mlp.weight_scales": TensorSource("blk.{i}.ffn_down_exps_scale", wide=True),
        },
        keys=f"""
            {_INPUT_KEYS} attention.key_length_swa=_window_size attention.value_length_swa=_window_values
            expert_count=num_experts expert_feed_forward_length=moe_intermediate_size expert_used_count=top_k_experts
            rope.dimension_count_swa=_turns
        """,
        more=_gemma4,
        by_layer=True,
        turned=False,
    ),
    "phi3": layouts.Layout("Phi3ForCausalLM", names=layouts.FUSED_UP, keys=WINDOW, share="partial_rotary_factor"),
    "command-r": layouts.Layout(
        "CohereForCausalLM",
        neighbours=True,
        keys="logit_scale=logit_scale",
        present="use_qk_norm=attn_q_norm.weight",
        epsilon=(layouts.LAYER, "layer_norm_eps"),
    ),
    "cohere2": layouts.Layout(
        "Cohere2ForCausalLM",
        neighbours=True,
        keys=f"{WINDOW} {PATTERN} logit_scale=logit_scale",
        epsilon=(layouts.LAYER, "layer_norm_eps"),
    ),
    "glm4": layouts.Layout("Glm4ForCausalLM", names=layouts.FUSED_UP, neighbours=True, share="partial_rotary_factor"),
    "gptneox": layouts.Layout(
        "GPTNeoXForCausalLM",
        keys="use_parallel_residual=use_parallel_residual",
        epsilon=(layouts.LAYER, "layer_norm_eps"),
        theta="rotary_emb_base",
        share="rotary_pct",
    ),
    "starcoder2": layouts.Layout("Starcoder2ForCausalLM", epsilon=(layouts.LAYER, "norm_epsilon"), bias="use_bias"),
    "olmo2": layouts.Layout("Olmo2ForCausalLM", keys=f"{WINDOW} {PATTERN}", more=_olmo),
    "granite": layouts.Layout("GraniteForCausalLM", neighbours=True, keys=GRANITE_KEYS),
    "hunyuan-dense": layouts.Layout("HunYuanDenseV1ForCausalLM"),
    "smollm3": layouts.Layout("SmolLM3ForCausalLM", neighbours=True),
    "exaone4": layouts.Layout("Exaone4ForCausalLM", keys=f"{WINDOW} {PATTERN}", defaults={"sliding_window": None}),
    "ernie4_5": layouts.Layout("Ernie4_5ForCausalLM", neighbours=True, bias="use_bias"),
    "internlm2": _LLAMA,
    "xverse": _LLAMA,
    "exaone": layouts.Layout("LlamaForCausalLM"),
    "arcee": layouts.Layout("ArceeForCausalLM", neighbours=True),
    "mistral3": layouts.Layout(
        "MistralForCausalLM",
        neighbours=True,
        keys="attention.temperature_scale=_beta",
        more=_mistral,
        bias=None,
        log_factor=1.0,
    ),
    "minicpm": layouts.Layout(
        "MiniCPMForCausalLM",
        neighbours=True,
        keys="embedding_scale=scale_emb logit_scale=_logits residual_scale=_residual",
        more=_minicpm,
    ),
    "qwen2vl": layouts.Layout("Qwen2ForCausalLM", keys=f"{SECTIONS}_in_turn", bias=None),
    "qwen3vl": layouts.Layout("Qwen3ForCausalLM", keys=f"{SECTIONS} n_deepstack_layers=_pictures"),
    "qwen3vlmoe": layouts.Layout(
        "Qwen3MoeForCausalLM",
        keys=f"{QWEN_EXPERTS} {SECTIONS} n_deepstack_layers=_pictures",
        defaults={"norm_topk_prob": True},
    ),
    "gemma": layouts.Layout("GemmaForCausalLM", fixed={"torch_dtype": "bfloat16"}),
    "seed_oss": layouts.Layout("SeedOssForCausalLM", names=layouts.layered("mlp_norm=post_attention_norm")),
    "chatglm": layouts.Layout("GlmForCausalLM", names=layouts.FUSED_UP, neighbours=True, share="partial_rotary_factor"),
    "olmo": layouts.Layout("OlmoForCausalLM", neighbours=True, keys=CLAMP, epsilon=(layouts.LAYER, "_eps")),
    "olmoe": layouts.Layout("OlmoeForCausalLM", keys=f"{QWEN_EXPERTS} {CLAMP}"),
    "granitemoe": layouts.Layout(
        "GraniteMoeForCausalLM",
        neighbours=True,
        keys=f"""
            {GRANITE_KEYS} {EXPERTS_USED} expert_count=num_local_experts
            expert_shared_feed_forward_length=shared_intermediate_size
        """,
        more=_granite,
    ),
    "stablelm": layouts.Layout(
        "StableLmForCausalLM",
        keys="use_parallel_residual=use_parallel_residual",
        epsilon=(layouts.LAYER, "layer_norm_eps"),
        share="partial_rotary_factor",
        bias="use_qkv_bias",
    ),
    "nemotron": layouts.Layout(
        "NemotronForCausalLM", epsilon=(layouts.LAYER, "norm_eps"), share="partial_rotary_factor"
    ),
    "apertus": layouts.Layout(
        "ApertusForCausalLM",
        names={f"layers.{{i}}.mlp.act.{one}": TensorSource(f"blk.{{i}}.xielu_{one}", wide=True) for one in XIELU},
        listed={f"xielu.{one}": f"blk.{{i}}.xielu_{one}" for one in XIELU},
    ),
    **dict.fromkeys(
        ("bitnet-b1.58", "bitnet-25"),
        layouts.Layout(
            "BitNetForCausalLM", names=layouts.layered("attention.out_norm=attn_sub_norm mlp.down_norm=ffn_sub_norm")
        ),
    ),
    "jais2": layouts.Layout("Jais2ForCausalLM", epsilon=(layouts.LAYER, "layer_norm_eps")),
}
_MIXTRAL = layouts.Layout("MixtralForCausalLM", neighbours=True, keys=f"expert_count=num_local_experts {EXPERTS_USED}")


def layout_of(kind: str, tensors: Collection[str]) -> layouts.Layout | None:
    """The layout of an architecture's file with these tensors; None if Tokenwright reads no such files."""
    if kind == "llama" and "blk.0.ffn_gate_inp.weight" in tensors:
        return _MIXTRAL if "blk.0.ffn_gate_exps.weight" in tensors else replace(_MIXTRAL, names=layouts.EACH_EXPERT)
    layout = LAYOUTS.get(kind)
    if layout is None:
        return None
    if any(".ffn_gate_up_exps." in name for name in tensors):
        layout = replace(layout, names={**layout.names, **layouts.FUSED_EXPERTS})
    if "blk.0.attn_qkv.weight" in tensors and kind not in HYBRIDS:
        layout = replace(layout, names={**layout.names, **layouts.FUSED_QKV})
    whole = layout.latent and any(name.endswith(".attn_kv_b.weight") for name in tensors)
    return whole_kv(layout) if whole else layout
