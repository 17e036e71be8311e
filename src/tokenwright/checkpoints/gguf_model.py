"""A model in a GGUF file: its metadata as the keys of a config.json, its tensors' names, its generation defaults.

The metadata are translated to the keys that transformers uses and then read by `parse_config`, so that both kinds of
checkpoints have the same checks. llama.cpp rotates neighbouring rows of a head; we rotate its two halves, as
transformers does. Files of the architecture llama hold the rows of q and k in the former order; they are put back.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenwright.checkpoints.families import Source, parse_config
from tokenwright.checkpoints.family import head_order
from tokenwright.checkpoints.generation import parse_generation
from tokenwright.checkpoints.gguf import Header
from tokenwright.checkpoints.safetensors import Stored
from tokenwright.checkpoints.strict import Keys, shown
from tokenwright.config import GenerationDefaults, ModelConfig
from tokenwright.errors import CheckpointError, fetch_again
from tokenwright.models.graph import Graph

_MOST_PAIRS = 1 << 15  # of dimensions in a head
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, Llama 3.1's rule written out
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_INERT_TENSORS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")  # derived from the metadata
PAIRED = "llama"  # the architecture whose q and k rows lie in pairs
ROWS_PAIRED = re.compile(r"layers\.\d+\.attention\.[qk]\.(weight|bias)")  # our names of these rows

_NAMES: Mapping[str, str] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}

# Our key of a config.json -> the key of the metadata, without its architecture.
_WHOLE: Mapping[str, str] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "expert_count": ((0,), "experts"),
    "expert_used_count": ((0,), "experts"),
    "use_parallel_residual": ((False,), "a parallel residual"),
    "attention.causal": ((True,), "attention to later tokens"),
    "attention.sliding_window": ((0,), "a sliding window in this architecture"),
    "attention.scale": ((), "a scale of attention"),
    "logit_scale": ((1.0,), "a scale of the logits"),
}
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_ADVICE = "Tokenwright cannot tell whether that changes the arithmetic: the model needs a newer Tokenwright"

_SAMPLING: Mapping[str, str] = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the header of a file says about its model."""

    config: ModelConfig
    graph: Graph
    generation: GenerationDefaults
    sources: Mapping[str, Source]
    stored: Mapping[str, Stored]


def read_model(header: Header, where: str, factors: Callable[[Stored], list[float]]) -> GgufModel:
    """The model of a header. `factors` reads an F32 tensor. Raises CheckpointError for what Tokenwright lacks."""
    settings = _settings(header, where, factors)
    _, config, graph = parse_config(settings, where)
    if ROPE_FACTORS in header.tensors and header.tensors[ROPE_FACTORS].shape[0] != config.head_size // 2:
        raise CheckpointError(
            f"{where}: {ROPE_FACTORS} has not {config.head_size // 2} factors; {fetch_again(Path(where))}"
        )
    stored = {name: one for name, one in header.tensors.items() if not _INERT_TENSORS.fullmatch(name)}
    about = {f"{at}_token_id": header.metadata.get(f"tokenizer.ggml.{at}_token_id") for at in ("bos",)}
    ends = [header.metadata[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}") in header.metadata]
    generation = parse_generation(_suggested(header.metadata) | {"eos_token_id": ends}, about, where)
    paired = config.head_size if header.metadata["general.architecture"] == PAIRED else 0
    return GgufModel(config, graph, generation, _sources(graph, paired), stored)


def tensor_names(graph: Graph) -> dict[str, str]:
    """The file's names of our tensors."""
    found = {}
    for name in graph.shapes:
        base, kind = name.rsplit(".", 1)
        layer = re.match(r"layers\.(\d+)\.", base)
        part = base[layer.end() :] if layer else base
        at = f"blk.{layer[1]}.{_NAMES[part]}" if layer else _NAMES[part]
        found[name] = f"{at}.{kind}"
    return found


def _sources(graph: Graph, paired: int) -> dict[str, Source]:
    """Where a file stores our tensors. `paired`: the size of a head whose rows lie in pairs, else 0."""
    names = tensor_names(graph).items()
    order = head_order(paired, paired, neighbours=True) if paired else None
    return {name: Source(at, order=order if ROWS_PAIRED.fullmatch(name) else None) for name, at in names}


def _settings(header: Header, where: str, factors: Callable[[Stored], list[float]]) -> dict[str, Any]:
    """The metadata as a config.json."""
    every = Keys(header.metadata, where)
    kind = every.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise every.error(f"the architecture {shown(kind)} is none that Tokenwright reads: {', '.join(ARCHITECTURES)}")
    keys = Keys({k.removeprefix(f"{kind}."): v for k, v in header.metadata.items() if k.startswith(f"{kind}.")}, where)
    for key, (allowed, why) in _NEUTRAL.items():
        keys.only(key, *allowed, why=why)
    if "token_embd.weight" not in header.tensors:
        raise every.error("it has no token_embd.weight: a vocabulary or an adapter, not a model")
    heads, width = keys.whole("attention.head_count"), keys.whole("embedding_length")
    size = keys.whole("attention.key_length", width // heads)
    for same in ("attention.value_length", "rope.dimension_count"):
        if keys.whole(same, size) != size:
            raise keys.error(f"{same} is {keys.whole(same)}, and a head has {size}; Tokenwright lacks that")
    found = {ours: keys.whole(theirs) for ours, theirs in _WHOLE.items()} | {
        "architectures": [ARCHITECTURES[kind]],
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(keys.number("rope.freq_base", 10000.0, above=1.0)),
        "rope_scaling": _scaling(keys, header, factors),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors:
        found["attention_bias"] = True
    keys.finish(_INERT, _ADVICE)
    return found


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-05 for 9.999999747378752e-06, as in the original config."""
    return float(f"{value:.7g}")


def _scaling(keys: Keys, header: Header, factors: Callable[[Stored], list[float]]) -> dict[str, Any] | None:
    """The rope_scaling of a config.json, or None."""
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
    keys.only("rope.scaling.attn_factor", 1.0, why="another attention factor")
    keys.only("rope.scaling.yarn_log_multiplier", 0.0, why="another attention factor")
    if kind not in ("none", "linear", "yarn"):
        raise keys.error(f"rope.scaling.type is {shown(kind)}; Tokenwright reads none, linear and yarn")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise keys.error(f"it has {ROPE_FACTORS} and rope.scaling.type {kind}; Tokenwright reads one of them")
        stored = header.tensors[ROPE_FACTORS]
        if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MOST_PAIRS:
            raise keys.error(f"{ROPE_FACTORS} is {stored.dtype} {list(stored.shape)}, not a list of F32 factors")
        return _llama3(keys, factors(stored))
    if kind == "none" or factor == 1.0:
        return None
    yarn = {"original_max_position_embeddings": original} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **yarn}


def _llama3(keys: Keys, factors: list[float]) -> dict[str, Any]:
    """Llama 3.1's scaling, if it gives these factors with the constants that all its models have."""
    import torch

    from tokenwright.config import Llama3Scaling
    from tokenwright.models.rotary import llama3_frequencies

    factor = max(factors, default=1.0)
    base, pairs = _shortest(keys.number("rope.freq_base", 10000.0, above=1.0)), len(factors)
    plain = torch.tensor([base ** (-at / pairs) for at in range(pairs)], dtype=torch.float64)
    scaled = llama3_frequencies(plain, Llama3Scaling(factor, 1.0, 4.0, 8192))
    if factor < 1 or not torch.allclose(plain / scaled, torch.tensor(factors, dtype=torch.float64), rtol=1e-4):
        raise keys.error(f"{ROPE_FACTORS} is not Llama 3.1's scaling of 8,192 tokens; Tokenwright lacks it")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _suggested(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters as the keys of a generation_config.json."""
    prefix = "general.sampling."
    bare = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return {
        _SAMPLING.get(key, key): _shortest(value) if isinstance(value, float) else value for key, value in bare.items()
    }
