"""Blocks of quantised numbers in GGUF files: decoded to fp32, or taken as the codes and scales of our packed forms.

A block is 32 or 256 consecutive inputs of one output. Where a block is one scale times small integers, our packed forms
hold the same numbers in groups of 32, and codes and scales are copied, not quantised again:

    Q4_0     d (code - 8)                int4
    Q8_0     d code                      int8, which no quantiser lets be -128
    Q5_0     d (code - 16)               int8
    IQ4_NL   d CURVE[code]               int8
    MXFP4    2^(e - 128) DOUBLED[code]   int8, if float16 holds the scales: e from 104 to 143

All others are decoded by the `gguf` package: Q4_1, Q5_1, Q2_K, Q4_K and Q5_K have a minimum besides the scale, and the
scales of Q3_K, Q6_K and IQ4_XS are products that float16 does not hold.
"""

from collections.abc import Mapping

import numpy
import torch

from tokenwright.config import WeightFormat

_INT8 = WeightFormat("int8", 32)
# The types whose blocks are groups of a packed form.
AS_STORED: Mapping[str, WeightFormat] = {
    "Q8_0": _INT8, "Q4_0": WeightFormat("int4", 32), "Q5_0": _INT8, "IQ4_NL": _INT8, "MXFP4": _INT8,
}  # fmt: skip
IF_SCALES_FIT = "MXFP4"  # of them, the type that depends on its data
CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BYTES: Mapping[str, int] = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "IQ4_NL": 18, "MXFP4": 17}  # of a block
_HALF_EXPONENT = 128  # of MXFP4's scale of doubled values, 2^(e - 128)
_EXPONENTS = (_HALF_EXPONENT - 24, _HALF_EXPONENT + 15)  # those of which float16 holds the power


def dequantised(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rows [n, bytes] of blocks of a type, as numbers [n, in] in fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with numpy.errstate(all="ignore"):  # values that are not finite are refused where they are stored
        return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[dtype]).copy())


def codes_and_scales(raw: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, bytes] of a type in AS_STORED as `Packed` has them: uint8 codes [n, in], float16 scales [n, in / 32].

    Scales of MXFP4 that float16 does not hold become infinite, or 0 where all codes of the block are 0.
    """
    blocks = raw.view(len(raw), -1, _BYTES[dtype])
    if dtype == "MXFP4":
        codes = _looked_up(blocks[..., 1:], DOUBLED)
        return codes.flatten(1), _powers(blocks[..., 0], (codes == 128).all(-1))
    scales, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    match dtype:
        case "Q8_0":
            codes = codes ^ 0x80  # two's complement to an offset of 128
        case "Q4_0":
            codes = _nibbles(codes)
        case "IQ4_NL":
            codes = _looked_up(codes, CURVE)
        case _:
            codes = _five_bits(codes)
    return codes.flatten(1), scales


def scales_fit(raw: torch.Tensor) -> bool:
    """Whether float16 holds the scales of rows [n, bytes] of MXFP4."""
    return bool(codes_and_scales(raw, IF_SCALES_FIT)[1].isfinite().all())


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes [..., 32] of bytes [..., 16]: the low halves first, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _looked_up(packed: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([128 + value for value in table], dtype=torch.uint8)[_nibbles(packed).int()]


def _five_bits(block: torch.Tensor) -> torch.Tensor:
    """Codes of Q5_0 with 128 - 16 added: 4 bytes with the fifth bits of the 32 codes, then their low bits."""
    fifth = (block[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (_nibbles(block[..., 4:]) | fifth.flatten(-2) << 4) + 112


def _powers(exponents: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    low, high = _EXPONENTS
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _HALF_EXPONENT).half()
    powers[(exponents < low) | (exponents > high)] = torch.inf
    powers[empty] = 0
    return powers
