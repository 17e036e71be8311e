"""Blocks of quantised numbers in GGUF files: decoded to fp32, or as codes and scales of our packed forms.

A block is 32 or 256 consecutive inputs of one output. Packed forms hold the same numbers, without rounding again:

  Q4_0     d (code - 8)                int4
  Q8_0     d code                      int8, which no quantiser lets be -128
  Q5_0     d (code - 16)               int5
  IQ4_NL   d CURVE[code]               int8
  MXFP4    2^(e - 128) DOUBLED[code]   int8, if float16 holds the scales: e from 104 to 143
  Q4_1     d code + m                  int5 with minima; Q5_1 too
  Q4_K     d s code - dmin m           int4 with minima in super-blocks; s and m are integers of a group of 32
  Q5_K     d s code - dmin m           int5 with minima in super-blocks
  Q6_K     d s (code - 32)             int6 in super-blocks; s is an integer of a group of 16
  Q2_K     d s code - dmin m           int6 with minima in super-blocks; groups of 16
  Q3_K     d s (code - 4)              int6 with minima in super-blocks: d s code - (4 d) s
  TQ1_0    d (code - 1)                int4; TQ2_0 too
  IQ3_XXS  (d / 2) s n                 int6 in super-blocks, if float16 holds d / 2; n are from -31 to 31
  IQ3_S    d s n                       int6 in super-blocks; n are from -15 to 15
  IQ1_S    (d / 8) s n                 int6 in super-blocks, if float16 holds d / 8; n are from -9 to 9; IQ1_M too

A matrix whose parts have different types uses int6 with minima, which also holds Q4_K, Q5_K and Q6_K, or int8 for Q5_0.
The `gguf` package decodes IQ4_XS and IQ2, and the types of `_of_numbers`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Array, Bytes, Floats
from tokenwright.formats import WeightFormat

Halves = NDArray[np.float16]
Integers = NDArray[Any]  # int8

_INT8, _INT5 = WeightFormat("int8", 32), WeightFormat("int5", 32)
_MINIMA = WeightFormat("int5", 32, minima=True)
_FOUR, _FIVE = (WeightFormat(name, 32, 256, minima=True) for name in ("int4", "int5"))
_SIX, _EVERY = (WeightFormat("int6", 16, 256, minima=minima) for minima in (False, True))
# For each type, the forms that hold its blocks, the smallest first.
FORMS: Mapping[str, tuple[WeightFormat, ...]] = {
    "Q8_0": (_INT8,), "Q4_0": (WeightFormat("int4", 32),), "Q5_0": (_INT5, _INT8), "IQ4_NL": (_INT8,),
    "MXFP4": (_INT8,), "Q4_1": (_MINIMA,), "Q5_1": (_MINIMA,), "Q2_K": (_EVERY,), "Q3_K": (_EVERY,),
    "Q4_K": (_FOUR, _FIVE, _EVERY), "Q5_K": (_FIVE, _EVERY), "Q6_K": (_SIX, _EVERY),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), (WeightFormat("int4", 64),)),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"), (_SIX, _EVERY)),
}  # fmt: skip
IF_SCALES_FIT = ("MXFP4", "IQ3_XXS", "IQ1_S", "IQ1_M")  # whether these types have a form depends on their data
# The place of a block's scale, and the factor that makes its numbers whole. IQ1_M's scale lies in pieces.
_SCALES: Mapping[str, tuple[int, float]] = {
    "TQ1_0": (52, 1.0), "TQ2_0": (64, 1.0), "IQ3_XXS": (0, 0.5), "IQ3_S": (0, 1.0), "IQ1_S": (0, 0.125),
    "IQ1_M": (48, 0.125),
}  # fmt: skip
CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BYTES: Mapping[str, int] = {  # of a block
    "Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "IQ4_NL": 18, "MXFP4": 17, "Q2_K": 84, "Q3_K": 110,
    "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "TQ1_0": 54, "TQ2_0": 66, "IQ3_XXS": 98, "IQ3_S": 110, "IQ1_S": 50,
    "IQ1_M": 56,
}  # fmt: skip
_HALF_EXPONENT = 128  # of MXFP4's scale of doubled values, 2^(e - 128)
_EXPONENTS = (_HALF_EXPONENT - 24, _HALF_EXPONENT + 15)  # float16 holds the powers between


def dequantised(raw: Bytes, dtype: str) -> Floats:
    """Rows [n, bytes] of blocks as numbers [n, in] in fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # values that are not finite are refused where they are stored
        numbers: Floats = dequantize(raw, GGMLQuantizationType[dtype]).copy()
        return numbers


def codes_and_scales(raw: Bytes, dtype: str, form: WeightFormat) -> tuple[Bytes, Array]:
    """Rows [n, bytes] of a type as `Packed.put_codes` takes them, in one of FORMS of the type.

    Codes uint8 [n, in]; float16 scales [n, in / 32], or records uint8 [n, bytes] with minima or super-blocks. Scales of
    MXFP4 beyond float16 become infinite, or 0 where all codes of the block are 0.
    """
    rows = len(raw)
    blocks = raw.reshape(rows, -1, _BYTES[dtype])
    if dtype in ("TQ1_0", "TQ2_0"):
        scale, whole = _of_numbers(raw, dtype)
        return (whole + 8).astype(np.uint8).reshape(rows, -1), scale.repeat(4, -1).reshape(rows, -1)
    if dtype.endswith("_K") or dtype in _SCALES:
        found = _OF_SUPER_BLOCKS[dtype](blocks) if dtype.endswith("_K") else _in_steps(*_of_numbers(raw, dtype))
        return found.codes.reshape(rows, -1), found.records(form).reshape(rows, -1)
    if dtype == "MXFP4":
        codes = _looked_up(blocks[..., 1:], DOUBLED)
        return codes.reshape(rows, -1), _powers(blocks[..., 0], (codes == 128).all(-1))
    scales, codes = _half(blocks, 0)[..., 0], blocks[..., 2:]
    match dtype:
        case "Q8_0":
            codes = codes ^ 0x80  # two's complement to an offset of 128
        case "Q4_0":
            codes = _nibbles(codes)
        case "IQ4_NL":
            codes = _looked_up(codes, CURVE)
        case "Q5_0":
            codes = _five_bits(codes) + (0 if form == _INT5 else 112)  # to an offset of 128
        case _:  # Q4_1, Q5_1
            codes = _nibbles(codes[..., 2:]) if dtype == "Q4_1" else _five_bits(codes[..., 2:])
            both = np.concatenate((blocks[..., :2], _bytes(-_half(blocks, 2))), -1)
            return codes.reshape(rows, -1), both.reshape(rows, -1)
    return codes.reshape(rows, -1), scales


def scales_fit(raw: Bytes, dtype: str) -> bool:
    """Whether float16 holds the scales of rows [n, bytes] of a type in IF_SCALES_FIT."""
    if dtype == "MXFP4":
        return bool(np.isfinite(codes_and_scales(raw, dtype, _INT8)[1]).all())
    exact = _block_scales(raw, dtype) * np.float32(_SCALES[dtype][1])
    return bool((exact.astype(np.float16) == exact).all())


def _block_scales(raw: Bytes, dtype: str) -> Floats:
    blocks, at = raw.reshape(len(raw), -1, _BYTES[dtype]), _SCALES[dtype][0]
    if dtype != "IQ1_M":
        return _half(blocks, at).astype(np.float32)
    pieces = np.ascontiguousarray(blocks[..., at:]).view(np.uint16) >> 12  # [n, blocks, 4], four bits each
    bits: NDArray[np.uint16] = (pieces << np.arange(0, 16, 4, dtype=np.uint16)).sum(-1, dtype=np.uint16, keepdims=True)
    return bits.view(np.float16).astype(np.float32)


def _of_numbers(raw: Bytes, dtype: str) -> tuple[Halves, NDArray[np.int32]]:
    """Scales [n, blocks, 1], and whole numbers [n, blocks, 256] in their unit."""
    scale = _block_scales(raw, dtype) * np.float32(_SCALES[dtype][1])
    numbers = dequantised(raw, dtype).reshape(len(raw), -1, 256)
    return scale.astype(np.float16), np.rint(numbers / np.where(scale == 0, 1, scale)).astype(np.int32)


def _in_steps(scale: Halves, whole: NDArray[np.int32]) -> "_SuperBlocks":
    """Whole numbers as codes from -31 to 31 times the largest integer that divides a group of 16."""
    groups = whole.reshape(*whole.shape[:2], 16, 16)
    divisor, most = np.gcd.reduce(groups, -1), np.abs(groups).max(-1)
    steps = np.ones(divisor.shape, np.int8)
    for step in range(2, 128):
        steps[(divisor % step == 0) & (most > 0)] = step
    codes = groups // steps[..., None] + 32
    return _SuperBlocks(codes.astype(np.uint8).reshape(whole.shape), scale, steps, offset=32)


class _SuperBlocks(NamedTuple):
    """Blocks of 256 inputs. A group has the scale `scale` times its step."""

    codes: Bytes  # uint8 [n, blocks, 256]
    scale: Halves  # [n, blocks, 1]
    steps: Integers  # [n, blocks, groups]
    minimum: Halves | None = None  # as scale
    minimum_steps: Integers | None = None
    offset: int = 0  # subtracted from codes of types without minima

    def records(self, form: WeightFormat) -> Bytes:
        steps = _grouped(self.steps, form)
        if not form.minima:
            return np.concatenate((_bytes(self.scale), steps.view(np.uint8)), -1)
        if self.minimum is None or self.minimum_steps is None:
            minimum, minima = self.scale * np.float16(self.offset), steps  # exact: a power of two
        else:
            minimum, minima = self.minimum, _grouped(self.minimum_steps, form)
        integers = np.stack((steps, minima), -1).reshape(*steps.shape[:-1], -1)
        return np.concatenate((_bytes(self.scale), _bytes(minimum), integers.view(np.uint8)), -1)


def _grouped(steps: Integers, form: WeightFormat) -> Integers:
    return steps.repeat(form.super // form.group // steps.shape[-1], -1)


def _q2(blocks: Bytes) -> _SuperBlocks:
    both = blocks[..., :16]
    scales, minima = (both & 15).view(np.int8), (both >> 4).view(np.int8)
    return _SuperBlocks(_pieces(blocks[..., 16:80], 32, 2), _half(blocks, 80), scales, _half(blocks, 82), minima)


def _q3(blocks: Bytes) -> _SuperBlocks:
    upper = _pieces(blocks[..., :32], 32, 1)
    packed = blocks[..., 96:108]
    steps = _pieces(packed[..., :8], 8, 4) | _pieces(packed[..., 8:], 4, 2) << 4
    codes = _pieces(blocks[..., 32:96], 32, 2) | upper << 2
    return _SuperBlocks(codes, _half(blocks, 108), steps.view(np.int8) - 32, offset=4)


def _q4(blocks: Bytes) -> _SuperBlocks:
    return _SuperBlocks(_pieces(blocks[..., 16:], 32, 4), *_scales_and_minima(blocks))


def _q5(blocks: Bytes) -> _SuperBlocks:
    codes = _pieces(blocks[..., 48:], 32, 4) | _pieces(blocks[..., 16:48], 32, 1) << 4
    return _SuperBlocks(codes, *_scales_and_minima(blocks))


def _q6(blocks: Bytes) -> _SuperBlocks:
    codes = _pieces(blocks[..., :128], 64, 4) | _pieces(blocks[..., 128:192], 32, 2) << 4
    return _SuperBlocks(codes, _half(blocks, 208), blocks[..., 192:208].view(np.int8), offset=32)


_OF_SUPER_BLOCKS = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6}


def _scales_and_minima(blocks: Bytes) -> tuple[Halves, Integers, Halves, Integers]:
    """Scale, steps, minimum and its steps of Q4_K and Q5_K: twelve bytes hold eight times six and six bits."""
    first, second, third = np.moveaxis(blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4), -2, 0)
    steps = np.concatenate((first & 63, third & 15 | first >> 2 & 48), -1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), -1)
    return _half(blocks, 0), steps.view(np.int8), _half(blocks, 2), minima.view(np.int8)


def _half(blocks: Bytes, at: int) -> Halves:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _bytes(halves: Halves) -> Bytes:
    return np.ascontiguousarray(halves).view(np.uint8)


def _pieces(packed: Bytes, together: int, bits: int) -> Bytes:
    """Numbers [n, blocks, count]: of each `together` bytes first their lowest bits, then the next."""
    places = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces: Bytes = packed.reshape(*packed.shape[:2], -1, 1, together) >> places & (1 << bits) - 1
    return pieces.reshape(*packed.shape[:2], -1)


def _nibbles(packed: Bytes) -> Bytes:
    """Codes [..., 32] of bytes [..., 16]: the low halves first."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _looked_up(packed: Bytes, table: tuple[int, ...]) -> Bytes:
    return np.array([128 + value for value in table], np.uint8)[_nibbles(packed)]


def _five_bits(block: Bytes) -> Bytes:
    """Codes [..., 32] of Q5_0 and Q5_1: 4 bytes with the fifth bits of the codes, then their low bits."""
    fifth = (block[..., :4, None] >> np.arange(8, dtype=np.uint8)) & 1
    codes: Bytes = _nibbles(block[..., 4:]) | fifth.reshape(*block.shape[:-1], 32) << 4
    return codes


def _powers(exponents: Bytes, empty: NDArray[np.bool_]) -> Halves:
    low, high = _EXPONENTS
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - _HALF_EXPONENT).astype(np.float16)
    powers[(exponents < low) | (exponents > high)] = np.inf
    powers[empty] = 0
    return powers
