"""A batch as tensors: the decoder's input beside the weights and the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tokenwright.backends.torch.border import TensorRotation, tensor
from tokenwright.cache import ChunkRows, KVStore
from tokenwright.config import Rope
from tokenwright.engine import Batch
from tokenwright.engine.window import AttentionWindow
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """The T tokens of one step, the rows of all chunks one after another, on the store's device."""

    tokens: torch.Tensor  # [T] ids
    positions: torch.Tensor  # [T]
    slots: tuple[torch.Tensor, ...]  # for each group, [T]: the slots for their K and V
    chunks: tuple[ChunkRows, ...]
    rotations: Mapping[Rope, TensorRotation]  # for each of the model's rotations, [T, D]
    sink_rotations: Mapping[tuple[Rope, AttentionWindow], TensorRotation]  # [T, D], of queries on sinks
    adapted: Mapping[int, torch.Tensor]  # number of an adapter -> the rows [n] of the requests that have it


class Batcher:
    """Converts batches to tensors, for one model over one store."""

    def __init__(self, graph: Graph, store: KVStore) -> None:
        self.store = store
        self.device = torch.device(store.memory.name)
        self.tables = {rope: RotaryTable(rope, graph.rotary_size) for rope in graph.ropes}
        layers = zip(graph.attention, store.specs, strict=True)
        self.sinking = {(op.rope, spec.window) for op, spec in layers if op.rope is not None and spec.window.sinks}

    def __call__(self, batch: Batch) -> TorchBatch:
        store, groups, device = self.store, len(self.store.groups), self.device
        chunks: list[ChunkRows] = []
        positions: list[NDArray[np.int64]] = []  # of each chunk
        slots: list[list[NDArray[np.int64]]] = []  # of each chunk, for each group
        limits: list[int] = []
        for index, (row, rows, start, limit) in enumerate(batch.each_chunk()):
            tables = batch.tables[index * groups : (index + 1) * groups]
            written = range(start, start + rows)
            chunks.append(tensors_of(store.chunk_rows(tables, range(row, row + rows), start), device))
            slots.append([store.slots(group, pages, written) for group, pages in enumerate(tables)])
            positions.append(np.arange(start, start + rows))
            limits.append(limit)
        return TorchBatch(
            tokens=torch.frombuffer(batch.tokens, dtype=torch.int64).to(device),
            positions=tensor(np.concatenate(positions)).to(device),
            slots=tuple(tensor(np.concatenate(each)).to(device) for each in zip(*slots, strict=True)),
            chunks=tuple(chunks),
            rotations={rope: self._rotation(rope, positions, limits) for rope in self.tables},
            sink_rotations={
                (rope, window): self._rotation(rope, _on_sinks(window, positions), limits)
                for rope, window in self.sinking
            },
            adapted={adapter: torch.tensor(rows, device=device) for adapter, rows in batch.rows_of_adapters().items()},
        )

    def rotated(self, rope: Rope, positions: torch.Tensor, limit: int) -> TensorRotation:
        """The rotation [n, D] of positions [n]."""
        return TensorRotation.of(self.tables[rope].rows(positions.cpu().numpy(), limit), self.device)

    def _rotation(self, rope: Rope, positions: Sequence[NDArray[np.int64]], limits: Sequence[int]) -> TensorRotation:
        table = self.tables[rope]
        parts = [table.rows(where, limit) for where, limit in zip(positions, limits, strict=True)]
        cos, sin = (tensor(np.concatenate(each)) for each in zip(*((one.cos, one.sin) for one in parts), strict=True))
        return TensorRotation(cos.to(self.device), sin.to(self.device))  # [T, D]


def tensors_of(chunk: ChunkRows, device: torch.device) -> ChunkRows:
    """A chunk whose slots and positions are tensors on a device."""
    slots, positions = (tuple(tensor(one).to(device) for one in each) for each in (chunk.slots, chunk.positions))
    return replace(chunk, slots=slots, positions=positions)


def _on_sinks(window: AttentionWindow, positions: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The positions of the queries on sink keys: they count the sinks and a full window, not expired tokens."""
    assert window.size is not None, "sinks lie before a window"
    return [where.clip(max=window.sinks + window.size - 1) for where in positions]
