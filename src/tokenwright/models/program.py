"""A step as one call into the native kernels: the decoder's layers, told once as structs and run again and again.

It computes what `Decoder` computes with the same kernels called one by one, to the bit; there is no tap. What Python
does for a step is to say which tokens stand where and in which pages.
"""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import byref, c_double, c_int64

import torch

from tokenwright.cache import KVStore, Table
from tokenwright.config import DynamicScaling, Learned, ModelConfig, Rope
from tokenwright.engine import Chunk
from tokenwright.engine.table import Table as PageTable
from tokenwright.kernels import Kernels
from tokenwright.kernels import native_library as lib
from tokenwright.kernels.native import NativeKernels, Workspace, kv_layer, matrix
from tokenwright.kernels.weights import Packed
from tokenwright.models.batch import Piece
from tokenwright.models.decoder import Decoder, Logits
from tokenwright.models.layout import Weights
from tokenwright.models.parts import RotaryTable

assert ctypes.sizeof(lib.Span) == 6 * 8, "a span is six words"
MOST_TURNS = 1 << 16  # positions whose cosines and sines are kept


class NativeModel:
    """A model's weights as the kernels read them. It keeps the tensors alive that it points into."""

    def __init__(self, config: ModelConfig, kernels: NativeKernels, weights: Weights) -> None:
        self.config = config
        self.kernels = kernels
        self._weights = dict(weights)
        self._layers = (lib.Layer * config.layers)(*map(self._layer, range(config.layers)))
        heads = lib.Heads(config.heads, config.kv_heads, config.head_size, config.head_size**-0.5)
        self.struct = lib.Model(
            config.width,
            config.mlp_width,
            config.vocab_size,
            heads,
            lib.ACTIVATIONS[config.activation],
            config.gated,
            config.norm_eps,
            self._matrix("embed"),
            self._address("positions.weight"),
            config.layers,
            self._layers,
            self._norm("norm"),
            self._matrix("head"),
        )

    def _layer(self, index: int) -> lib.Layer:
        at, config = f"layers.{index}", self.config
        return lib.Layer(
            self._norm(f"{at}.attention_norm"),
            self._matrix(f"{at}.attention.qkv"),
            self._address(f"{at}.attention.q_norm.weight"),
            self._address(f"{at}.attention.k_norm.weight"),
            self._matrix(f"{at}.attention.o"),
            self._norm(f"{at}.mlp_norm"),
            self._matrix(f"{at}.mlp.gate_up" if config.gated else f"{at}.mlp.up"),
            self._matrix(f"{at}.mlp.down"),
            config.rotary[index] and not isinstance(config.positions, Learned),
        )

    def _matrix(self, name: str) -> lib.Matrix:
        packed = self._weights[name]
        assert isinstance(packed, Packed), "matrices are packed"
        return matrix(packed)

    def _address(self, name: str) -> int | None:
        tensor = self._weights.get(name)
        assert not isinstance(tensor, Packed), "norms and positions are not packed"
        return lib.address(tensor)

    def _norm(self, name: str) -> lib.Norm:
        return lib.Norm(self._address(f"{name}.weight"), self._address(f"{name}.bias"), self.config.norm_eps)


class NativeDecoder(Decoder):
    """A decoder over packed weights whose steps can also run as a `Program`; called as one, it can be looked at.

    kernels: the native ones, or what counts their calls.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, native: NativeKernels, weights: Weights) -> None:
        self.native = NativeModel(config, native, weights)
        super().__init__(config, kernels, weights)


class Program:
    """Steps of one model over one store."""

    def __init__(self, model: NativeModel, store: KVStore) -> None:
        config = model.config
        self.model = model
        self.store = store
        self._workspace = Workspace(model.kernels.library)
        self._kv = (lib.KVLayer * config.layers)(*(kv_layer(store.view(i)) for i in range(config.layers)))
        self._turns = _Turns(config) if isinstance(config.positions, Rope) else None
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
        logits = torch.empty(count, model.config.vocab_size)
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
        kernels, threads = model.kernels, torch.get_num_threads()
        self._workspace.run(
            lambda memory: kernels.library.tw_forward(
                kernels.handle, memory, byref(model.struct), byref(batch), threads
            ),
            f"there is no memory to compute {len(tokens)} tokens at once; lower token_budget",
        )
        return Logits(logits, tuple(best), tuple(totals))

    def _spans(self, pieces: Sequence[Piece | Chunk], alive: list[object]) -> "array[int]":
        """What stands where, each piece as the words of a `lib.Span`: filling structs takes several times as long."""
        pages = [_pages(table) for piece in pieces for table in piece.tables]
        tables = array("q", [one.buffer_info()[0] for one in pages])
        alive += (pages, tables)
        words: list[int] = []
        row, at = 0, tables.buffer_info()[0]
        for piece in pieces:
            turn = sink_turn = 0
            if self._turns is not None:
                turn = self._turns.address(piece.start, piece.stop, piece.limit, alive)
                sink_turn = self._turns.address(0, self._edge, piece.limit, alive) if self._edge else 0
            words += (row, len(piece.tokens), piece.start, turn, sink_turn, at)
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


class _Turns:
    """Cosines and sines of positions, [n][2][D / 2], kept for the next step."""

    def __init__(self, config: ModelConfig) -> None:
        assert isinstance(config.positions, Rope), "learned positions turn nothing"
        self._table = RotaryTable(config.positions, config.head_size, torch.device("cpu"))
        self._half = config.head_size // 2
        self._by_limit = isinstance(config.positions.scaling, DynamicScaling)
        self._limit = 0
        self._keep(torch.empty(0, 2 * self._half))

    def _keep(self, rows: torch.Tensor) -> None:
        self._kept, self._count, self._address = rows, len(rows), rows.data_ptr()  # once: to ask a tensor takes time
        self._row_bytes = 2 * self._half * rows.itemsize

    def address(self, start: int, stop: int, limit: int, alive: list[object]) -> int:
        """Where the rows of [start, stop) lie; `alive` is given what must live as long."""
        if self._by_limit and limit != self._limit:
            self._keep(self._kept[:0])
            self._limit = limit
        if start and stop > MOST_TURNS:
            rows = self._rows(start, stop, limit)
            alive.append(rows)
            return rows.data_ptr()
        if stop > self._count:
            self._keep(self._rows(0, max(1024, 1 << (stop - 1).bit_length()), limit))
        alive.append(self._kept)
        return self._address + start * self._row_bytes

    def _rows(self, start: int, stop: int, limit: int) -> torch.Tensor:
        turned = self._table.rows(torch.arange(start, stop), limit)
        return torch.cat((turned.cos[:, : self._half], turned.sin[:, : self._half]), 1)
