"""A model run op by op with native kernels, to look inside: taps, attention weights and logits, as arrays.

The operations give the same bits as a `Program`'s one call. Attention weights are computed in NumPy from keys that the
kernels decode: kernels keep no attention matrix.
"""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, Floats, address, empty
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.struct_builders import ChunkArray, kv_tensor
from tokenwright.backends.protocol import Scored
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.op_batch import OpBatcher
from tokenwright.cache import ChunkRows, KVPart, KVStore, KVView, LayerSpec, Side
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap


class NativePasses:
    """Implements `Passes`. decoder: over arrays, with these kernels."""

    def __init__(self, decoder: Decoder, kernels: NativeKernels) -> None:
        self.decoder = decoder
        self.kernels = kernels

    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        rows = OpBatcher(self.decoder.graph, store)(batch)
        if not stored:
            scratch = (np.full_like(slots, store.scratch(group)) for group, slots in enumerate(rows.slots))
            rows = replace(rows, slots=tuple(scratch))
        self.decoder.forward(rows, store, tap)

    def logits(self, x: Floats) -> Floats:
        found: Floats = self.decoder.logits(x)
        return found

    def scoring(self, layer: int, head: int | None = None) -> Scored:
        found = self.decoder.scorings[layer]
        return found if head is None else found.of_head(head)

    def row(
        self, view: KVView, chunk: ChunkRows, query: Floats, sink_query: Floats | None, group: int, scoring: Scored
    ) -> Floats:
        sinks = None if sink_query is None else sink_query[None, None]
        found: Floats = self.weights(view.head(group), chunk, query[None, None], sinks, scoring)[0, 0]
        return found

    def cached(self, view: KVView, chunk: ChunkRows, group: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
        parts = view.head(group).parts
        keys, values = self._read(chunk, parts, [part.k for part in parts]), [part.v for part in parts]
        return keys[:, 0], self._read(chunk, parts, values)[:, 0], _positions(chunk, parts)

    def weights(
        self, view: KVView, chunk: ChunkRows, queries: Floats, sink_queries: Floats | None, scoring: Scored
    ) -> Floats:
        keys, positions = self._read(chunk, view.parts, [part.k for part in view.parts]), _positions(chunk, view.parts)
        window = view.spec.window
        scores = _scores(queries, keys)  # [G, R, n, t]
        if sink_queries is not None:
            first = slice(window.sinks)  # the first positions, which every row reads up to its own
            scores[..., first] = _scores(sink_queries, keys[first])
        rows = np.arange(chunk.start, chunk.start + len(queries))[:, None]
        hidden = positions > rows  # [n, t]
        if window.size is not None:
            hidden |= (positions <= rows - window.size) & (positions >= window.sinks)
        scores = scores.reshape(queries.shape[1], len(queries), len(positions)) * np.float32(scoring.scale)
        if scoring.cap is not None:
            scores = np.tanh(scores / np.float32(scoring.cap)) * np.float32(scoring.cap)
        scores[:, hidden] = -np.inf
        learned = None if scoring.sink_logits is None else scoring.sink_logits.astype(np.float32)[:, None]  # [H, 1]
        most = scores.max(-1) if learned is None else np.maximum(scores.max(-1), learned)  # [H, n]
        powers = np.exp(scores - most[..., None])
        totals = powers.sum(-1) + (0 if learned is None else np.exp(learned - most))
        whole = np.zeros((*scores.shape[:2], chunk.stop), np.float32)
        whole[:, :, positions] = powers / totals[..., None]
        return whole

    def kept(self, spec: LayerSpec, keys: Floats) -> Array:
        found = []
        for part in spec.parts:
            places = part.stored(range(len(keys)))
            rows, slots = np.ascontiguousarray(keys[places.start : places.stop, None]), np.arange(len(places))
            memory = (np.zeros((len(rows), 1, count), dtype) for dtype, count in part.k.parts(keys.shape[-1]))
            side = Side(part.k, keys.shape[-1], tuple(memory))
            kept = KVPart(0, part.window, 2 * part.k.nbytes(side.size), side, side)
            if len(rows):
                self.kernels.store(KVView(spec, (kept,)), [slots], rows, rows)
            found.append(self._decoded(side, slots)[:, 0])
        return np.concatenate(found).astype(np.float64)

    def _read(self, chunk: ChunkRows, parts: Sequence[KVPart], sides: Sequence[Side]) -> Floats:
        each = zip(parts, sides, strict=True)
        return np.concatenate([self._decoded(side, chunk.slots[part.group]) for part, side in each])

    def _decoded(self, side: Side, slots: NDArray[np.int64]) -> Floats:
        """The decoded rows [n, G, D] of slots, by attention over windows of one position."""
        rows = replace(side, memory=tuple(np.ascontiguousarray(memory[slots]) for memory in side.memory))
        count, heads = len(slots), side.memory[0].shape[1]
        queries, out = np.zeros((count, heads, side.size), np.float32), empty((count, heads, side.size))
        if count:
            kept, width = kv_tensor(rows), heads * side.size
            part = structs.CPart(0, -1, 0, 2 * heads * side.codec.nbytes(side.size), kept, kept)
            layer = structs.CKVLayer(1, (structs.CPart * 2)(part), 1, 0, None)  # a window of one position
            shape = structs.CHeads(heads, heads, side.size, side.size, 1.0, 0, None)
            chunk = ChunkArray([(range(count), 0, (np.arange(count, dtype=np.int32),))])
            ends = structs.CQueries(0, 0, 0, 0, address(queries), None, address(out), width, width, width)
            read = (byref(layer), byref(shape), 1, chunk.address, 1)
            self.kernels.compute(self.kernels.library.tw_attend, *read, byref(ends), kernel_threads.count)
        return out


def _positions(chunk: ChunkRows, parts: Sequence[KVPart]) -> NDArray[np.int64]:
    return np.concatenate([chunk.positions[part.group] for part in parts])


def _scores(queries: Floats, keys: Floats) -> Floats:
    """q k [G, H / G, n, t] of rows [n, H, D] and keys [t, G, D]."""
    rows = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[2]).transpose(1, 2, 0, 3)  # [G, R, n, D]
    scores: Floats = rows @ keys.transpose(1, 2, 0)[:, None]
    return scores
