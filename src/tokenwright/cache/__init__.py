"""The KV cache: the storage format of each layer, the memory for it, and pages in files."""

from tokenwright.cache.spec import LayerGroup, LayerSpec, Part, group_layers, groups_for, layer_specs, pages_within
from tokenwright.cache.store import HOST, ChunkRows, KVPart, KVStore, KVView, Side, StateView, StoreMemory
from tokenwright.config import Heads
