"""Where K and V live: what one layer keeps for a token, and the memory that holds it. No sequences here."""

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
from tokenwright.cache.store import Keys, KVPart, KVStore, KVView, Side, Table
from tokenwright.config import Heads

__all__ = [
    "TORCH_DTYPES",
    "Heads",
    "KVPart",
    "KVStore",
    "KVView",
    "Keys",
    "LayerGroup",
    "LayerSpec",
    "Part",
    "Side",
    "Table",
    "group_layers",
    "groups_for",
    "layer_specs",
    "pages_within",
]
