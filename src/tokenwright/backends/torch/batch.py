"""A batch as tensors: the decoder's input beside the weights and the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenwright.cache import ChunkRows, KVStore
from tokenwright.config import Rope
from tokenwright.engine import Batch
from tokenwright.engine.window import AttentionWindow
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable, Rotation


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """The T tokens of one step, the rows of all chunks one after another, on the store's device."""

    tokens: torch.Tensor  # [T] ids
    positions: torch.Tensor  # [T]
    slots: tuple[torch.Tensor, ...]  # for each group, [T]: the slots for their K and V
    chunks: tuple[ChunkRows, ...]
    rotation: Rotation  # [T, D]; empty under learned positions
    sink_rotations: Mapping[AttentionWindow, Rotation]  # for each window with sinks, [T, D]: for queries on sinks
    adapted: Mapping[int, torch.Tensor]  # number of an adapter -> the rows [n] of the requests that have it


class Batcher:
    """Converts batches to tensors, for one model over one store."""

    def __init__(self, graph: Graph, store: KVStore) -> None:
        self.store = store
        rope = graph.positions
        self.table = RotaryTable(rope, graph.head_size, store.device) if isinstance(rope, Rope) else None
        self.sinking = {spec.window for spec in store.specs if spec.window.sinks}

    def __call__(self, batch: Batch) -> TorchBatch:
        store, groups = self.store, len(self.store.groups)
        chunks: list[ChunkRows] = []
        positions: list[torch.Tensor] = []  # of each chunk
        slots: list[list[torch.Tensor]] = []  # of each chunk, for each group
        limits: list[int] = []
        for index, (row, rows, start, limit) in enumerate(batch.each_chunk()):
            tables = batch.tables[index * groups : (index + 1) * groups]
            written = range(start, start + rows)
            chunks.append(store.chunk_rows(tables, range(row, row + rows), start))
            slots.append([store.slots(group, pages, written) for group, pages in enumerate(tables)])
            positions.append(torch.arange(start, start + rows))
            limits.append(limit)
        return TorchBatch(
            tokens=torch.frombuffer(batch.tokens, dtype=torch.int64).to(store.device),
            positions=torch.cat(positions).to(store.device),
            slots=tuple(torch.cat(each).to(store.device) for each in zip(*slots, strict=True)),
            chunks=tuple(chunks),
            rotation=self._rotation(positions, limits),
            sink_rotations={window: self._sink_rotation(window, positions, limits) for window in self.sinking},
            adapted=self._adapted(batch),
        )

    def _adapted(self, batch: Batch) -> Mapping[int, torch.Tensor]:
        rows: dict[int, list[int]] = {}
        for adapter, each in batch.adapters:
            rows.setdefault(adapter, []).extend(each)
        return {adapter: torch.tensor(each, device=self.store.device) for adapter, each in rows.items()}

    def _rotation(self, positions: Sequence[torch.Tensor], limits: Sequence[int]) -> Rotation:
        if self.table is None:
            empty = torch.empty(0)
            return Rotation(empty, empty)
        parts = [self.table.rows(where, limit) for where, limit in zip(positions, limits, strict=True)]
        return Rotation(torch.cat([part.cos for part in parts]), torch.cat([part.sin for part in parts]))  # [T, D]

    def _sink_rotation(
        self, window: AttentionWindow, positions: Sequence[torch.Tensor], limits: Sequence[int]
    ) -> Rotation:
        """The rotation of the queries on sink keys: positions count the sinks and a full window, not expired tokens."""
        assert window.size is not None, "sinks lie before a window"
        return self._rotation([where.clamp(max=window.sinks + window.size - 1) for where in positions], limits)
