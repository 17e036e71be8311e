"""The families of models by architecture; `parse_config` makes a graph of ops of a config.json.

Absent keys take transformers' defaults (configuration_*.py). A key neither read nor known to be inert is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenwright.checkpoints.families.cohere import COHERE, COHERE2, COMPASS
from tokenwright.checkpoints.families.deepseek import DEEPSEEKS
from tokenwright.checkpoints.families.dense_rows import DENSE
from tokenwright.checkpoints.families.family import Family, Parsed, TensorSource
from tokenwright.checkpoints.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from tokenwright.checkpoints.families.gemma3n import GEMMA3N
from tokenwright.checkpoints.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from tokenwright.checkpoints.families.gpt2 import GPT2, OLDER
from tokenwright.checkpoints.families.hybrids.falcon_h1 import FALCON_H1
from tokenwright.checkpoints.families.hybrids.kimi import KIMI_LINEAR
from tokenwright.checkpoints.families.hybrids.lfm2 import LFM2, LFM2_MOE, LFM3
from tokenwright.checkpoints.families.hybrids.mamba import BAMBA, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SWA, MAMBA2
from tokenwright.checkpoints.families.hybrids.nemotron import NEMOTRON
from tokenwright.checkpoints.families.hybrids.qwen_next import LARA_MINI, OLMO_HYBRID, QWEN_DENSE, QWEN_MIXED, QWEN_NEXT
from tokenwright.checkpoints.families.hybrids.selective import FALCON_MAMBA, JAMBA, MAMBA
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.mixture_rows import MIXTURES
from tokenwright.checkpoints.families.unsupported import lacking_clause
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import read_table
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Deepstack, Graph
from tokenwright.models.op import Op

__all__ = ("FAMILIES", "GPT2", "LLAMA", "Parsed", "TensorSource", "parse_config")

FAMILIES = (
    *OLDER, *DENSE, *MIXTURES, GEMMA2, GEMMA3, COHERE, COHERE2, *DEEPSEEKS, LFM2, QWEN_NEXT, QWEN_DENSE, QWEN_MIXED,
    GRANITE_HYBRID, BAMBA, MAMBA2, LFM2_MOE, NEMOTRON, GRANITE_MOE, GEMMA, VAULT_GEMMA, OLMO_HYBRID, FALCON_H1,
    GRANITE_MOE_SWA, JAMBA, MAMBA, FALCON_MAMBA, KIMI_LINEAR, GEMMA4, GEMMA4_UNIFIED, GEMMA3N, COMPASS, LARA_MINI,
    LFM3,
)  # fmt: skip

# Keys that some families read; elsewhere only these values, which change nothing. Others need the named operation.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "add_cross_attention": ((False,), "cross-attention"),
    "compression_config": ((), "quantised weights"),
    "full_attn_mod": ((1,), "attention that differs from layer to layer"),
    "interpolate_factor": ((1,), "interpolated positions"),
    "is_encoder_decoder": ((False,), "an encoder"),
    "lm_head_bias": ((False,), "a bias of the head"),
    "embedding_multiplier": ((1.0,), "scaled embeddings"),
    "is_causal": ((True,), "attention to later tokens"),
    "logit_scale": ((1.0,), "scaled logits"),
    "logits_scaling": ((1.0,), "scaled logits"),
    "pruned_heads": (({},), "pruned heads"),
    "quantization_config": ((), "quantised weights"),
    "residual_multiplier": ((1.0,), "scaled results of attention and MLP"),
    "rope_interleaved": ((False,), "rotation of neighbouring dimensions"),
    "routed_scaling_factor": ((1.0,), "scaled weights of experts"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scaled by the layer"),
    "scale_attn_weights": ((True,), "attention without scaling"),
    "sparse_config": ((), "attention to chosen blocks of tokens"),
    "use_mrope": ((False,), "multimodal rotary positions"),
    "use_qk_norm": ((False,), "norms of q and k"),
    "use_rope": ((True,), "attention without positions"),
}

# Keys that do not affect the logits, or (reorder_and_upcast_attn, the two softmax_in_fp32) only their rounding.
_INERT = frozenset(read_table("inert", Path(__file__).with_suffix(".txt")))
_BESIDE = ("text_config", "vision_config", "audio_config", "vq_config")
# Models that add a vision tower to a text model of any family, whose config is the inner one.
_WRAPPERS = frozenset(("llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "internvl", "lfm2_vl"))
_DEFAULT_TEXT = {"llava": "llama", "idefics3": "llama", "smolvlm": "llama", "internvl": "qwen2", "lfm2_vl": "lfm2"}
_ADVICE = (
    "Tokenwright cannot tell whether that changes the arithmetic. If it does not, remove it from "
    "config.json; if it does, the model needs a newer Tokenwright"
)


def parse_config(config: Mapping[str, Any], where: str = "config.json") -> Parsed:
    """Raises CheckpointError for an unknown architecture, an unknown key or a bad value."""
    found = text_keys(config, where)
    named = {key: one for key, one in found.items() if key == "_remove_final_layer_norm" or not key.startswith("_")}
    keys = JsonKeys(named, where)  # without _name_or_path and the like
    family, architecture = _find(keys)
    parsed, graph = family.parse(keys, architecture)
    vision = config.get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    if isinstance(deep, list) and deep:
        graph = _with_deepstack(graph, len(deep))
    for key, (allowed, why) in _REFUSED.items():
        if not keys.was_read(key):
            keys.only(key, *allowed, why=why)
    keys.finish(_INERT, _ADVICE)
    return Parsed(family, parsed, graph)


def family_of(architecture: str) -> Family:
    return next(family for family in FAMILIES if architecture in family.architectures)


def text_keys(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The keys of the text model: text_config's over the outer ones. Raises CheckpointError if it is no object."""
    inner = {} if config.get("text_config") is None else config["text_config"]
    if not isinstance(inner, dict):
        raise CheckpointError(f"{where}: text_config must be an object, not a {type(inner).__name__}")
    if inner and config.get("model_type") in _WRAPPERS:
        outer = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in config}
        own = {key: value for key, value in inner.items() if key != "architectures"}
        return outer | {"model_type": _DEFAULT_TEXT.get(str(config["model_type"]))} | own
    outer = {key: value for key, value in config.items() if key not in _BESIDE}
    return outer | {key: value for key, value in inner.items() if key not in ("architectures", "model_type")}


def _with_deepstack(graph: Graph, count: int) -> Graph:
    blocks: list[Op] = []
    done = 0
    for op in graph.blocks:
        blocks.append(op)
        if 1 in op.halves and done < count:
            blocks.append(Deepstack(done))
            done += 1
    return replace(graph, blocks=tuple(blocks))


def _find(keys: JsonKeys) -> tuple[Family, str]:
    known = {name: family for family in FAMILIES for name in family.architectures}
    kinds = {kind: name for family in FAMILIES for name, kind in family.architectures.items()}
    listed = keys.raw("architectures") or []
    if not isinstance(listed, list) or len(listed) > 1 or not all(isinstance(name, str) for name in listed):
        raise keys.error("architectures must be a list of one name")
    kind = keys.text("model_type", "")
    if not listed and not kind:
        raise keys.error('it names no architecture; add architectures, such as ["LlamaForCausalLM"], or model_type')
    name = listed[0] if listed else kinds.get(kind, f"of model_type {kind!r}")
    if (name, kind) == ("LlamaForCausalLM", "exaone"):  # as transformers 5 saves it, with its own names of tensors
        name = kinds[kind]
    if name not in known:
        raise keys.error(
            f"unknown architecture {name}; {lacking_clause(keys, name)}. Tokenwright runs {', '.join(known)}"
        )
    family = known[name]
    if kind in kinds and kind.removesuffix("_text") != family.architectures[name].removesuffix("_text"):
        raise keys.error(f"model_type {kind!r} does not belong to {name}, but to {kinds[kind]}; correct config.json")
    return family, name
