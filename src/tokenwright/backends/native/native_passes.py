"""Runs a model op by op with native kernels, to look inside, with the same bits as a `Program`'s one call."""

from ctypes import byref
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats, address, empty
from tokenwright.backends.array_passes import ArrayPasses
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.struct_builders import ChunkArray, kv_tensor
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.op_batch import OpBatcher
from tokenwright.cache import KVStore, Side
from tokenwright.engine import Batch
from tokenwright.models.taps import Tap


class NativePasses(ArrayPasses):
    def __init__(self, decoder: Decoder, kernels: NativeKernels) -> None:
        self.decoder = decoder
        self.kernels = kernels

    def run(self, batch: Batch, store: KVStore, tap: Tap, *, stored: bool = True) -> None:
        rows = OpBatcher(self.decoder.graph, store)(batch)
        self.decoder.forward(rows if stored else rows.unstored(store), store, tap)

    def logits(self, x: Floats) -> Floats:
        found: Floats = self.decoder.logits(x)
        return found

    def decoded(self, side: Side, slots: NDArray[np.int64]) -> Floats:
        """The decoded rows [n, G, D] of slots, by attention over windows of one position."""
        rows = replace(side, memory=tuple(np.ascontiguousarray(memory[slots]) for memory in side.memory))
        count, heads = len(slots), side.memory[0].shape[1]
        queries, out = np.zeros((count, heads, side.size), np.float32), empty((count, heads, side.size))
        if count:
            kept, width = kv_tensor(rows), heads * side.size
            part = structs.CPart(0, -1, 0, 2 * heads * side.codec.nbytes(side.size), kept, kept)
            layer = structs.CKVLayer(1, (structs.CPart * 2)(part), 1, 0, None)
            shape = structs.CHeads(heads, heads, side.size, side.size, 1.0, 0, None)
            chunk = ChunkArray([(range(count), 0, (np.arange(count, dtype=np.int32),))])
            ends = structs.CQueries(0, 0, 0, 0, address(queries), None, address(out), width, width, width)
            read = (byref(layer), byref(shape), 1, chunk.address, 1)
            self.kernels.compute(self.kernels.library.tw_attend, *read, byref(ends), kernel_threads.count)
        return out
