"""Computes a step by one call into the native kernels, with the bits of a `Decoder` that calls them one by one."""

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from ctypes import byref
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats, address, place_of
from tokenwright.backends import Logits
from tokenwright.backends.adapters import NO_ADAPTERS, Beside
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.key_bias import BLOCK, block_rotations
from tokenwright.backends.layout import Weights, nbytes
from tokenwright.backends.native import structs
from tokenwright.backends.native.compile import NativeModel
from tokenwright.backends.native.expert_pool import ExpertPool
from tokenwright.backends.native.native_kernels import NativeKernels, Workspace
from tokenwright.backends.native.struct_builders import kv_layer, point_to_rotations, state_layer
from tokenwright.backends.observation import CANDIDATES, Observed, Watched
from tokenwright.cache import KVStore
from tokenwright.config import Rope, angle_length
from tokenwright.engine import AttentionWindow, Batch
from tokenwright.errors import CapacityError, WorkerError
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable
from tokenwright.models.split import Cuts

if TYPE_CHECKING:
    from tokenwright.backends.torch.decoder import Decoder

_CHUNK, _BATCH, _ADAPTED, _OBSERVED, _WATCHED = map(
    structs.packer, (structs.CChunkRows, structs.CBatch, structs.CAdaptedRows, structs.CObserved, structs.CWatchedRow)
)
HEAD, ROW = _OBSERVED.size // 8, _WATCHED.size // 8  # words of 8 bytes
_TABLES = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "L"
ENDED = 2  # a result of tw_forward: another rank has ended
ROTARY_POSITIONS = 1 << 16  # most in the rotary cache


class NativeDecoder:
    """A graph over packed weights, compiled for the native kernels. `counted`: tokens times layers, by programs."""

    def __init__(
        self,
        graph: Graph,
        kernels: NativeKernels,
        weights: Weights,
        adapters: Beside = NO_ADAPTERS,
        cuts: Cuts = MappingProxyType({}),
        ranks: structs.CRanks | None = None,
        pool: ExpertPool | None = None,
    ) -> None:
        self.native = NativeModel(graph, kernels, weights, adapters, cuts, ranks, pool)
        self.graph = graph
        self.kernels = kernels
        self.pool = pool
        self.weight_bytes = nbytes(weights) + (0 if pool is None else pool.nbytes)
        self.counted = 0
        self._parts = weights, adapters

    @property
    def weights(self) -> Weights:
        weights, _ = self._parts
        return weights

    @property
    def layer_tokens(self) -> int:
        """Tokens times layers computed so far, by programs and op by op."""
        made = self.__dict__.get("over_arrays")
        return self.counted + (made.layer_tokens if made else 0)

    def again(self) -> Self:
        return type(self)(self.graph, self.kernels, *self._parts, pool=self.pool)

    @cached_property
    def over_arrays(self) -> "Decoder":
        """The same model and kernels, called one by one for taps."""
        from tokenwright.backends.torch.decoder import Decoder

        weights, adapters = self._parts
        return Decoder(self.graph, self.kernels, {**weights}, adapters)


class Program:
    """Runs steps of one model over one store, each as one native call."""

    def __init__(self, model: NativeModel, store: KVStore) -> None:
        layers = model.graph.layers
        self.model = model
        self.store = store
        self._workspace = Workspace(model.kernels.library)
        self._ends = 2 + sum(len(op.halves) for op in model.graph.blocks)  # in an `Observed`
        self._candidates = min(CANDIDATES, model.graph.vocab_size)
        sizes = model.graph.rotary_sizes
        self._rotary = RotaryCache(sizes) if sizes else None
        pairs_of = zip(model.graph.attention, store.specs, strict=True)
        self._sinks = [
            None if op.rope is None else at_edge(op.rope, sizes[op.rope], spec.window) for op, spec in pairs_of
        ]
        states = model.graph.recurrent
        self._kv = (structs.CKVLayer * layers)(
            *(
                state_layer(store.states(i)) if i in states else kv_layer(store.view(i), address(self._sinks[i]))
                for i in range(layers)
            )
        )
        self._kv_address = ctypes.addressof(self._kv)
        self._unbiased = {
            layer: block_rotations(op.rope, sizes[op.rope])
            for layer, (op, spec) in enumerate(zip(model.graph.attention, store.specs, strict=True))
            if spec.unbiased and op.rope is not None
        }
        self._blocks: list[Floats] = []  # the layers without biases point to them
        self._turned = 0

    def __call__(self, batch: Batch, observed: int = 0) -> Logits:
        """Compute a batch. observed: address of a `CObserved`, or 0. Raises CapacityError and WorkerError."""
        tokens, wanted, model = batch.tokens, batch.logits_rows, self.model
        alive: list[object] = []  # arrays that the fields point to
        chunks = self._chunk_rows(batch, alive)
        picked = len(wanted)
        best, totals = array("q", [0]) * picked, array("d", [0.0]) * picked
        unread = array("q") if model.pool is None else array("q", [0]) * len(batch.output_rows)
        logits = _empty(picked, model.graph.vocab_size)
        hidden = _empty(len(batch.hidden_rows), model.graph.width) if batch.hidden_rows else None
        words = (  # of a `structs.CBatch`
            len(tokens),
            tokens.buffer_info()[0],
            len(batch.output_rows),
            chunks.buffer_info()[0],
            self.store.page_size,
            self._kv_address,
            picked,
            wanted.buffer_info()[0],
            logits.ctypes.data,
            best.buffer_info()[0],
            totals.buffer_info()[0],
            len(batch.hidden_rows),
            batch.hidden_rows.buffer_info()[0],
            0 if hidden is None else hidden.ctypes.data,
            *self._adapted(batch, alive),
            observed,
            0 if batch.before is None else place_of(batch.before),
            *self._inserted(batch, alive),
            0 if model.pool is None else unread.buffer_info()[0],
        )
        struct, kernels = array("q", _BATCH.pack(*words)), model.kernels
        at = struct.buffer_info()[0]
        failed = kernels.library.tw_forward(
            kernels.handle, self._workspace.address, byref(model.struct), at, kernel_threads.count
        )
        if failed == ENDED:
            raise WorkerError("a process that computes the model has ended, so the engine has; open the model again")
        if failed:
            raise CapacityError(f"there is no memory to compute {len(tokens)} tokens at once; lower token_budget")
        if model.pool is None or not any(unread):
            return Logits(logits, tuple(best), tuple(totals), hidden)
        faults = {chunk: model.pool.fault(error) for chunk, error in enumerate(unread) if error}
        return Logits(logits, tuple(best), tuple(totals), hidden, faults)

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:
        chunks, wanted, ids = len(batch.output_rows), batch.logits_rows, self._candidates
        ends, counts, rows = HEAD, HEAD + self._ends, HEAD + self._ends + 3 * chunks
        highest = rows + ROW * len(watched)
        facts, entropies = array("q", bytes(8 * (highest + ids * len(watched)))), array("d", bytes(8 * len(watched)))
        at, entropy = facts.buffer_info()[0], entropies.buffer_info()[0]
        filled = (at + 8 * (counts + i * chunks) for i in range(3))
        _OBSERVED.pack_into(facts, 0, at + 8 * ends, 0, len(watched), ids, at + 8 * rows, 0, 0, 0, *filled)
        for i, one in enumerate(watched):
            one.weights = _empty(batch.position(one.row) + 1)
            logits_row = wanted.index(one.row) if one.row in wanted else -1
            places = at + 8 * (highest + ids * i), entropy + 8 * i
            row = (one.layer, one.head, one.row, place_of(one.weights), logits_row, *places)
            _WATCHED.pack_into(facts, 8 * (rows + ROW * i), *row)
        logits = self(batch, at)
        for i, one in enumerate(watched):
            if one.row in wanted:
                one.highest = facts[highest + ids * i : highest + ids * (i + 1)]
                one.entropy = entropies[i] / math.log(2)
        flop, read, written = (facts[counts + i * chunks : counts + (i + 1) * chunks] for i in range(3))
        head = _OBSERVED.unpack_from(facts)
        looking_s, totals = head[1] / 1e9, (head[5], head[6], head[7])
        return logits, Observed(facts[ends:counts], looking_s, *totals, flop, read, written)

    def _chunk_rows(self, batch: Batch, alive: list[object]) -> "array[int]":
        tables = array(_TABLES, [pages.buffer_info()[0] for pages in batch.tables])
        alive.append(tables)
        packed = []
        at, size = tables.buffer_info()[0], tables.itemsize * len(self.store.groups)
        rotary, rotation = self._rotary, 0
        axes, ends = dict(batch.axes), {index: one.buffer_info()[0] for index, one in batch.ends}
        for index, (row, rows, start, limit) in enumerate(batch.each_chunk()):
            if self._unbiased and start + rows > self._turned:
                self._turn(start + rows)
            if rotary is not None:
                seen = axes.get(index)
                if seen is None or (seen[0] == seen[1] == seen[2] and seen[0][-1] == seen[0][0] + rows - 1):
                    first = start if seen is None else seen[0][0]
                    rotation = rotary.address(first, first + rows, limit, alive)
                else:
                    rotation = rotary.address_of(np.array(seen, np.int64), limit, alive)
            packed.append(_CHUNK.pack(row, rows, start, rotation, at, ends.get(index, 0)))
            at += size
        return array("q", b"".join(packed))

    def _inserted(self, batch: Batch, alive: list[object]) -> tuple[int, int]:
        if not batch.inserted:
            return 0, 0
        depth = batch.inserted[0][1].shape[0]
        pointers = np.zeros((depth, len(batch.tokens)), np.uint64 if _TABLES == "Q" else np.uint32)
        for row, one in batch.inserted:
            each, (_, count, _) = np.ascontiguousarray(one, np.float32), one.shape
            steps = np.arange(depth * count).reshape(depth, count) * each.strides[1]
            pointers[:, row : row + count] = place_of(each) + steps
            alive.append(each)
        alive.append(pointers)
        return place_of(pointers), place_of(pointers) + pointers.strides[0] if depth > 1 else 0

    def _turn(self, stop: int) -> None:
        self._blocks = [rotations.blocks(stop) for rotations in self._unbiased.values()]
        self._turned = min(BLOCK * len(blocks) for blocks in self._blocks)
        for (layer, rotations), blocks in zip(self._unbiased.items(), self._blocks, strict=True):
            point_to_rotations(self._kv[layer], blocks, rotations)

    @staticmethod
    def _adapted(batch: Batch, alive: list[object]) -> tuple[int, int]:
        if not batch.adapters:
            return 0, 0
        each = []
        for number, rows in batch.rows_of_adapters().items():
            row = array("q", rows)
            alive.append(row)
            each.append(_ADAPTED.pack(number - 1, len(row), row.buffer_info()[0]))
        packed = array("q", b"".join(each))
        alive.append(packed)
        return len(each), packed.buffer_info()[0]


class NativeBackend:
    def __init__(self, decoder: NativeDecoder, store: KVStore) -> None:
        self.decoder = decoder
        self.store = store
        self.program = Program(decoder.native, store)
        self._layers = decoder.graph.layers

    def __call__(self, batch: Batch) -> Logits:
        self.decoder.counted += len(batch.tokens) * self._layers
        return self.program(batch)

    def observe(self, batch: Batch, watched: Sequence[Watched]) -> tuple[Logits, Observed]:
        self.decoder.counted += len(batch.tokens) * self._layers
        return self.program.observe(batch, watched)


class RotaryCache:
    """The rotary cache: cosines and sines [n][rotations][2][D / 2] in fp32. sizes: D of each rotation.

    Only the first may depend on a maximum length; the rows of the lengths used last stay.
    """

    def __init__(self, sizes: Mapping[Rope, int]) -> None:
        self._tables = [RotaryTable(rope, size) for rope, size in sizes.items()]
        self._width = sum(sizes.values())
        self._rope = next(iter(sizes))
        self._fixed = angle_length(self._rope, 1) is None
        self._length = 0  # maximum length of the current rows
        self._others: dict[int, Floats] = {}  # rows by length, those used last at the end
        self._other_rows = 0
        self._set(_empty(0, self._width))

    def _set(self, rows: Floats) -> None:
        self._cached, self._count, self._address = rows, len(rows), place_of(rows)
        self._row_bytes = self._width * rows.itemsize

    def address(self, start: int, stop: int, limit: int, alive: list[object]) -> int:
        """The address of the rows [start, stop) in at most `limit` tokens. Arrays outside the cache go to `alive`."""
        if not self._fixed:
            length = angle_length(self._rope, limit)
            if length is not None and length != self._length:
                self._switch(length, alive)
        if stop > self._count:
            if start and stop > ROTARY_POSITIONS:
                rows = self._rows(start, stop, limit)
                alive.append(rows)
                return place_of(rows)
            alive.append(self._cached)
            self._set(self._rows(0, max(1024, 1 << (stop - 1).bit_length()), limit))
        return self._address + start * self._row_bytes

    def address_of(self, positions: NDArray[np.int64], limit: int, alive: list[object]) -> int:
        """The address of new rows of positions [3, n] in time, height and width."""
        rows = np.concatenate([table.rows(positions, limit).halves for table in self._tables], 1)
        alive.append(rows)
        return place_of(rows)

    def _switch(self, length: int, alive: list[object]) -> None:
        """Use the rows of another maximum length; drop the least recently used ones."""
        others = self._others
        others[self._length], self._other_rows, self._length = self._cached, self._other_rows + self._count, length
        found = others.pop(length, None)
        self._set(_empty(0, self._width) if found is None else found)
        self._other_rows -= self._count
        while self._other_rows > ROTARY_POSITIONS:
            dropped = others.pop(next(iter(others)))
            self._other_rows -= len(dropped)
            alive.append(dropped)

    def _rows(self, start: int, stop: int, limit: int) -> Floats:
        positions = np.arange(start, stop)
        return np.concatenate([table.rows(positions, limit).halves for table in self._tables], 1)


def _empty(*shape: int) -> Floats:
    return np.empty(shape, np.float32)


def at_edge(rope: Rope, head_size: int, window: AttentionWindow) -> Floats | None:
    """The rotation [1, D] of queries on sinks once the window is full. Models with sinks have no dynamic angles."""
    if not window.sinks or window.size is None:
        return None
    return RotaryTable(rope, head_size).rows(np.array([window.edge]), 0).halves
