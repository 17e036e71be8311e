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
    """Implements `Passes` with a decoder over tensors."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.inference_mode()
    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        rows = Batcher(self.decoder.graph, store)(batch)
        if not stored:
            scratch = (torch.full_like(slots, store.scratch(group)) for group, slots in enumerate(rows.slots))
            rows = replace(rows, slots=tuple(scratch))

        def with_arrays(site: Site, layer: int, value: Any) -> None:
            tap(site, layer, array(value))

        self.decoder.forward(rows, store, with_arrays)

    @torch.inference_mode()
    def logits(self, x: Floats) -> Floats:
        return array(self.decoder.logits(tensor(x).to(self.decoder.device)))

    def scoring(self, layer: int, head: int | None = None) -> Scored:
        found = self.decoder.scorings[layer]
        if found.sink_logits is not None:
            found = replace(found, sink_logits=array(found.sink_logits.float()))
        return found if head is None else found.of_head(head)

    @torch.inference_mode()
    def row(
        self, view: KVView, chunk: ChunkRows, query: Floats, sink_query: Floats | None, group: int, scoring: Scored
    ) -> Floats:
        device = tensor(view.parts[0].k.memory[0]).device
        sinks = None if sink_query is None else tensor(sink_query).to(device)
        asked, scored = tensor(query).to(device), _on(scoring, device)
        return array(attention_row(view, tensors_of(chunk, device), asked, sinks, group, scored))

    @torch.inference_mode()
    def cached(self, view: KVView, chunk: ChunkRows, group: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
        rows = tensors_of(chunk, tensor(view.parts[0].k.memory[0]).device)
        keys, positions = _KERNELS.keys(view.head(group), rows)
        values = _KERNELS.values(view.head(group), rows)
        return array(keys[:, 0].float()), array(values[:, 0].float()), array(positions)

    @torch.inference_mode()
    def weights(
        self, view: KVView, chunk: ChunkRows, queries: Floats, sink_queries: Floats | None, scoring: Scored
    ) -> Floats:
        device = tensor(view.parts[0].k.memory[0]).device
        keys, positions = _KERNELS.keys(view, tensors_of(chunk, device))  # [t, G, D], [t]
        sinks = None if sink_queries is None else tensor(sink_queries).to(device)
        asked = tensor(queries).to(device)
        found = _KERNELS.weights(asked, keys, positions, chunk.start, view.spec.window, _on(scoring, device), sinks)
        whole = np.zeros((queries.shape[1], len(queries), chunk.stop), np.float32)
        whole[:, :, array(positions)] = array(found.flatten(0, 1).float())
        return whole

    def kept(self, spec: LayerSpec, keys: Floats) -> Array:
        found = []
        for part in spec.parts:
            places = part.stored(range(len(keys)))
            encoded = encode(part.k.name, tensor(np.ascontiguousarray(keys[places.start : places.stop])))
            found.append(array(decode(part.k.name, encoded, keys.shape[-1], torch.float64)))
        return np.concatenate(found)


def _on(scoring: Scored, device: torch.device) -> Scored:
    """A scoring whose learned logits are a tensor on a device."""
    learned = scoring.sink_logits
    return scoring if learned is None else replace(scoring, sink_logits=tensor(learned).to(device))
