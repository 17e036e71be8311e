"""Number formats of K, V and weights: how a codec encodes a row, the bytes that takes, and how it decodes the row.

A row is one head of one token in the cache, or one row of a weight matrix along its input. Its encoding depends on the
row alone, not on the rows that are stored with it. A codec stores a row as one tensor or several, its parts: numbers,
and for the quantised formats one float16 scale for each group of 32 numbers.

    native    the dtype itself                                    parts: numbers [D]
    int8      round(x / scale), scale = max |x| / 127             parts: codes [D], scales [D / 32]
    int4      round(x / scale), scale = extreme / -8, two a byte  parts: codes [D / 2], scales [D / 32]
    fp8       e4m3: each number's exponent replaces a scale       parts: bytes [D]

No codec hides a NaN or an infinity: fp8 returns NaN for it, and the quantised formats return NaN for its whole group,
whose scale it sets. These formats saturate finite numbers beyond their range.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch

from tokenwright.formats import DTYPE_BYTES, DType

SCALE_BYTES = 2  # a float16
GROUP = 32  # numbers per scale
MOST_SCALE: Final = 65504.0  # of float16
MOST_FP8: Final = 448.0  # of e4m3

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """`bits` per number; `group` consecutive numbers share a scale, None for a codec without scales."""

    name: str
    bits: int
    group: int | None = None

    def nbytes(self, count: int) -> int:
        """Bytes of a row of `count` numbers, its scales included; a shorter last group has its own scale.

        >>> CODECS["int8"].nbytes(128), CODECS["int4"].nbytes(128)
        (136, 72)
        """
        scales = 0 if self.group is None else -(-count // self.group)
        return -(-count * self.bits // 8) + SCALE_BYTES * scales

    @abstractmethod
    def parts(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """The dtype and the length of each part of a stored row of `count` numbers."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Parts:
        """Encode rows x [..., D] of any floating-point dtype to parts [..., n_i]."""

    @abstractmethod
    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode parts [..., n_i] to rows [..., `count`] in `dtype`."""


@dataclass(frozen=True, slots=True)
class Native(Codec):
    """Unquantised numbers, in the dtype that gives the codec its name."""

    def parts(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((self._dtype, count),)

    def encode(self, x: torch.Tensor) -> Parts:
        return (x if x.dtype is self._dtype else x.to(self._dtype),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002  (as in all codecs)
        (x,) = parts
        return x if x.dtype is dtype else x.to(dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[cast(DType, self.name)]


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Integers from -127 to 127 times the group's scale, max |x| / 127 rounded to float16."""

    def parts(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        return (torch.int8, count), (torch.float16, -(-count // GROUP))

    def encode(self, x: torch.Tensor) -> Parts:
        groups = _grouped(x)
        scales = _scales(groups.abs().amax(-1) / 127)
        codes = _codes(groups, scales).clamp_(-127, 127).to(torch.int8)
        return codes.flatten(-2)[..., : x.shape[-1]], scales

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        return (codes * _spread(scales, count)).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4(Codec):
    """Integers from -8 to 7 times the group's scale, two per byte, the first in the low nibble.

    The number of largest magnitude is encoded as exactly -8, so the scale carries its sign. Compared with -7..7 and
    max |x| / 7, the mean squared error is 0.78 times as large on Gaussian groups, and 0.78 to 0.79 times on Laplace and
    Student t (3 degrees of freedom) groups.
    """

    def parts(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        return (torch.uint8, -(-count // 2)), (torch.float16, -(-count // GROUP))

    def encode(self, x: torch.Tensor) -> Parts:
        groups = _grouped(x)
        high, low = groups.amax(-1), groups.amin(-1)
        scales = _scales(torch.where(high > -low, high, low) / -8)
        codes = (_codes(groups, scales).clamp_(-8, 7) + 8).to(torch.uint8).flatten(-2)  # padded to an even count
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return packed[..., : -(-x.shape[-1] // 2)], scales

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        packed, scales = parts
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :count].to(torch.int8) - 8
        return (codes * _spread(scales, count)).to(dtype)


@dataclass(frozen=True, slots=True)
class Float8(Codec):
    """e4m3, stored as plain bytes, so that devices without the type can store it too."""

    def parts(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.uint8, count),)

    def encode(self, x: torch.Tensor) -> Parts:
        within = x.float().clamp(-MOST_FP8, MOST_FP8).masked_fill(~x.isfinite(), torch.nan)
        return (within.to(torch.float8_e4m3fn).view(torch.uint8),)

    def decode(self, parts: Parts, count: int, dtype: torch.dtype) -> torch.Tensor:
        return parts[0][..., :count].view(torch.float8_e4m3fn).to(dtype)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as groups [..., D / GROUP, GROUP] in fp32, the last group padded with zeros."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP))
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)


def _scales(exact: torch.Tensor) -> torch.Tensor:
    """Stored scales: the nearest finite float16; NaN where the exact scale is not finite."""
    scales = exact.clamp(-MOST_SCALE, MOST_SCALE).masked_fill(~exact.isfinite(), torch.nan)
    return scales.to(torch.float16)


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """round(x / scale) [..., n, GROUP] in fp32; 0 where the scale is 0 (all zeros, or an underflow) or NaN."""
    steps = scales.float()[..., None]
    usable = steps.abs() > 0
    return torch.where(usable, groups / torch.where(usable, steps, 1.0), 0.0).round_()


def _spread(scales: torch.Tensor, count: int) -> torch.Tensor:
    """The scale of each of `count` numbers in fp32, in which code times scale is exact."""
    return scales.float().repeat_interleave(GROUP, -1)[..., :count]


NATIVE: Mapping[str, Codec] = {name: Native(name, 8 * size) for name, size in DTYPE_BYTES.items()}
CODECS: Mapping[str, Codec] = {
    **NATIVE,
    "int8": Int8("int8", 8, GROUP),
    "int4": Int4("int4", 4, GROUP),
    "fp8": Float8("fp8", 8),
}
