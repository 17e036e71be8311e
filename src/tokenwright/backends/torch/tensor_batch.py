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
    rotations: Mapping[Rope, Rotation]  # for each of the model's rotations, [T, D]
    sink_rotations: Mapping[tuple[Rope, AttentionWindow], Rotation]  # of layers with sinks, [T, D]: of queries on sinks
    adapted: Mapping[int, torch.Tensor]  # number of an adapter -> the rows [n] of the requests that have it


class Batcher:
    """Converts batches to tensors, for one model over one store."""

    def __init__(self, graph: Graph, store: KVStore) -> None:
        self.store = store
        self.tables = {rope: RotaryTable(rope, graph.rotary_size, store.device) for rope in graph.ropes}
        layers = zip(graph.attention, store.specs, strict=True)
        self.sinking = {(op.rope, spec.window) for op, spec in layers if op.rope is not None and spec.window.sinks}

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
            rotations={rope: self._rotation(rope, positions, limits) for rope in self.tables},
            sink_rotations={
                (rope, window): self._rotation(rope, _on_sinks(window, positions), limits)
                for rope, window in self.sinking
            },
            adapted={
                adapter: torch.tensor(rows, device=store.device) for adapter, rows in batch.rows_of_adapters().items()
            },
        )

    def _rotation(self, rope: Rope, positions: Sequence[torch.Tensor], limits: Sequence[int]) -> Rotation:
        table = self.tables[rope]
        parts = [table.rows(where, limit) for where, limit in zip(positions, limits, strict=True)]
        return Rotation(torch.cat([part.cos for part in parts]), torch.cat([part.sin for part in parts]))  # [T, D]


def _on_sinks(window: AttentionWindow, positions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The positions of the queries on sink keys: they count the sinks and a full window, not expired tokens."""
    assert window.size is not None, "sinks lie before a window"
    return [where.clamp(max=window.sinks + window.size - 1) for where in positions]
