"""Names the operations of a config.json that Tokenwright does not compute, for `inspect` and `plan`."""

import re
from pathlib import Path

from tokenwright.checkpoints.files.json_keys import JsonKeys, neutral, shown
from tokenwright.checks import read_table

_FILE = Path(__file__).with_suffix(".txt")
_KEYS = read_table("keys", _FILE)  # operations, unless a key's value is neutral; {} is the value
_LAYER_TYPES = read_table("layers", _FILE)
_ARCHITECTURES = read_table("architectures", _FILE)  # by beginnings of names, where keys do not tell
NEEDS = read_table("files", _FILE)  # by the architecture of a GGUF file


def lacking_operations(keys: JsonKeys) -> tuple[str, ...]:
    needed = [(words, keys.raw(key)) for key, words in _KEYS.items() if _needed(keys, key)]
    found = [words.format(f"{value:,}" if type(value) is int else shown(value)) for words, value in needed]
    types = keys.raw("layer_types")
    listed = types if isinstance(types, list) else []
    found += [words for kind, words in _LAYER_TYPES.items() if kind in listed]
    return tuple(dict.fromkeys(found))


def lacking_clause(keys: JsonKeys, architecture: str) -> str:
    """These operations as a clause about an unknown architecture, whose name may need more."""
    by_name = [words for start, words in _ARCHITECTURES.items() if re.match(start, architecture)]
    lacking = dict.fromkeys([*lacking_operations(keys), *by_name])
    if lacking:
        return f"it needs {', '.join(lacking)}, which Tokenwright lacks"
    return "Tokenwright has no family that maps its keys and tensors (docs/families.md tells how to add one)"


def _needed(keys: JsonKeys, key: str) -> bool:
    """Whether a key needs an operation. MiMo-V2's files also call their windows chunks."""
    windows = key == "attention_chunk_size" and keys.raw("sliding_window") == keys.raw(key)
    return not neutral(keys.raw(key)) and not windows
