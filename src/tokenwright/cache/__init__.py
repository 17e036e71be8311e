"""The KV cache: what one layer keeps of each token, and the memory that stores it. It knows no sequences."""

from tokenwright.cache.codec import TORCH_DTYPES
from tokenwright.cache.spec import (
    LayerGroup,
    LayerSpec,
    Part,
    group_layers,
    groups_for,
    layer_specs,
    pages_within,
)
from tokenwright.cache.store import ChunkRows, KVPart, KVStore, KVView, Side
from tokenwright.config import Heads

__all__ = [
    "TORCH_DTYPES",
    "ChunkRows",
    "Heads",
    "KVPart",
    "KVStore",
    "KVView",
    "LayerGroup",
    "LayerSpec",
    "Part",
    "Side",
    "group_layers",
    "groups_for",
    "layer_specs",
    "pages_within",
]
