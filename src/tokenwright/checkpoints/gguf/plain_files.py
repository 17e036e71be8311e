"""GGUF files of models whose tensors have Llama's names, or nearly."""

from collections.abc import Mapping

from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.file_layout import (
    CLAMP,
    EXPERTS_USED,
    FUSED_UP,
    GRANITE_KEYS,
    LAYER,
    QWEN_EXPERTS,
    SECTIONS,
    Found,
    Layout,
    layered,
    qwen3_experts,
)
from tokenwright.models.op import XIELU


def _gemma(found: Found, _: Mapping[str, Stored]) -> Found:
    """Every published Gemma is bfloat16, so its embeddings are scaled by the root of the width in that dtype."""
    return {**found, "torch_dtype": "bfloat16"}


def _mistral(found: Found, _: Mapping[str, Stored]) -> Found:
    """Ministral 3 scales queries beyond the original context; llama.cpp has no windows for either."""
    model, scaling = "MistralForCausalLM", found["rope_scaling"]
    if "_beta" in found:
        model, scaling = "Ministral3ForCausalLM", {**scaling, "llama_4_scaling_beta": found["_beta"]}
    return {**found, "architectures": [model], "rope_scaling": scaling, "sliding_window": None}


def _minicpm(found: Found, _: Mapping[str, Stored]) -> Found:
    """Its factors as folders have them; the first files have none, and the factors of MiniCPM 2B."""
    depth = found["num_hidden_layers"] ** 0.5
    return {"scale_emb": 12.0, **found} | {
        "dim_model_base": round(found["hidden_size"] / found["_logits"]) if "_logits" in found else 256,
        "scale_depth": round(found["_residual"] * depth, 5) if "_residual" in found else 1.4,
    }


def _granite(found: Found, _: Mapping[str, Stored]) -> Found:
    shared = "shared_intermediate_size" in found
    return {**found, "architectures": ["GraniteMoeSharedForCausalLM"]} if shared else found


_LLAMA = Layout("LlamaForCausalLM", neighbours=True)
PLAIN_FILES: Mapping[str, Layout] = {
    "internlm2": _LLAMA,
    "xverse": _LLAMA,
    "exaone": Layout("LlamaForCausalLM"),
    "arcee": Layout("ArceeForCausalLM", neighbours=True),
    "mistral3": Layout(
        "MistralForCausalLM",
        neighbours=True,
        keys="attention.temperature_scale=_beta",
        more=_mistral,
        bias=None,
        log_factor=1.0,
    ),
    "minicpm": Layout(
        "MiniCPMForCausalLM",
        neighbours=True,
        keys="embedding_scale=scale_emb logit_scale=_logits residual_scale=_residual",
        more=_minicpm,
    ),
    "qwen2vl": Layout("Qwen2ForCausalLM", keys=SECTIONS, bias=None),
    "qwen3vl": Layout("Qwen3ForCausalLM", keys=f"{SECTIONS} n_deepstack_layers=_pictures"),
    "qwen3vlmoe": Layout(
        "Qwen3MoeForCausalLM", keys=f"{QWEN_EXPERTS} {SECTIONS} n_deepstack_layers=_pictures", more=qwen3_experts
    ),
    "gemma": Layout("GemmaForCausalLM", more=_gemma),
    "seed_oss": Layout("SeedOssForCausalLM", names=layered("mlp_norm=post_attention_norm")),
    "chatglm": Layout("GlmForCausalLM", names=FUSED_UP, neighbours=True, share="partial_rotary_factor"),
    "olmo": Layout("OlmoForCausalLM", neighbours=True, keys=CLAMP, epsilon=(LAYER, "_eps")),
    "olmoe": Layout("OlmoeForCausalLM", keys=f"{QWEN_EXPERTS} {CLAMP}"),
    "granitemoe": Layout(
        "GraniteMoeForCausalLM",
        neighbours=True,
        keys=f"""
            {GRANITE_KEYS} {EXPERTS_USED} expert_count=num_local_experts
            expert_shared_feed_forward_length=shared_intermediate_size
        """,
        more=_granite,
    ),
    "stablelm": Layout(
        "StableLmForCausalLM",
        keys="use_parallel_residual=use_parallel_residual",
        epsilon=(LAYER, "layer_norm_eps"),
        share="partial_rotary_factor",
        bias="use_qkv_bias",
    ),
    "nemotron": Layout("NemotronForCausalLM", epsilon=(LAYER, "norm_eps"), share="partial_rotary_factor"),
    "apertus": Layout(
        "ApertusForCausalLM",
        names={f"layers.{{i}}.mlp.act.{one}": TensorSource(f"blk.{{i}}.xielu_{one}", wide=True) for one in XIELU},
        listed={f"xielu.{one}": f"blk.{{i}}.xielu_{one}" for one in XIELU},
    ),
    "jais2": Layout("Jais2ForCausalLM", epsilon=(LAYER, "layer_norm_eps")),
}
