"""The contents of GGUF files by architecture: names of tensors, and the config keys that their metadata stand for.

llama.cpp rotates neighbouring dimensions of a head for some architectures, and its halves for the others; files of the
former hold the rows of q and k in that order. All experts of a layer are one tensor [experts, out, in].
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenwright.checkpoints.families.family import Family, TensorSource, named
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.models.graph import Graph

_RMS = "attention.layer_norm_rms_epsilon"
_LAYER = "attention.layer_norm_epsilon"
_WINDOW = {"attention.sliding_window": "sliding_window"}
_PATTERN = {"attention.sliding_window_pattern": "sliding_window_pattern"}
_EXPERTS_USED = {"expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    **_EXPERTS_USED,
}

_NAMES = named(
    {
        "embed": "token_embd",
        "positions": "position_embd",
        "norm": "output_norm",
        "head": "output",
        "layers.{i}.attention_norm": "blk.{i}.attn_norm",
        "layers.{i}.attention.q": "blk.{i}.attn_q",
        "layers.{i}.attention.k": "blk.{i}.attn_k",
        "layers.{i}.attention.v": "blk.{i}.attn_v",
        "layers.{i}.attention.o": "blk.{i}.attn_output",
        "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.attention.sinks": "blk.{i}.attn_sinks",
        "layers.{i}.attention_post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
        "layers.{i}.mlp.gate": "blk.{i}.ffn_gate",
        "layers.{i}.mlp.up": "blk.{i}.ffn_up",
        "layers.{i}.mlp.down": "blk.{i}.ffn_down",
        "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
        "layers.{i}.mlp.router": "blk.{i}.ffn_gate_inp",
        "layers.{i}.mlp.shared_gate": "blk.{i}.ffn_gate_inp_shexp",
    }
    | {f"layers.{{i}}.mlp.shared.{part}": f"blk.{{i}}.ffn_{part}_shexp" for part in ("gate", "up", "down")}
    | {
        f"layers.{{i}}.mlp.experts.{{e}}.{part}": TensorSource(f"blk.{{i}}.ffn_{part}_exps", stacked=True)
        for part in ("gate", "up", "down")
    }
)
_FUSED_QKV = {
    f"layers.{{i}}.attention.{part}": TensorSource("blk.{i}.attn_qkv", fused=True) for part in ("q", "k", "v")
}
_FUSED_UP = {f"layers.{{i}}.mlp.{part}": TensorSource("blk.{i}.ffn_up", fused=True) for part in ("gate", "up")}
_EACH_EXPERT = named(
    {f"layers.{{i}}.mlp.experts.{{e}}.{part}": f"blk.{{i}}.ffn_{part}.{{e}}" for part in ("gate", "up", "down")}
)
_STACKS = re.compile(r"blk\.\d+\.(?:ffn_(?:gate|up|down)_exps\.(?:weight|bias)|attn_[qk]_norm\.weight)")
_FAMILY = Family({}, LLAMA.parse, "", {}, re.compile(r"(?!)"), stacks=_STACKS)  # of names alone
_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")  # a vector in the file, a matrix of one row in a graph


Found = dict[str, Any]  # keys of a config.json


def _nothing(found: Found, _: Mapping[str, Stored]) -> Found:
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one architecture.

    model: what transformers calls it. names: of tensors, where they are not Llama's. neighbours: whether llama.cpp
    rotates neighbouring dimensions. keys: of the metadata, and the keys of a config.json that they stand for. more:
    what follows from those and the file's tensors by llama.cpp's rules. epsilon, theta, share: the same for the epsilon
    of norms, the rotary base, and the share of a head's dimensions that turn (None: all do). bias: the key that says
    whether there are biases (None: the architecture decides).
    """

    model: str
    names: Mapping[str, TensorSource] = field(default_factory=dict)
    neighbours: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Found, Mapping[str, Stored]], Found] = _nothing
    epsilon: tuple[str, str] = (_RMS, "rms_norm_eps")
    theta: str = "rope_theta"
    share: str | None = None
    bias: str | None = "attention_bias"

    def sources(self, graph: Graph) -> dict[str, TensorSource]:
        """Where a file stores the tensors of `graph.shapes`."""
        return replace(_FAMILY, names={**_NAMES, **self.names}, neighbours=self.neighbours).sources(graph)


def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor of a file is read with: experts and heads are rows of one matrix."""
    return (1, *shape) if _ROW.fullmatch(name) and len(shape) == 1 else _FAMILY.shape_of(name, shape)


def _gemma(found: Found, _: Mapping[str, Stored]) -> Found:
    """Scores are scaled by the head's size, but in the 27B models by the width of a head's share of the model.

    Every published Gemma is bfloat16, so its embeddings are scaled by the root of the width in that dtype.
    """
    deepest = 46 if found["architectures"] == ["Gemma2ForCausalLM"] else 62
    share = found["hidden_size"] / found["num_attention_heads"]
    scalar = share if found["num_hidden_layers"] == deepest else found["head_dim"]
    return {**found, "query_pre_attn_scalar": scalar, "torch_dtype": "bfloat16"}


def _gemma3(found: Found, tensors: Mapping[str, Stored]) -> Found:
    """Without a window in the metadata, all layers have full attention."""
    return _gemma(found if "sliding_window" in found else {**found, "sliding_window_pattern": 1}, tensors)


def _phi3(found: Found, _: Mapping[str, Stored]) -> Found:
    return {**found, "sliding_window": found.get("sliding_window") or None}  # 0 means none


def _gpt_oss(found: Found, _: Mapping[str, Stored]) -> Found:
    scaling = found["rope_scaling"]
    return {**found, "rope_scaling": scaling and {**scaling, "truncate": False}}


def _qwen2_experts(found: Found, tensors: Mapping[str, Stored]) -> Found:
    """The first files lack the widths of experts."""
    widths = {
        key: tensors[f"blk.0.ffn_gate_{name}.weight"].shape[-2]
        for key, name in (("moe_intermediate_size", "exps"), ("shared_expert_intermediate_size", "shexp"))
        if f"blk.0.ffn_gate_{name}.weight" in tensors
    }
    return {**widths, **found}


def _qwen3_experts(found: Found, _: Mapping[str, Stored]) -> Found:
    return {"norm_topk_prob": True, **found}


def _cohere(found: Found, tensors: Mapping[str, Stored]) -> Found:
    return {**found, "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


def _olmo(found: Found, _: Mapping[str, Stored]) -> Found:
    """OLMo 3 is OLMo 2 with windows."""
    return {**found, "architectures": ["Olmo3ForCausalLM"]} if "sliding_window" in found else found


def _neox(found: Found, _: Mapping[str, Stored]) -> Found:
    return {key: value for key, value in found.items() if key not in ("head_dim", "num_key_value_heads")}


_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


def _gpt2(found: Found, _: Mapping[str, Stored]) -> Found:
    """GPT-2 has names of its own for its sizes, and no rotation."""
    same = ("architectures", "layer_norm_epsilon", "vocab_size", "tie_word_embeddings")
    return {key: found[key] for key in same} | {ours: found[key] for ours, key in _GPT2_KEYS.items()}


def _exaone4(found: Found, _: Mapping[str, Stored]) -> Found:
    return {"sliding_window": None, **found}


LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout("LlamaForCausalLM", neighbours=True),
    "gpt2": Layout("GPT2LMHeadModel", names=_FUSED_QKV, more=_gpt2, epsilon=(_LAYER, "layer_norm_epsilon"), bias=None),
    "qwen2": Layout("Qwen2ForCausalLM", bias=None),
    "qwen3": Layout("Qwen3ForCausalLM"),
    "qwen2moe": Layout(
        "Qwen2MoeForCausalLM",
        keys={**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        more=_qwen2_experts,
        bias=None,
    ),
    "qwen3moe": Layout("Qwen3MoeForCausalLM", keys=_QWEN_EXPERTS, more=_qwen3_experts),
    "gpt-oss": Layout(
        "GptOssForCausalLM",
        names=named({"layers.{i}.mlp_norm": "blk.{i}.post_attention_norm"}),
        keys={
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            **_EXPERTS_USED,
            **_WINDOW,
        },
        more=_gpt_oss,
    ),
    "gemma2": Layout(
        "Gemma2ForCausalLM",
        keys={
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=_gemma,
    ),
    "gemma3": Layout(
        "Gemma3ForCausalLM",
        keys={
            **_WINDOW,
            **_PATTERN,
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=_gemma3,
    ),
    "phi3": Layout(
        "Phi3ForCausalLM",
        names=_FUSED_QKV | _FUSED_UP,
        keys=_WINDOW,
        more=_phi3,
        share="partial_rotary_factor",
    ),
    "command-r": Layout(
        "CohereForCausalLM",
        neighbours=True,
        keys={"logit_scale": "logit_scale"},
        more=_cohere,
        epsilon=(_LAYER, "layer_norm_eps"),
    ),
    "cohere2": Layout(
        "Cohere2ForCausalLM",
        neighbours=True,
        keys={**_WINDOW, **_PATTERN, "logit_scale": "logit_scale"},
        epsilon=(_LAYER, "layer_norm_eps"),
    ),
    "glm4": Layout("Glm4ForCausalLM", names=_FUSED_UP, neighbours=True, share="partial_rotary_factor"),
    "gptneox": Layout(
        "GPTNeoXForCausalLM",
        names=_FUSED_QKV,
        keys={"use_parallel_residual": "use_parallel_residual"},
        more=_neox,
        epsilon=(_LAYER, "layer_norm_eps"),
        theta="rotary_emb_base",
        share="rotary_pct",
    ),
    "starcoder2": Layout("Starcoder2ForCausalLM", epsilon=(_LAYER, "norm_epsilon"), bias="use_bias"),
    "olmo2": Layout("Olmo2ForCausalLM", keys={**_WINDOW, **_PATTERN}, more=_olmo),
    "granite": Layout(
        "GraniteForCausalLM",
        neighbours=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "smollm3": Layout("SmolLM3ForCausalLM", neighbours=True),
    "exaone4": Layout("Exaone4ForCausalLM", keys={**_WINDOW, **_PATTERN}, more=_exaone4),
    "ernie4_5": Layout("Ernie4_5ForCausalLM", neighbours=True, bias="use_bias"),
}
_MIXTRAL = Layout(
    "MixtralForCausalLM", neighbours=True, keys={"expert_count": "num_local_experts", **_EXPERTS_USED}
)  # fmt: skip


def layout_of(kind: str, tensors: Collection[str]) -> Layout | None:
    """The layout of an architecture's file with these tensors; None if Tokenwright reads no such files."""
    if kind == "llama" and "blk.0.ffn_gate_inp.weight" in tensors:
        return _MIXTRAL if "blk.0.ffn_gate_exps.weight" in tensors else replace(_MIXTRAL, names=_EACH_EXPERT)
    return LAYOUTS.get(kind)
