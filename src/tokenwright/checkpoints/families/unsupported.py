"""Operations of a config.json that Tokenwright does not compute: one table, from keys to operations.

`inspect` and `plan` say it of an architecture that no family has. An operation leaves the table when a backend has it.
"""

from collections.abc import Mapping
from typing import Any

from tokenwright.checkpoints.files.json_keys import JsonKeys, shown

# A key, and the operation that it stands for unless its value is null, false, 0 or empty; {} is the value.
_OPERATIONS: tuple[tuple[str, str], ...] = (
    ("index_topk", "attention to the {} tokens that an indexer chooses"),
    ("attention_chunk_size", "chunked attention, {} tokens at a time"),
    ("attn_temperature_tuning", "queries scaled by their position"),
    ("interleave_moe_layer_step", "experts whose input is scaled by their score"),
    ("state_size", "state-space layers"),
    ("ssm_state_size", "state-space layers"),
    ("mamba_d_state", "state-space layers"),
    ("linear_num_key_heads", "linear attention"),
    ("conv_L_cache", "short convolutions"),
    ("lru_width", "recurrent layers"),
    ("attention_hidden_size", "recurrent layers"),
    ("alibi", "ALiBi positions"),
    ("multi_query", "one KV head in a fused projection"),
    ("is_encoder_decoder", "an encoder"),
    ("cross_attention_layers", "cross-attention"),
    ("hidden_size_per_layer_input", "embeddings for each layer"),
    ("altup_num_inputs", "several residual streams (AltUp)"),
    ("num_kv_shared_layers", "K and V that layers share"),
    ("clip_qkv", "clipped q, k and v"),
)
_LAYER_TYPES: Mapping[str, str] = {
    "chunked_attention": "sliding chunked attention",
    "linear_attention": "linear attention",
    "conv": "short convolutions",
    "mamba": "state-space layers",
    "recurrent": "recurrent layers",
}


def lacking_operations(keys: JsonKeys) -> tuple[str, ...]:
    """The operations that a config.json's keys stand for and Tokenwright lacks, each once, in the table's order."""
    found = [words.format(_value(keys.raw(key))) for key, words in _OPERATIONS if keys.raw(key)]
    types = keys.raw("layer_types")
    listed = types if isinstance(types, list) else []
    found += [words for kind, words in _LAYER_TYPES.items() if kind in listed]
    return tuple(dict.fromkeys(found))


def what_it_lacks(keys: JsonKeys) -> str:
    """The same as a clause about an architecture that no family has."""
    lacking = lacking_operations(keys)
    if lacking:
        return f"it needs {', '.join(lacking)}, which Tokenwright lacks"
    return "its config.json names no operation that Tokenwright lacks, but there is no family for it (docs/families.md)"


def _value(value: Any) -> str:
    return f"{value:,}" if type(value) is int else shown(value)
