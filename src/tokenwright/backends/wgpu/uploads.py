"""Weights on a GPU: packed matrices as they are (`backends/packed.py`), all else in fp32."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenwright.arrays import Array, as_bytes
from tokenwright.backends.layout import Weights, xielu_of
from tokenwright.backends.packed import LANES, Packed
from tokenwright.backends.wgpu.gpu import Buffer, Gpu
from tokenwright.errors import RequestError

FORMATS: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}


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
    format: int
    group: int
    pieces: tuple[BoundBlocks, ...]
    bias: Buffer | None

    @property
    def row_words(self) -> int:
        """Words of a quantised row of its input (`quantise.wgsl`)."""
        return self.depth // 4 + 2 * (self.depth // self.group)


def uploaded(gpu: Gpu, packed: Packed, name: str) -> Uploaded:
    """Raises RequestError for a format without kernels."""
    if packed.format not in FORMATS or packed.super or packed.minima:
        raise RequestError(
            f"{packed.form} weights, such as those of {name}, have no kernels on a GPU yet; give weights int8 or int4, "
            "or use device cpu",
            *("weights", "device"),
        )
    blocks = -(-packed.out // LANES)
    codes, scales = packed.codes.reshape(blocks, -1), as_bytes(packed.scales).reshape(blocks, -1)
    step, pieces = max(1, gpu.most_bytes // codes.shape[1]), []
    for first in range(0, blocks, step):
        held = gpu.uploaded(codes[first : first + step])
        levels = gpu.uploaded(scales[first : first + step]) if packed.group else gpu.nothing
        outputs = min(packed.out, (first + step) * LANES) - first * LANES
        pieces.append(BoundBlocks(held, levels, first * LANES, outputs))
    bias = None if packed.bias is None else gpu.uploaded(packed.bias)
    form, slabs = FORMATS[packed.format], packed.depth // packed.slab.inputs
    return Uploaded(packed.out, packed.inner, packed.depth, slabs, form, packed.group, tuple(pieces), bias)


class WeightsOnGpu:
    """A graph's weights on the device, and numbers that kernels take as facts. Empties `weights`."""

    def __init__(self, gpu: Gpu, weights: Weights) -> None:
        self.matrices: dict[str, Uploaded] = {}
        self.dense: dict[str, Buffer] = {}
        self.small: dict[str, Array] = {}
        for name in list(weights):
            one = weights.pop(name)
            if isinstance(one, Packed):
                self.matrices[name] = uploaded(gpu, one, name)
                continue
            if one.size <= 1:
                self.small[name] = one
            self.dense[name] = gpu.uploaded(one.astype(np.float32))

    def number(self, name: str | None) -> float:
        return 1.0 if name is None else float(self.small[f"{name}.weight"].reshape(-1)[0])

    def xielu(self, name: str | None) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if name is None else xielu_of(name, self.small)
