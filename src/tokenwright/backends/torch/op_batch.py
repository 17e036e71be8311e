"""Converts a batch to arrays or tensors for the op-by-op decoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, Floats
from tokenwright.backends.adapters import Beside
from tokenwright.backends.torch.kernels import Kernels, Linear, Turns, Values
from tokenwright.cache import ChunkRows, KVStore
from tokenwright.config import Rope
from tokenwright.engine import Batch
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.models.graph import Deepstack, Graph
from tokenwright.models.rotary import RotaryTable, Rotation
from tokenwright.models.taps import Tap


@dataclass(frozen=True, slots=True)
class OpBatch:
    """The T tokens of one step, the rows of all chunks one after another."""

    tokens: Values  # [T]
    positions: Values  # [T]
    slots: tuple[Values, ...]  # [T] for each group
    chunks: tuple[ChunkRows, ...]
    rotations: Mapping[Rope, Turns]  # [T, D]
    sink_rotations: Mapping[tuple[Rope, AttentionWindow], Turns]  # [T, D] of queries on sinks
    adapted: Mapping[int, Values]  # adapter -> rows [n]
    before: Values | None = None  # [T, width], for a NextInput
    inserted: Sequence[tuple[slice, Values]] = ()  # where, and rows [n, width] in place of tokens' embeddings
    deep: Sequence[Sequence[tuple[slice, Values]]] = ()  # where, and the rows that each Deepstack adds

    def unstored(self, store: KVStore) -> Self:
        """The same with K and V going to scratch slots."""
        return replace(self, slots=tuple(one * 0 + store.scratch(group) for group, one in enumerate(self.slots)))


class OpBatcher:
    """Converts batches for one model over one store to arrays, which subclasses convert in `values` and `turns`."""

    def __init__(self, graph: Graph, store: KVStore) -> None:
        self.store = store
        self.tables = {rope: RotaryTable(rope, size) for rope, size in graph.rotary_sizes.items()}
        layers = zip(graph.attention, store.specs, strict=True)
        self.deep = sum(isinstance(op, Deepstack) for op in graph.blocks)
        self.sinking = {(op.rope, spec.window) for op, spec in layers if op.rope is not None and spec.window.sinks}

    def __call__(self, batch: Batch) -> OpBatch:
        store, groups = self.store, len(self.store.groups)
        chunks: list[ChunkRows] = []
        positions: list[NDArray[np.int64]] = []
        turning: list[NDArray[np.int64]] = []  # [n], or [3, n] in time, height and width
        slots: list[list[NDArray[np.int64]]] = []  # of each chunk and group
        limits: list[int] = []
        ends = {index: np.array(one, np.int64) for index, one in batch.ends}
        axes = {index: np.array(each, np.int64) for index, each in batch.axes}  # [3, n]
        for index, (row, rows, start, limit) in enumerate(batch.each_chunk()):
            tables = batch.tables[index * groups : (index + 1) * groups]
            written = range(start, start + rows)
            chunk = store.chunk_rows(tables, range(row, row + rows), start)
            chunks.append(self.read(replace(chunk, ends=ends.get(index))))
            slots.append([store.slots(group, pages, written) for group, pages in enumerate(tables)])
            positions.append(np.arange(start, start + rows))
            turning.append(axes.get(index, positions[-1]))
            limits.append(limit)
        return OpBatch(
            tokens=self.values(np.array(batch.tokens, np.int64)),
            positions=self.values(np.concatenate(positions)),
            slots=tuple(self.values(np.concatenate(each)) for each in zip(*slots, strict=True)),
            chunks=tuple(chunks),
            rotations={rope: self._rotation(rope, turning, limits) for rope in self.tables},
            sink_rotations={
                (rope, window): self._rotation(rope, [where.clip(max=window.edge) for where in positions], limits)
                for rope, window in self.sinking
            },
            before=None if batch.before is None else self.values(batch.before),
            inserted=self._inserted(batch.inserted, 0),
            deep=[self._inserted(batch.inserted, 1 + layer) for layer in range(self.deep)],
            adapted={adapter: self.values(np.array(rows)) for adapter, rows in batch.rows_of_adapters().items()},
        )

    def _inserted(self, rows: Sequence[tuple[int, Floats]], index: int) -> list[tuple[slice, Values]]:
        """The rows number `index` of pictures' [1 + deepstacks, n, width]; number 0 are embeddings."""
        return [(slice(row, row + one.shape[1]), self.values(one[index])) for row, one in rows]

    def values(self, array: Array) -> Values:
        return array

    def turns(self, rotation: Rotation) -> Turns:
        return rotation

    def read(self, chunk: ChunkRows) -> ChunkRows:
        return chunk

    def _rotation(self, rope: Rope, positions: Sequence[NDArray[np.int64]], limits: Sequence[int]) -> Turns:
        table = self.tables[rope]
        parts = [table.rows(where, limit) for where, limit in zip(positions, limits, strict=True)]
        cos, sin = (np.concatenate(each) for each in zip(*((one.cos, one.sin) for one in parts), strict=True))
        return self.turns(Rotation(cos, sin))  # [T, D]


@dataclass(frozen=True, slots=True)
class ForwardState:
    """The state of a pass: the stream before an op that keeps it, the layers' inputs, several streams, and clips."""

    batch: OpBatch
    store: KVStore
    tap: Tap
    adapters: Beside = field(default_factory=dict)
    before: list[Values] = field(default_factory=list)
    inputs: list[Values] = field(default_factory=list)
    streams: list[Values] = field(default_factory=list)
    clips: Mapping[str, Callable[[Values, Callable[[Values], Values]], Values]] = field(default_factory=dict)

    def linear(self, kernels: Kernels, x: Values, weight: Linear, name: str) -> Values:
        """[T, in] -> [T, out] by the matrix `name`, and adapters. A row's result must depend only on that row."""
        if name in self.clips:
            return self.clips[name](x, lambda read: kernels.linear(read, weight))
        y = kernels.linear(x, weight)
        for adapter, rows in self.batch.adapted.items():
            update = self.adapters.get(name, {}).get(adapter)
            if update is not None:
                y[rows] += kernels.linear(kernels.linear(x[rows], update.down), update.up)
        return y
