"""LoRA adapters computed beside a model's weights: y += (x A^T) (scale B)^T, A [rank, in], B [out, rank]."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tokenwright.arrays import Array, Floats, widened
from tokenwright.backends.packed import Packed, packed_sizes
from tokenwright.formats import WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """An update scale B A of a linear layer's weight [out, in], in fp32: down is A [rank, in], up B [out, rank]."""

    down: Floats
    up: Floats
    scale: float

    def added_to(self, rows: Array, first: int) -> Floats:
        """Rows of the layer's weight from `first` on, [n, in] of any dtype, with the update, in fp32."""
        added = self.up[first : first + len(rows)] @ self.down
        return widened(rows) + np.float32(self.scale) * added


class LowRank(NamedTuple):
    """An update up(down(x)) of a whole matrix, in the kernels' weights: down [ranks, in], up [out, ranks] scaled."""

    down: Any
    up: Any


Updates = Mapping[str, Update]
Beside = Mapping[str, Mapping[int, LowRank]]  # matrix -> adapter -> update
NO_ADAPTERS: Beside = MappingProxyType({})
Make = Callable[[Floats], Any]


def beside(graph: Graph, adapters: Mapping[int, Updates], make: Make) -> Beside:
    found: dict[str, dict[int, LowRank]] = {}
    for name, matrix in graph.matrices.items():
        for number, updates in adapters.items():
            if any(part in updates for part, _ in matrix.parts):
                found.setdefault(name, {})[number] = _joined(matrix, updates, make)
    return found


def beside_bytes(graph: Graph, updates: Updates) -> int:
    """Bytes of an adapter kept beside the weights, with native kernels."""
    total, form = 0, WeightFormat("float32")
    for matrix in graph.matrices.values():
        if ranks := sum(len(updates[part].down) for part, _ in matrix.parts if part in updates):
            total += packed_sizes(ranks, matrix.inner, form)[0] + packed_sizes(matrix.out, ranks, form)[0]
    return total


def not_beside(graph: Graph, updates: Updates) -> list[str]:
    """The sorted linear layers that only a merge can update: the experts' and the head."""
    able = [matrix for op in graph.blocks if op.adaptable for matrix in op.matrices]
    return sorted(updates.keys() - {part for matrix in able for part, _ in matrix.parts})


def _joined(matrix: Matrix, updates: Updates, make: Make) -> LowRank:
    """Join the parts' updates: A stacked, B on the diagonal."""
    places, first = [], 0
    for part, out in matrix.parts:
        if part in updates:
            places.append((first, updates[part]))
        first += out
    up, at = np.zeros((matrix.out, sum(len(one.down) for _, one in places)), np.float32), 0
    for row, one in places:
        rank = len(one.down)
        up[row : row + len(one.up), at : at + rank] = np.float32(one.scale) * one.up
        at += rank
    return LowRank(make(np.concatenate([one.down for _, one in places])), make(up))


def packed(weight: Floats) -> Packed:
    made = Packed.empty(weight.shape[0], weight.shape[1], WeightFormat("float32"))
    made.pack_rows(0, weight)
    return made
