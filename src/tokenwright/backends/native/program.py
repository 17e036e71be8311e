"""A step as one call into the native kernels, over a graph that was compiled into structs once (`compile.py`).

It computes what `Decoder` computes with the same kernels called one by one, to the bit; there is no tap. What Python
does for a step is to say which tokens stand where and in which pages.
"""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import byref, c_double, c_int64

import torch

from tokenwright.backends import Kernels
from tokenwright.backends.layout import Weights
from tokenwright.backends.native import library as lib
from tokenwright.backends.native.compile import NativeModel
from tokenwright.backends.native.kernels import NativeKernels, kv_layer
from tokenwright.backends.torch.batch import Piece
from tokenwright.backends.torch.decoder import Decoder, Logits
from tokenwright.cache import KVStore, Table
from tokenwright.config import DynamicScaling, Rope
from tokenwright.engine import Chunk
from tokenwright.engine.page_table import Table as PageTable
from tokenwright.errors import CapacityError
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable

assert ctypes.sizeof(lib.Span) == 6 * 8, "a span is six words"
MOST_CACHED = 1 << 16  # positions whose cosines and sines are kept


class NativeDecoder(Decoder):
    """A decoder over packed weights whose steps can also run as a `Program`; called op by op, it can be looked at.

    kernels: the native ones, or what counts their calls.
    """

    def __init__(self, graph: Graph, kernels: Kernels, native: NativeKernels, weights: Weights) -> None:
        self.native = NativeModel(graph, native, weights)
        super().__init__(graph, kernels, weights)


class Program:
    """Steps of one model over one store."""

    def __init__(self, model: NativeModel, store: KVStore) -> None:
        layers = model.graph.layers
        self.model = model
        self.store = store
        self._kv = (lib.KVLayer * layers)(*(kv_layer(store.view(i)) for i in range(layers)))
        rope = model.graph.positions
        self._rotary = RotaryCache(rope, model.graph.head_size) if isinstance(rope, Rope) else None
        reaches = [spec.reach for spec in store.specs if spec.reach.sinks]
        self._edge = max((reach.sinks + (reach.window or 0) for reach in reaches), default=0)

    def __call__(self, pieces: Sequence[Piece | Chunk], wanted: Sequence[int]) -> Logits:
        """Compute the pieces, store their K and V, and return the logits of the wanted rows (counted over all pieces).

        Raises CapacityError where there is no memory for the numbers in between.
        """
        tokens = array("q", [token for piece in pieces for token in piece.tokens])
        alive: list[object] = []  # what the spans point to
        spans = self._spans(pieces, alive)
        count, model = len(wanted), self.model
        rows, best, totals = array("q", wanted), (c_int64 * count)(), (c_double * count)()
        logits = torch.empty(count, model.graph.vocab_size)
        batch = lib.Batch(
            len(tokens),
            tokens.buffer_info()[0],
            len(pieces),
            spans.buffer_info()[0],
            self.store.page_size,
            ctypes.addressof(self._kv),
            count,
            rows.buffer_info()[0],
            logits.data_ptr(),
            ctypes.addressof(best),
            ctypes.addressof(totals),
        )
        kernels = model.kernels
        if kernels.library.tw_forward(kernels.handle, byref(model.struct), byref(batch), torch.get_num_threads()):
            raise CapacityError(f"there is no memory to compute {len(tokens)} tokens at once; lower token_budget")
        return Logits(logits, tuple(best), tuple(totals))

    def _spans(self, pieces: Sequence[Piece | Chunk], alive: list[object]) -> "array[int]":
        """What stands where, each piece as the words of a `lib.Span`: filling structs takes several times as long."""
        pages = [_pages(table) for piece in pieces for table in piece.tables]
        tables = array("q", [one.buffer_info()[0] for one in pages])
        alive += (pages, tables)
        words: list[int] = []
        row, at = 0, tables.buffer_info()[0]
        for piece in pieces:
            rotation = sink_rotation = 0
            if self._rotary is not None:
                rotation = self._rotary.address(piece.start, piece.stop, piece.limit, alive)
                sink_rotation = self._rotary.address(0, self._edge, piece.limit, alive) if self._edge else 0
            words += (row, len(piece.tokens), piece.start, rotation, sink_rotation, at)
            row += len(piece.tokens)
            at += tables.itemsize * len(piece.tables)
        return array("q", words)


def _pages(table: Table) -> "array[int]":
    """A page table as C ints, by the page of the text."""
    if isinstance(table, PageTable):
        return table.pages
    pages = array("i", [PageTable.ABSENT]) * (max(table, default=-1) + 1)
    for page, found in table.items():
        pages[page] = found
    return pages


class RotaryCache:
    """Cosines and sines of positions, [n][2][D / 2], kept for the next step."""

    def __init__(self, rope: Rope, head_size: int) -> None:
        self._table = RotaryTable(rope, head_size, torch.device("cpu"))
        self._half = head_size // 2
        self._by_limit = isinstance(rope.scaling, DynamicScaling)
        self._limit = 0
        self._set(torch.empty(0, 2 * self._half))

    def _set(self, rows: torch.Tensor) -> None:
        self._cached, self._count, self._address = rows, len(rows), rows.data_ptr()  # once: to ask a tensor takes time
        self._row_bytes = 2 * self._half * rows.itemsize

    def address(self, start: int, stop: int, limit: int, alive: list[object]) -> int:
        """Where the rows of [start, stop) lie; `alive` is given what must live as long."""
        if self._by_limit and limit != self._limit:
            self._set(self._cached[:0])
            self._limit = limit
        if start and stop > MOST_CACHED:
            rows = self._rows(start, stop, limit)
            alive.append(rows)
            return rows.data_ptr()
        if stop > self._count:
            self._set(self._rows(0, max(1024, 1 << (stop - 1).bit_length()), limit))
        alive.append(self._cached)
        return self._address + start * self._row_bytes

    def _rows(self, start: int, stop: int, limit: int) -> torch.Tensor:
        rotation = self._table.rows(torch.arange(start, stop), limit)
        return torch.cat((rotation.cos[:, : self._half], rotation.sin[:, : self._half]), 1)
