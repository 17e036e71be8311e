"""Reads blocks of quantised numbers in GGUF files: as fp32, or as codes and scales of our packed forms.

A block is 32 or 256 consecutive inputs of one output. Packed forms hold the same numbers, without rounding again:

  Q4_0     d (code - 8)                int4
  Q8_0     d code                      int8; no quantiser writes -128
  Q5_0     d (code - 16)               int5
  IQ4_NL   d iq4[code]                 iq4
  MXFP4    2^(e - 128) fp4[code]       fp4, if float16 holds the scales: e from 104 to 143
  NVFP4    (s / 2) fp4[code]           fp4; s is the E4M3 scale of a group of 16
  Q4_1     d code + m                  int5 with minima; Q5_1 too
  Q4_K     d s code - dmin m           int4 with minima in super-blocks; s and m are integers of a group of 32
  Q5_K     d s code - dmin m           int5 with minima in super-blocks
  Q6_K     d s (code - 32)             int6 in super-blocks; s is an integer of a group of 16
  Q2_K     d s code - dmin m           int6 with minima in super-blocks; groups of 16
  Q3_K     d s (code - 4)              int6 with minima in super-blocks: d s code - (4 d) s
  Q2_0     d (code - 1)                int2; TQ1_0 and TQ2_0 too
  I2_S     d (code - 1)                int2; d is the tensor's
  Q1_0     d or -d                     int1
  IQ4_XS   d (s - 32) iq4[code]        iq4 in super-blocks
  IQ3_XXS  (d / 2) s iq3_xxs[code]     iq3_xxs in super-blocks, if float16 holds d / 2; IQ3_S has d
  IQ2_XXS  (d / 8) s iq2[code]         iq2 in super-blocks, if float16 holds d / 8; other IQ2 too, and iq1 for IQ1

iq4 and the like are in `TABLES`. A matrix whose parts have different types uses int6 with minima, which also holds
Q4_K, Q5_K and Q6_K, or int8 for Q5_0. The `gguf` package decodes all but Q1_0 and Q2_0.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import FLOAT8_E4M3, Array, Bytes, Floats, widened
from tokenwright.checkpoints.gguf.header import BLOCKS, block_bytes
from tokenwright.formats import TABLES, WeightFormat

Halves = NDArray[np.float16]
Integers = NDArray[Any]

_INT8, _INT5 = WeightFormat("int8", 32), WeightFormat("int5", 32)
_MINIMA = WeightFormat("int5", 32, minima=True)
_FOUR, _FIVE = (WeightFormat(name, 32, 256, minima=True) for name in ("int4", "int5"))
_SIX, _EVERY = (WeightFormat("int6", 16, 256, minima=minima) for minima in (False, True))
_FP4, _IQ4 = WeightFormat("fp4", 32), WeightFormat("iq4", 32)
_TABLES: Mapping[str, str] = {
    "IQ4_XS": "iq4", "IQ3_XXS": "iq3_xxs", "IQ3_S": "iq3_s", **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), "iq2"),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), "iq1"),
}  # fmt: skip
_TERNARY = ("Q1_0", "Q2_0", "Q2_0_g128", "TQ1_0", "TQ2_0")
# The forms that hold the blocks of each type, the smallest first.
FORMS: Mapping[str, tuple[WeightFormat, ...]] = {
    "Q8_0": (_INT8,), "Q4_0": (WeightFormat("int4", 32),), "Q5_0": (_INT5, _INT8), "IQ4_NL": (_IQ4, _INT8),
    "MXFP4": (_FP4, _INT8), "NVFP4": (WeightFormat("fp4", 16, factors=True),),
    "I2_S": (WeightFormat("int2", 64, 64, factors=True),),
    "Q4_1": (_MINIMA,), "Q5_1": (_MINIMA,), "Q2_K": (_EVERY,), "Q3_K": (_EVERY,),
    "Q4_K": (_FOUR, _FIVE, _EVERY), "Q5_K": (_FIVE, _EVERY), "Q6_K": (_SIX, _EVERY),
    **{kind: (WeightFormat("int1" if kind == "Q1_0" else "int2", 64, BLOCKS[kind]),) for kind in _TERNARY},
    **{kind: (WeightFormat(table, 16, 256),) for kind, table in _TABLES.items()},
    **{kind: (WeightFormat(_TABLES[kind], 16, 256), _SIX, _EVERY) for kind in ("IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")},
}  # fmt: skip
# The place of a block's scale, and the factor that makes its numbers integers. IQ1_M's scale is in pieces.
_SCALES: Mapping[str, tuple[int, float]] = {
    "TQ1_0": (52, 1.0), "TQ2_0": (64, 1.0), "IQ3_XXS": (0, 0.5), "IQ3_S": (0, 1.0), "IQ1_M": (48, 0.125),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0, 0.125)),
}  # fmt: skip
# Whether these types have a form depends on their data.
IF_SCALES_FIT = ("MXFP4", *(kind for kind, (_, factor) in _SCALES.items() if factor < 1))
_BYTES = {name: block_bytes(name, count) for name, count in BLOCKS.items()}


def dequantised(raw: Bytes, dtype: str) -> Floats:
    """Rows [n, bytes] of blocks as numbers [n, in] in fp32."""
    if dtype == "I2_S":
        return codes_and_scales(raw, dtype, FORMS[dtype][0])[0].astype(np.float32) - 1
    if dtype.startswith(("Q1_0", "Q2_0")):
        bits = 1 if dtype == "Q1_0" else 2
        scale, codes = _ternary(raw, dtype)
        each: Bytes = codes[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
        whole = each.astype(np.float32) * np.float32(3 - bits) - 1
        return (whole.reshape(len(raw), -1, BLOCKS[dtype]) * scale.astype(np.float32)).reshape(len(raw), -1)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # values that are not finite are refused where they are stored
        numbers: Floats = dequantize(raw, GGMLQuantizationType[dtype]).copy()
        return numbers


def codes_and_scales(raw: Bytes, dtype: str, form: WeightFormat) -> tuple[Bytes, Array]:
    """Rows [n, bytes] of a type as `Packed.put_codes` takes them, in one of FORMS of the type.

    Codes uint8 [n, in], or bytes of several of Q1_0 and Q2_0; float16 scales [n, in / 32], or records uint8 [n, bytes]
    with minima or super-blocks. Scales of MXFP4 beyond float16 become infinite.
    """
    rows = len(raw)
    blocks = raw.reshape(rows, -1, _BYTES[dtype])
    if dtype in _TERNARY:
        scale, codes = _ternary(raw, dtype)
        return codes.reshape(rows, -1), _bytes(scale).reshape(rows, -1)
    if dtype == "I2_S":
        codes = blocks[..., None, :] >> np.array([[6], [4], [2], [0]], np.uint8) & 3
        ones = np.ones((rows, codes[0].size // 64), np.float16)
        return codes.reshape(rows, -1), with_factors(_bytes(ones), np.ones(rows, np.float32))
    if dtype in _OF_SUPER_BLOCKS or dtype in _SCALES:
        if dtype in _OF_SUPER_BLOCKS:
            found = _OF_SUPER_BLOCKS[dtype](blocks)
        else:
            found = _in_table(*_of_numbers(raw, dtype), _TABLES[dtype])
            if form.name not in TABLES:  # int6, whose codes have an offset
                found = found._replace(codes=_looked_up(found.codes, _TABLES[dtype]) - 96, offset=32)
        return found.codes.reshape(rows, -1), found.records(form).reshape(rows, -1)
    if dtype == "MXFP4":
        indices = _nibbles(blocks[..., 1:])
        exact = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)  # of doubled numbers
        exact[(indices & 7 == 0).all(-1)] = 0
        with np.errstate(over="ignore"):
            scales = exact.astype(np.float16)
        scales[scales != exact] = np.inf
        return (indices if form == _FP4 else _looked_up(indices, "fp4")).reshape(rows, -1), scales
    if dtype == "NVFP4":
        indices = _nibbles(blocks[..., 4:].reshape(rows, -1, 4, 8)).reshape(rows, -1)
        levels = blocks[..., :4] & 0x7F  # without a sign
        levels[levels == 0x7F] = 0  # as in llama.cpp
        halves = (widened(levels.view(FLOAT8_E4M3)) / 2).astype(np.float16)
        return indices, with_factors(_bytes(halves.reshape(rows, -1)), np.ones(rows, np.float32))
    scales, codes = _half(blocks, 0)[..., 0], blocks[..., 2:]
    match dtype:
        case "Q8_0":
            codes = codes ^ 0x80  # two's complement to an offset of 128
        case "Q4_0":
            codes = _nibbles(codes)
        case "IQ4_NL":
            codes = _nibbles(codes) if form == _IQ4 else _looked_up(_nibbles(codes), "iq4")
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


def _ternary(raw: Bytes, dtype: str) -> tuple[Halves, Bytes]:
    """Scales [n, blocks, 1], and the numbers in their unit plus 1 [n, blocks, size], or bytes of several codes."""
    if dtype in _SCALES:
        scale, whole = _of_numbers(raw, dtype)
        return scale, (whole + 1).astype(np.uint8)
    blocks = raw.reshape(len(raw), -1, _BYTES[dtype])
    return _half(blocks, 0), blocks[..., 2:]


def with_factors(scales: Bytes, factors: Floats) -> Bytes:
    """The bytes of rows' scales, each with a factor, as `put_codes` takes them."""
    return np.concatenate((scales, factors.reshape(-1, 1).view(np.uint8)), -1)


def _in_table(scale: Halves, whole: NDArray[np.int32], table: str) -> "_SuperBlocks":
    """The indices and odd integers, one for 16 numbers, with which a table gives these integers."""
    numbers, groups = TABLES[table], whole.reshape(*whole.shape[:2], 16, 16)
    codes, steps = np.zeros(groups.shape, np.uint8), np.ones(groups.shape[:3], np.int8)
    most, missing = 31 * max(numbers), 255
    for step in range(31, 0, -2):
        index = np.full(2 * most + 1, missing, np.uint8)
        index[most + step * np.array(numbers)] = np.arange(16)
        found = index[groups + most]
        fits = (found != missing).all(-1)
        codes[fits], steps[fits] = found[fits], step
    return _SuperBlocks(codes.reshape(whole.shape), scale, steps)


class _SuperBlocks(NamedTuple):
    """Blocks of 256 inputs. A group's scale is `scale` times its step."""

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


def _iq4_xs(blocks: Bytes) -> _SuperBlocks:
    upper = _pieces(blocks[..., 2:4], 1, 2)
    steps = _pieces(blocks[..., 4:8], 1, 4) | upper << 4
    codes = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)).reshape(*blocks.shape[:2], -1)
    return _SuperBlocks(codes, _half(blocks, 0), steps.view(np.int8) - 32)


def _q6(blocks: Bytes) -> _SuperBlocks:
    codes = _pieces(blocks[..., :128], 64, 4) | _pieces(blocks[..., 128:192], 32, 2) << 4
    return _SuperBlocks(codes, _half(blocks, 208), blocks[..., 192:208].view(np.int8), offset=32)


_OF_SUPER_BLOCKS = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6, "IQ4_XS": _iq4_xs}


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
    """Numbers [n, blocks, count]: first the lowest bits of each `together` bytes, then the next."""
    places = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces: Bytes = packed.reshape(*packed.shape[:2], -1, 1, together) >> places & (1 << bits) - 1
    return pieces.reshape(*packed.shape[:2], -1)


def _nibbles(packed: Bytes) -> Bytes:
    """Codes [..., 2 n] of bytes [..., n]: the low halves first."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _looked_up(indices: Bytes, table: str) -> Bytes:
    return (np.array(TABLES[table]) + 128).astype(np.uint8)[indices]


def _five_bits(block: Bytes) -> Bytes:
    """Codes [..., 32] of Q5_0 and Q5_1: 4 bytes with the fifth bits of the codes, then their low bits."""
    fifth = (block[..., :4, None] >> np.arange(8, dtype=np.uint8)) & 1
    codes: Bytes = _nibbles(block[..., 4:]) | fifth.reshape(*block.shape[:-1], 32) << 4
    return codes
