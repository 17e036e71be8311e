"""Where K and V live: what one layer keeps for a token, and the memory that holds it. No sequences here."""

from tokenwright.cache.spec import Full, Heads, LayerSpec, Window, layer_specs
from tokenwright.cache.store import KVStore, KVView

__all__ = ["Full", "Heads", "KVStore", "KVView", "LayerSpec", "Window", "layer_specs"]
