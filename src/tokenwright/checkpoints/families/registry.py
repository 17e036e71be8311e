"""The families of models by architecture; `parse_config` makes a graph of ops of a config.json.

Absent keys take transformers' defaults (configuration_*.py). A key neither read nor known to be inert is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenwright.checkpoints.families import bart, deepseek, dense_rows, gemma, gemma3n, gemma4, mixture_rows
from tokenwright.checkpoints.families.family import Family, Parsed, TensorSource
from tokenwright.checkpoints.families.gpt2 import GPT2, OLDER
from tokenwright.checkpoints.families.hybrids import falcon_h1, kimi, lfm2, mamba, nemotron, qwen_next, selective
from tokenwright.checkpoints.families.llama import LLAMA
from tokenwright.checkpoints.families.unsupported import lacking_clause
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import read_table
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Deepstack, Graph
from tokenwright.models.op import Op

__all__ = ("FAMILIES", "GPT2", "LLAMA", "Parsed", "TensorSource", "parse_config")

FAMILIES = (
    *OLDER, *bart.DECODERS, *dense_rows.DENSE, *mixture_rows.MIXTURES, gemma.GEMMA2, gemma.GEMMA3, *dense_rows.COHERES,
    *deepseek.DEEPSEEKS, lfm2.LFM2, qwen_next.QWEN_NEXT, qwen_next.QWEN_DENSE, qwen_next.QWEN_MIXED,
    mamba.GRANITE_HYBRID, mamba.BAMBA, mamba.MAMBA2, lfm2.LFM2_MOE, nemotron.NEMOTRON, mamba.GRANITE_MOE, gemma.GEMMA,
    gemma.VAULT_GEMMA, qwen_next.OLMO_HYBRID, falcon_h1.FALCON_H1, mamba.GRANITE_MOE_SWA, selective.JAMBA,
    selective.MAMBA, selective.FALCON_MAMBA, kimi.KIMI_LINEAR, gemma4.GEMMA4, gemma4.GEMMA4_UNIFIED, gemma3n.GEMMA3N,
    qwen_next.LARA_MINI, lfm2.LFM3,
)  # fmt: skip

# Keys that some families read; for others the value after "=" has no effect, and any other needs the named operation.
_REFUSED = read_table("refused", Path(__file__).with_suffix(".txt"))

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
    """The graph of a config. Raises CheckpointError for an unknown architecture, an unknown key or a bad value."""
    found = text_keys(config, where)
    named = {key: one for key, one in found.items() if key == "_remove_final_layer_norm" or not key.startswith("_")}
    keys = JsonKeys(named, where)  # without _name_or_path and the like
    family, architecture = _find(keys)
    parsed, graph = family.parse(keys, architecture)
    vision = config.get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    if isinstance(deep, list) and deep:
        graph = _with_deepstack(graph, len(deep))
    for entry, why in _REFUSED.items():
        key, _, allowed = entry.partition("=")
        if not keys.was_read(key):
            keys.only(key, *([json.loads(allowed)] if allowed else []), why=why)
    keys.finish(_INERT, _ADVICE)
    return Parsed(family, parsed, graph)


def family_of(architecture: str) -> Family:
    return next(family for family in FAMILIES if architecture in family.architectures)


def text_keys(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The keys of the text model: text_config's before the outer ones. Raises CheckpointError if it is no object."""
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
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise keys.error("architectures must be a list of names")
    kind = keys.text("model_type", "")
    if not listed and not kind:
        raise keys.error('it names no architecture; add architectures, such as ["LlamaForCausalLM"], or model_type')
    lowered = {one.lower() for one in listed}  # LLaMAForCausalLM, as the first files said
    found = next((one for one in known if one.lower() in lowered), listed[0] if listed else None)
    if found and found not in known and found.endswith("Model"):  # without a head, or with one beside
        found = kinds.get(kind, found)
    name = found or kinds.get(kind, f"of model_type {kind!r}")
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
