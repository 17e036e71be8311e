"""Where K and V live: what one layer keeps for a token, and the memory that holds it. No sequences here."""

from tokenwright.cache.codec import TORCH_DTYPES
from tokenwright.cache.spec import (
    Heads,
    LayerGroup,
    LayerSpec,
    Part,
    group_layers,
    groups_for,
    layer_specs,
    pages_within,
)
from tokenwright.cache.store import ChunkRows, KVPart, KVStore, KVView, Side

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
