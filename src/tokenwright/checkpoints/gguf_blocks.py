"""Blocks of quantised numbers in GGUF files: decoded to fp32, or taken as the codes and scales of our packed forms.

A block is 32 or 256 consecutive inputs of one output. Q8_0 (a float16 scale, 32 integers from -127 to 127) is int8 in
groups of 32, and Q4_0 (a float16 scale, 32 integers from -8 to 7) is int4 in groups of 32: their codes and scales are
copied, not quantised again. All others are decoded by the `gguf` package.
"""

from collections.abc import Mapping

import numpy
import torch

from tokenwright.config import WeightFormat

# The types whose blocks are groups of a packed form.
AS_STORED: Mapping[str, WeightFormat] = {"Q8_0": WeightFormat("int8", 32), "Q4_0": WeightFormat("int4", 32)}


def dequantised(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rows [n, bytes] of blocks of a type, as numbers [n, in] in fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with numpy.errstate(all="ignore"):  # values that are not finite are refused where they are stored
        return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[dtype]).copy())


def codes_and_scales(raw: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, bytes] of Q8_0 or Q4_0: codes [n, in] as `Packed` stores them (uint8), scales [n, in / 32] (float16)."""
    blocks = raw.view(len(raw), -1, 34 if dtype == "Q8_0" else 18)
    scales, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    if dtype == "Q8_0":
        return (codes ^ 0x80).flatten(1), scales  # two's complement to an offset of 128
    return torch.cat((codes & 15, codes >> 4), -1).flatten(1), scales
