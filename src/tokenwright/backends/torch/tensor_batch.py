"""Converts batches to tensors for the decoder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tokenwright.arrays import Array
from tokenwright.backends.device import Device
from tokenwright.backends.torch.border import TensorRotation, tensor
from tokenwright.backends.torch.op_batch import OpBatcher
from tokenwright.cache import ChunkRows, KVStore
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import Rotation


class Batcher(OpBatcher):
    def __init__(self, graph: Graph, store: KVStore) -> None:
        super().__init__(graph, store)
        self.device = torch.device(store.memory.name)

    def values(self, array: Array) -> torch.Tensor:
        return tensor(array).to(self.device)

    def turns(self, rotation: Rotation) -> TensorRotation:
        return TensorRotation.of(rotation, self.device)

    def read(self, chunk: ChunkRows) -> ChunkRows:
        return tensors_of(chunk, self.device)


def tensors_of(chunk: ChunkRows, device: torch.device) -> ChunkRows:
    slots, positions = (tuple(tensor(one).to(device) for one in each) for each in (chunk.slots, chunk.positions))
    ends = None if chunk.ends is None else tensor(chunk.ends).to(device)
    return replace(chunk, slots=slots, positions=positions, ends=ends)


def on_device(device: Device) -> Callable[[Any], Any]:
    """A function that moves an array, a Rotation or a ChunkRows to a device."""
    place = torch.device(str(device))

    def moved(one: Any) -> Any:
        if isinstance(one, ChunkRows):
            return tensors_of(one, place)
        return TensorRotation.of(one, place) if isinstance(one, Rotation) else tensor(one).to(place)

    return moved
