"""The bias of keys: a quantised cache stores keys without it (kernels/attention/key_bias.h)."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.config import Rope
from tokenwright.models.rotary import RotaryTable

BLOCK, _PLACES = 64, 80  # positions in a block; the same padded, as in api.h


class BlockRotations:
    """Makes a position's rotation from its block's start and its place in it. Angles must not depend on a length."""

    def __init__(self, rope: Rope, size: int) -> None:
        self.table = RotaryTable(rope, size)
        self._halves: Floats = np.empty((0, size), np.float32)
        places = self.table.rows(np.arange(BLOCK), 0).halves
        factors = np.tile(places[:1, : size // 2], 2)  # cosines of 0: applies the rotation's factor once
        self.places: Floats = np.zeros((size, _PLACES), np.float32)  # [D, 80]: cosines and sines of the places
        self.places[:, :BLOCK] = (places / factors).T

    def blocks(self, stop: int) -> Floats:
        """Cosines and sines [n, D] of the first positions of at least the blocks before position `stop`."""
        found = self._halves
        if stop > BLOCK * len(found):
            first = np.arange(0, max(1024, 1 << (stop - 1).bit_length()), BLOCK)
            self._halves = found = self.table.rows(first, 0).halves
        return found


block_rotations = cache(BlockRotations)


@dataclass(frozen=True, eq=False)
class KeyBias:
    numbers: Floats  # [G, D], of a layer's keys
    rotations: BlockRotations

    def of_group(self, group: int) -> Self:
        return replace(self, numbers=self.numbers[group : group + 1])

    def at(self, positions: NDArray[np.int64]) -> Floats:
        """The bias [t, G, D] of keys at these positions, rotated."""
        rotation = self.rotations.table.rows(positions, 0)
        first, second = np.split(self.numbers, 2, -1)
        turned = np.concatenate((-second, first), -1)
        biases: Floats = self.numbers * rotation.cos[:, None] + turned * rotation.sin[:, None]
        return biases
