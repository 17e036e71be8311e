"""The KV cache: what one layer keeps of each token, and the memory that stores it."""

from tokenwright.cache.spec import LayerGroup, LayerSpec, Part, group_layers, groups_for, layer_specs, pages_within
from tokenwright.cache.store import HOST, ChunkRows, KVPart, KVStore, KVView, Side, StateView, StoreMemory
from tokenwright.config import Heads
