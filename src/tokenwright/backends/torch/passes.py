"""A model run op by op for those who look inside: arrays go in, and taps, weights and logits come out as arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenwright.arrays import Array, Floats
from tokenwright.backends import Scored
from tokenwright.backends.torch.border import array, tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.kv_codec import decode, encode
from tokenwright.backends.torch.observe import attention_row
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.backends.torch.tensor_batch import Batcher, tensors_of
from tokenwright.cache import ChunkRows, KVStore, KVView, LayerSpec
from tokenwright.engine import Batch
from tokenwright.models.taps import Site, Tap

_KERNELS = ReferenceKernels()


class OpByOp:
    """Passes of one decoder over any store."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.inference_mode()
    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        """Compute a batch under a tap, which gets arrays. stored=False: its K and V go to scratch slots."""
        rows = Batcher(self.decoder.graph, store)(batch)
        if not stored:
            scratch = (torch.full_like(slots, store.scratch(group)) for group, slots in enumerate(rows.slots))
            rows = replace(rows, slots=tuple(scratch))

        def with_arrays(site: Site, layer: int, value: Any) -> None:
            tap(site, layer, array(value))

        self.decoder.forward(rows, store, with_arrays)

    @torch.inference_mode()
    def logits(self, x: Floats) -> Floats:
        """Logits [n, vocabulary] of rows [n, width] of the residual stream."""
        return array(self.decoder.logits(tensor(x).to(self.decoder.device)))

    def scoring(self, layer: int, head: int | None = None) -> Scored:
        """How the attention scores of a layer, or of one of its heads, follow from q k."""
        found = self.decoder.scorings[layer]
        return found if head is None else found.of_head(head)

    @torch.inference_mode()
    def row(
        self, view: KVView, chunk: ChunkRows, query: Floats, sink_query: Floats | None, group: int, scoring: Scored
    ) -> Floats:
        """`attention_row`, over arrays."""
        device = tensor(view.parts[0].k.memory[0]).device
        sinks = None if sink_query is None else tensor(sink_query).to(device)
        return array(attention_row(view, tensors_of(chunk, device), tensor(query).to(device), sinks, group, scoring))

    @torch.inference_mode()
    def cached(self, view: KVView, chunk: ChunkRows, group: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Keys [t, D] and values [t, v] of a KV head that the rows of a chunk read, fp32, and their positions [t]."""
        rows = tensors_of(chunk, tensor(view.parts[0].k.memory[0]).device)
        keys, positions = _KERNELS.keys(view.head(group), rows)
        values = _KERNELS.values(view.head(group), rows)
        return array(keys[:, 0].float()), array(values[:, 0].float()), array(positions)

    @torch.inference_mode()
    def weights(
        self, view: KVView, chunk: ChunkRows, queries: Floats, sink_queries: Floats | None, scoring: Scored
    ) -> Floats:
        """Weights [H, n, stop], fp32, of queries [n, H, D] at the rows of a chunk; 0 at masked positions."""
        device = tensor(view.parts[0].k.memory[0]).device
        keys, positions = _KERNELS.keys(view, tensors_of(chunk, device))  # [t, G, D], [t]
        sinks = None if sink_queries is None else tensor(sink_queries).to(device)
        asked = tensor(queries).to(device)
        found = _KERNELS.weights(asked, keys, positions, chunk.start, view.spec.window, scoring, sinks)
        whole = np.zeros((queries.shape[1], len(queries), chunk.stop), np.float32)
        whole[:, :, array(positions)] = array(found.flatten(0, 1).float())
        return whole


def as_kept(spec: LayerSpec, keys: Array) -> Array:
    """Keys [t, D] of a whole text, encoded and decoded as in the cache, in fp64."""
    kept = []
    for part in spec.parts:
        places = part.stored(range(len(keys)))
        encoded = encode(part.k.name, tensor(np.ascontiguousarray(keys[places.start : places.stop])))
        kept.append(array(decode(part.k.name, encoded, keys.shape[-1], torch.float64)))
    return np.concatenate(kept)
