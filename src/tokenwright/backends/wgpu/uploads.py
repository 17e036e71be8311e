"""Weights on a GPU: packed matrices as they are (`backends/packed.py`), all else in fp32."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.layout import Weights, xielu_of
from tokenwright.backends.native import structs
from tokenwright.backends.packed import LANES, Packed
from tokenwright.backends.wgpu.gpu import TABLE, Buffer, Gpu
from tokenwright.formats import TABLES

SMALL = 248  # numbers: what facts of 1 KiB hold
FORMATS = structs.FORMATS | {name: TABLE + index for index, name in enumerate(TABLES)}  # `packed.wgsl`


@dataclass(frozen=True, slots=True)
class BoundBlocks:
    """As many whole blocks as a kernel can bind. first: of its outputs."""

    codes: Buffer
    scales: Buffer
    first: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Uploaded:
    out: int
    inner: int
    depth: int
    slabs: int
    constants: Mapping[str, int | bool]  # of the kernels that read it
    group: int
    pieces: tuple[BoundBlocks, ...]
    bias: Buffer | None
    factors: Buffer | None

    @property
    def row_words(self) -> int:
        """Words of a quantised row of its input (`quantise.wgsl`)."""
        return self.depth // 4 + 2 * (self.depth // self.group)


def uploaded(gpu: Gpu, packed: Packed) -> Uploaded:
    blocks = -(-packed.out // LANES)
    codes, scales = packed.codes.reshape(blocks, -1), as_bytes(packed.scales).reshape(blocks, -1)
    step, pieces = max(1, gpu.most_bytes // codes.shape[1]), []
    for first in range(0, blocks, step):
        held = gpu.uploaded(codes[first : first + step])
        levels = gpu.uploaded(scales[first : first + step]) if packed.group else gpu.nothing
        outputs = min(packed.out, (first + step) * LANES) - first * LANES
        pieces.append(BoundBlocks(held, levels, first * LANES, outputs))
    bias, factors = (None if one is None else gpu.uploaded(one) for one in (packed.bias, packed.factors))
    constants = {"FORMAT": FORMATS[packed.format], "GROUP": packed.group, "SUPER": packed.super}
    constants |= {"MINIMA": packed.minima, "FACTORS": factors is not None}
    slabs = packed.depth // packed.slab.inputs
    return Uploaded(
        packed.out, packed.inner, packed.depth, slabs, constants, packed.group, tuple(pieces), bias, factors
    )


class WeightsOnGpu:
    """A graph's weights on the device, and numbers that kernels take as facts. Empties `weights`."""

    def __init__(self, gpu: Gpu, weights: Weights) -> None:
        self.matrices: dict[str, Uploaded] = {}
        self.dense: dict[str, Buffer] = {}
        self.small: dict[str, Array] = {}
        for name in list(weights):
            one = weights.pop(name)
            if isinstance(one, Packed):
                self.matrices[name] = uploaded(gpu, one)
                continue
            if one.size <= SMALL:
                self.small[name] = one
            self.dense[name] = gpu.uploaded(one.astype(np.float32))

    def numbers(self, name: str | None) -> list[float]:
        return [] if name is None else self.small[f"{name}.weight"].astype(np.float32).reshape(-1).tolist()

    def number(self, name: str | None) -> float:
        return [1.0, *self.numbers(name)][-1]

    def xielu(self, name: str | None) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if name is None else xielu_of(name, self.small)
