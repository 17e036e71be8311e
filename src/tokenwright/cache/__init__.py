"""Where K and V live: what one layer keeps for a token, and the memory that holds it. No sequences here."""

from tokenwright.cache.spec import Full, Heads, LayerSpec, Window, layer_specs
from tokenwright.cache.store import TORCH_DTYPES, KVStore, KVView

__all__ = ["TORCH_DTYPES", "Full", "Heads", "KVStore", "KVView", "LayerSpec", "Window", "layer_specs"]
