"""Small floats or bytes with scales: fine-grained fp8, compressed-tensors', bitsandbytes' int8, OCP's MXFP4."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tokenwright.arrays import Array, Bytes, Floats
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import Decoded, Parts
from tokenwright.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Scaled(Decoded):
    """fp8 or int8 numbers with a scale for the matrix, for each output, or for blocks of outputs and inputs."""

    title: str
    dtype: str  # of the numbers, safetensors' name
    scale: str  # the name of the part with the scales
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, if the scales have such a shape
    factor: float = 1.0  # of every scale
    small: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        weight, scale, zero = parts["weight"], parts.get(self.scale), parts.get("weight_zero_point")
        if scale is None or weight.dtype != self.dtype or len(weight.shape) != 2:
            return None
        fits = self._blocks(scale.shape, weight.shape) is not None
        return weight.shape if fits and (zero is None or zero.shape == scale.shape) else None

    def numbers(self, parts: Parts) -> Floats:
        weight: Floats = parts["weight"].astype(np.float32)
        if "weight_zero_point" in parts:
            weight = weight - self._spread(parts["weight_zero_point"].astype(np.float32), weight.shape)
        return weight * self._spread(parts[self.scale].astype(np.float32) * np.float32(self.factor), weight.shape)

    def _blocks(self, scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The outputs and inputs that share a scale, from the shapes of scales and matrix; None if they do not fit."""
        out, inner = shape
        if prod(scales) == 1:
            return out, inner
        if scales in ((out,), (out, 1)):
            return 1, inner
        if len(scales) != 2 or 0 in scales:
            return None
        found = []
        for axis, (size, count) in enumerate(zip(shape, scales, strict=True)):
            whole = (size // count,) if size % count == 0 else ()
            said = () if self.block is None else (self.block[axis],)
            found.append(next((one for one in (*said, 128, *whole, 64, 32) if -(-size // one) == count), 0))
        return (found[0], found[1]) if all(found) else None

    def _spread(self, scale: Floats, shape: tuple[int, ...]) -> Floats:
        """Scales for each number of a matrix [out, in], or such that they broadcast to it."""
        blocks = self._blocks(scale.shape, shape)
        assert blocks is not None, "the shapes were checked"
        if scale.ndim < 2:
            return scale.reshape(-1, 1)
        rows = scale.repeat(blocks[0], 0)[: shape[0]]
        return rows if blocks[1] >= shape[1] else rows.repeat(blocks[1], 1)[:, : shape[1]]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 (OCP microscaling): 4-bit floats, two to a byte, the lower first; 32 of them share a power of two.

    blocks: uint8 [experts, out, groups, 16]; scales: uint8 [experts, out, groups], exponents with 127 added. The
    experts are one matrix, one after another. Twice a number is whole, so int8 holds all but extreme exponents.
    """

    title: str = "MXFP4"
    small: tuple[str, ...] = ("scales",)

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        blocks, scales = parts["blocks"], parts.get("scales")
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or len(blocks.shape) != 4:
            return None
        experts, out, groups, half = blocks.shape
        return (experts * out, groups * 32) if scales.shape == (experts, out, groups) and half == 16 else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002
        exponents = small["scales"]
        fits = bool((exponents >= 128 - 24).all()) and bool((exponents <= 128 + 15).all())  # powers of two in float16
        return WeightFormat("int8", 32) if fits else None

    def numbers(self, parts: Parts) -> Floats:
        codes, exponents = self._doubled(parts), self._exponents(parts)
        numbers = np.ldexp(codes.astype(np.float32).reshape(*exponents.shape, 32), exponents[..., None])
        return numbers.reshape(len(codes), -1)

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:
        assert form == WeightFormat("int8", 32), "it was offered"
        scales = np.ldexp(np.float32(1), self._exponents(parts)).astype(np.float16)
        return (self._doubled(parts) + 128).astype(np.uint8), scales

    @staticmethod
    def _exponents(parts: Parts) -> Array:
        """Of the scales of doubled numbers: [out, groups]."""
        scales = parts["scales"]
        return scales.reshape(-1, scales.shape[-1]).astype(np.int32) - 128

    @staticmethod
    def _doubled(parts: Parts) -> Array:
        """Twice the numbers [out, in] without their exponents, in int16."""
        table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
        blocks = parts["blocks"]
        each = blocks.reshape(-1, *blocks.shape[2:])  # [out, groups, 16]
        return table[np.stack((each & 15, each >> 4), -1)].reshape(len(each), -1)
