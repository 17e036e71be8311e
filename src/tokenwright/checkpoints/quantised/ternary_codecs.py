"""BitNet b1.58 in transformers: -1, 0 and 1 times a number of the matrix, packed or not made yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tokenwright.arrays import DTYPES, Array, Bytes, Floats, narrowed, widened
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.gguf.blocks import with_factors
from tokenwright.checkpoints.quantised.codecs import Parts
from tokenwright.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Ternary:
    """Packed, four outputs to a byte, the first quarter of them in the lowest bits; stored with 1 added.

    divides: the numbers are divided by the matrix's scale, as in BitLinear, not multiplied. made_from: the dtype of
    unpacked weights, of which each becomes its sign, or 0 below half of the mean magnitude, times the mean in that
    dtype.
    """

    divides: bool
    made_from: str = ""
    title: str = "BitNet"
    small: tuple[str, ...] = ()

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        shape = parts["weight"].shape
        if len(shape) != 2 or self.made_from:
            return shape if len(shape) == 2 else None
        return (4 * shape[0], shape[1]) if prod(parts["weight_scale"].shape) == 1 else None

    def form(self, small: Parts, inner: int) -> WeightFormat | None:  # noqa: ARG002
        span = next((one for one in (256, 64) if inner % one == 0), None)
        return None if span is None else WeightFormat("int2", 64, span, factors=True)

    def numbers(self, parts: Parts) -> Floats:
        codes, factor = self._made(parts)
        return (codes.astype(np.float32) - 1) * factor

    def codes(self, parts: Parts, form: WeightFormat) -> tuple[Bytes, Array]:
        codes, factor = self._made(parts)
        ones = np.ones((len(codes), codes.shape[1] // form.super), np.float16)
        return codes, with_factors(ones.view(np.uint8), np.full(len(codes), factor, np.float32))

    def _made(self, parts: Parts) -> tuple[Bytes, np.float32]:
        weight, one = parts["weight"], np.float32(1)
        if not self.made_from:
            codes = weight >> np.arange(0, 8, 2, dtype=np.uint8)[:, None, None] & 3
            scale = np.float32(parts["weight_scale"].reshape(-1)[0])
            return codes.reshape(-1, codes.shape[-1]), one / scale if self.divides else scale
        wide = weight.astype(np.float32)
        scale = one / np.float32(max(np.abs(wide).mean(dtype=np.float64), 1e-5))  # the least in transformers
        factor = widened(narrowed(np.array([one / scale]), DTYPES[self.made_from]))[0]
        return (np.rint(wide * scale).clip(-1, 1) + 1).astype(np.uint8), factor
