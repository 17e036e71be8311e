"""Reads a model in a GGUF file: turns its metadata into keys of a config.json, which `parse_config` checks."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from tokenwright.checkpoints.families.family import Family, TensorSource, pairs
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.families.unsupported import NEEDS
from tokenwright.checkpoints.files.generation_config import GenerationDefaults, parse_generation
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.pooling import Pooling
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.file_layout import Layout, name_of, scores_of, shape_of, with_pictures
from tokenwright.checkpoints.gguf.header import BLOCKS, Header
from tokenwright.checkpoints.gguf.tensor_names import LAYOUTS, layout_of
from tokenwright.config import ModelConfig
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.models.graph import Graph

_MOST_PAIRS = 1 << 15  # the most pairs of dimensions in a head
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, Llama 3.1's rule written out
_STILL = 1e29  # a divisor this large stops the rotation
_LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_INERT_TENSORS = re.compile(  # derived from the metadata, or read with them
    r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?|.+\.input_scale"
)

_KV = re.compile(r"blk\.\d+\.attn_(?:[kv]|k_norm)\.(?:weight|bias)")  # inert in layers that read another layer's

# Our key of a config.json -> the key of the metadata, without its architecture.
_WHOLE: Mapping[str, str] = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}  # fmt: skip
_NEXT = "nextn_predict_layers"  # MTP layers, included in `block_count`
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "expert_count": ((0,), "experts"), "expert_used_count": ((0,), "experts"),
    "use_parallel_residual": ((False,), "a parallel residual"),
    "attention.causal": ((True,), "attention to later tokens"),
    "attention.sliding_window": ((0,), "a sliding window in this architecture"),
    "attention.scale": ((), "a scale of attention"), "logit_scale": ((1.0,), "a scale of the logits"),
    "expert_gating_func": ((1,), "another score of experts"),
    "expert_weights_scale": ((0.0, 1.0), "a scale of the experts' weights"),
    "expert_group_count": ((0, 1), "experts in groups"), "expert_group_used_count": ((0, 1), "experts in groups"),
    "embedding_scale": ((1.0,), "a scale of the embeddings"),
    "residual_scale": ((1.0,), "a scale of residual additions"),
}  # fmt: skip
_INERT = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "rope.dimension_sections"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
)
_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_ADVICE = "Tokenwright cannot tell whether that changes the arithmetic: the model needs a newer Tokenwright"

SAMPLING: Mapping[str, str] = {  # general.sampling -> generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufModel:
    config: ModelConfig
    graph: Graph
    generation: GenerationDefaults
    sources: Mapping[str, TensorSource]
    stored: Mapping[str, Stored]
    pooling: Pooling | None
    layout: Family
    following: Mapping[str, Stored]


def read_model(header: Header, where: str, factors: Callable[[Stored], list[float]]) -> GgufModel:
    """The model of a header. `factors` reads an F32 tensor."""
    layout = _layout(header, where)
    _, config, graph = parse_config(_settings(header, layout, where, factors), where)
    family = layout.family
    sources = family.sources(graph)
    wanted = {one.name for one in sources.values()}
    tensors = {name: one for name, one in header.tensors.items() if not _INERT_TENSORS.fullmatch(name)}
    for name in [one for one in tensors if one.endswith(".scale") and name_of(one) not in wanted]:
        weight = name.removesuffix("scale") + "weight"
        if (of := tensors.get(weight)) is None or of.dtype not in BLOCKS:
            continue
        scale, counts = tensors.pop(name), {1, of.shape[0] if len(of.shape) > 2 else 1}
        if scale.dtype != "F32" or math.prod(scale.shape) not in counts or of.scale is not None:
            told = f"{where}: {name} must be one F32 number for {weight}, or for each of its experts"
            raise CheckpointError(f"{told}; {fetch_again(Path(where))}")
        tensors[weight] = replace(of, scale=scale)  # NVFP4's, of a matrix or of each expert
    every = {name_of(name): replace(one, shape=shape_of(name_of(name), one.shape)) for name, one in tensors.items()}
    every |= _of_lists(header, layout)
    prefix = f"{header.metadata['general.architecture']}."
    layers = header.metadata[f"{prefix}block_count"] - header.metadata.get(f"{prefix}{_NEXT}", 0)
    own = layers - config.kv_shared
    stored = {name: one for name, one in every.items() if _block(name) < (own if _KV.fullmatch(name) else layers)}
    following = {name: one for name, one in every.items() if _block(name) >= layers}
    about = {"bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id")}
    ends = [header.metadata[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}") in header.metadata]
    generation = parse_generation(_suggested(header.metadata) | {"eos_token_id": ends}, about, where)
    pooling = _POOLINGS.get(header.metadata.get(f"{prefix}pooling_type", 0))
    return GgufModel(config, graph, generation, sources, stored, pooling, family, following)


def _of_lists(header: Header, layout: Layout) -> dict[str, Stored]:
    return {
        f"{name.format(i=i)}.weight": replace(one, shape=(1,), start=one.start + 4 * i, nbytes=4)
        for key, name in layout.listed.items()
        if (one := header.listed.get(key)) is not None
        for i in range(one.shape[0])
    }


def _layout(header: Header, where: str) -> Layout:
    every = JsonKeys(header.metadata, where)
    kind = every.text("general.architecture")
    layout = layout_of(kind, header.tensors)
    if layout is None:
        need = NEEDS.get(kind)
        why = f"needs {need}, which Tokenwright lacks" if need else "is none that Tokenwright knows"
        raise every.error(f"the architecture {shown(kind)} {why}. It reads {', '.join(sorted(LAYOUTS))}")
    if "token_embd.weight" not in header.tensors:
        raise every.error("it has no token_embd.weight: a vocabulary or an adapter, not a model")
    return layout


def _settings(header: Header, layout: Layout, where: str, factors: Callable[[Stored], list[float]]) -> dict[str, Any]:
    prefix, tensors = f"{header.metadata['general.architecture']}.", header.tensors
    given = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    for key in () if layout.by_layer else ("attention.head_count", "feed_forward_length"):
        if isinstance(each := given.get(key), list) and len(set(each)) == 1:  # of each layer
            given[key] = each[0]
    keys, renamed = JsonKeys(given, where), pairs(layout.keys)
    for key, (allowed, why) in _NEUTRAL.items():
        if key not in renamed:
            keys.only(key, *allowed, why=why)
    heads, width = keys.whole("attention.head_count", least=0) or 1, keys.whole("embedding_length")
    size = keys.whole("attention.key_length", width // heads)
    turns = keys.whole("rope.dimension_count", size)
    following = keys.whole(_NEXT, 0, least=0, most=keys.whole("block_count") - 1)
    listed = keys.raw("attention.head_count_kv")
    shared = heads if layout.by_layer and isinstance(listed, list) else _kv_heads(keys, heads)
    values = keys.whole("attention.value_length", size)
    odd = values != size or not 0 < turns <= size or (turns < size and not layout.share)
    if odd and not layout.latent:
        raise keys.error(f"heads of K have {size}, of V {values}, and {turns} turn; Tokenwright lacks that")
    if ROPE_FACTORS in tensors and tensors[ROPE_FACTORS].shape[0] != size // 2:
        raise CheckpointError(f"{where}: {ROPE_FACTORS} has not {size // 2} factors; {fetch_again(Path(where))}")
    found = {ours: keys.whole(theirs, least=0) for ours, theirs in _WHOLE.items()} | {
        "num_hidden_layers": keys.whole("block_count") - following,
        "intermediate_size": _width(keys, layout),
        "architectures": [layout.model],
        "num_key_value_heads": shared,
        "_kv_heads": listed[: len(listed) - following] if isinstance(listed, list) else listed,
        "head_dim": size,
        layout.epsilon[1]: _shortest(keys.number(layout.epsilon[0])),
        layout.theta: _shortest(keys.number("rope.freq_base", 10000.0, above=1.0)),
        "rope_scaling": _scaling(keys, header, layout, factors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if layout.share is not None:
        found[layout.share] = math.nextafter(turns / size, 1)  # the product with the size is not below `turns`
    if layout.bias is not None:
        found[layout.bias] = bool(tensors.keys() & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"})
    for theirs, ours in renamed.items():
        if (value := keys.raw(theirs)) is not None:
            found |= _converted(ours, value)
    keys.finish(_INERT, _ADVICE)
    endings = pairs(layout.present).items()
    found |= {key: any(name.endswith(f".{ending}") for name in tensors) for key, ending in endings}
    try:
        if layout.scores is not None:
            found[layout.scores] = scores_of(found, "sigmoid")
        return layout.more(with_pictures({**layout.defaults, **found, **layout.fixed}), tensors)
    except (TypeError, LookupError, ArithmeticError):
        lacks = "its metadata lack a value, or have one of a wrong kind"
        raise keys.error(f"{lacks}; {fetch_again(Path(where))}") from None


def _width(keys: JsonKeys, layout: Layout) -> int:
    key, widths = "feed_forward_length", keys.raw("feed_forward_length")
    if not layout.by_layer or not isinstance(widths, list):
        return keys.whole(key, keys.raw("expert_feed_forward_length"), least=0)
    given = [one for one in widths if one] or [0]  # layers without an MLP have 0
    if len(widths) != keys.whole("block_count") or not all(type(one) is int and one > 0 for one in given):
        raise keys.error(f"{key} must list a width for each layer")
    return int(given[0])


def _block(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _kv_heads(keys: JsonKeys, heads: int) -> int:
    """The number of KV heads. Hybrids have a list, with 0 for a layer without attention."""
    listed = keys.raw("attention.head_count_kv")
    if not isinstance(listed, list):
        return keys.whole("attention.head_count_kv", heads)
    counts = {one for one in listed if one}
    if len(listed) != keys.whole("block_count") or len(counts) > 1 or not all(type(one) is int for one in listed):
        raise keys.error("attention.head_count_kv must list one number, or 0, for each layer")
    return int(counts.pop()) if counts else heads


def _converted(key: str, value: Any) -> dict[str, Any]:
    """A value of the metadata as config.json has it. A pattern of windows may be a list, with a flag a layer."""
    if key == "sliding_window" and value == 0:
        return {key: None}
    if key == "sliding_window_pattern" and isinstance(value, list):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in value]}
    return {key: _plain(value)}


def _plain(value: Any) -> Any:
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    """The shortest decimal for this float32, as in the original config: 1e-05 for 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


def _scaling(
    keys: JsonKeys, header: Header, layout: Layout, factors: Callable[[Stored], list[float]]
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    if all(name in header.tensors for name in _LONG_FACTORS.values()):
        return _longrope(keys, header, factors)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
    keys.only("rope.scaling.attn_factor", 1.0, why="another attention factor")
    logged = keys.number("rope.scaling.yarn_log_multiplier", 0.0, least=0.0)
    if layout.log_factor is None:
        keys.only("rope.scaling.yarn_log_multiplier", 0.0, why="another attention factor")
    keys.only("rope.scaling.yarn_ext_factor", 1.0, why="another mix of frequencies")
    if kind not in ("none", "linear", "yarn"):
        raise keys.error(f"rope.scaling.type is {shown(kind)}; Tokenwright reads none, linear and yarn")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise keys.error(f"it has {ROPE_FACTORS} and rope.scaling.type {kind}; Tokenwright reads one of them")
        listed = _listed(keys, header, ROPE_FACTORS, factors)
        still = sum(one >= _STILL for one in listed)
        if still and listed == [1.0] * (len(listed) - still) + [listed[-1]] * still:
            return {"rope_type": "proportional", "partial_rotary_factor": 1 - still / len(listed)}
        return _llama3(keys, listed)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    others = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    values = ((ours, keys.raw(f"rope.scaling.{theirs}")) for ours, theirs in others.items())
    given = {ours: _plain(value) for ours, value in values if value is not None}
    if layout.log_factor is not None:  # attention has a factor, the rotation none
        whole = round(logged * layout.log_factor, 6)
        given |= {"mscale": whole, "mscale_all_dim": whole} if whole else {"attention_factor": 1.0}
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **given}


def _listed(keys: JsonKeys, header: Header, name: str, factors: Callable[[Stored], list[float]]) -> list[float]:
    stored = header.tensors[name]
    if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MOST_PAIRS:
        raise keys.error(f"{name} is {stored.dtype} {list(stored.shape)}, not a list of F32 factors")
    return factors(stored)


def _longrope(keys: JsonKeys, header: Header, factors: Callable[[Stored], list[float]]) -> dict[str, Any]:
    """LongRoPE's scaling, whose factors are tensors. The attention factor is left out if the contexts give it."""
    if keys.text("rope.scaling.type", "longrope") not in ("none", "longrope"):
        raise keys.error(f"it has rope_factors_long.weight and rope.scaling.type {keys.text('rope.scaling.type')}")
    context, original = keys.whole("context_length"), keys.whole("rope.scaling.original_context_length", least=2)
    found = {key: _listed(keys, header, name, factors) for key, name in _LONG_FACTORS.items()}
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    usual = math.sqrt(1 + math.log(max(1.0, context / original)) / math.log(original))
    given = {} if math.isclose(attention, usual, rel_tol=1e-5) else {"attention_factor": attention}
    return {"rope_type": "longrope", "original_max_position_embeddings": original, **found, **given}


def _llama3(keys: JsonKeys, factors: list[float]) -> dict[str, Any]:
    """Llama 3.1's scaling, if it gives these factors with the constants of all its models; else the factors."""
    from tokenwright.config import Llama3Scaling
    from tokenwright.models.rotary import llama3_frequencies

    factor = max(factors, default=1.0)
    base, pairs = _shortest(keys.number("rope.freq_base", 10000.0, above=1.0)), len(factors)
    plain = numpy.array([base ** (-at / pairs) for at in range(pairs)], numpy.float64)
    scaled = llama3_frequencies(plain, Llama3Scaling(factor, 1.0, 4.0, 8192))
    if factor < 1 or not numpy.allclose(plain / scaled, numpy.array(factors, numpy.float64), rtol=1e-4):
        both = {"long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
        return both | {"rope_type": "longrope", "original_max_position_embeddings": keys.whole("context_length")}
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **bounds}


def _suggested(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "general.sampling."
    bare = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return {SAMPLING.get(key, key): _plain(value) for key, value in bare.items()}
