"""Number formats of K and V: a codec stores a row in one part, or in two.

A row is one head of one token; its encoding depends on nothing else. The quantised formats have one float16 scale for
each group of 32 numbers.

    native    the dtype itself                                    parts: numbers [D]
    int8      round(x / scale), scale = max |x| / 127             parts: codes [D], scales [D / 32]
    int4      the nearest level to H x / scale, two a byte        parts: codes [D / 2], scales [D / 32]
    fp8       e4m3: each number's exponent replaces a scale       parts: bytes [D]

H is the Hadamard matrix of the group's 32 numbers. It makes them nearly Gaussian, so the levels lie closer near 0. A
last group of n < 32 numbers is cut into blocks of the largest power of two that divides n. The scale is the extreme
over minus one of `LEVEL_DIVISORS`: the one of least squared error. A decoded number is a sum of
32 signed levels, times scale / 32, which is exact in fp32. A NaN or an infinity decodes to NaN, in the quantised
formats in its whole group; finite numbers saturate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenwright.arrays import DTYPES
from tokenwright.formats import DTYPE_BYTES

SCALE_BYTES = 2
GROUP = 32  # numbers per scale
LEVELS = tuple(c * (c * c + 164) >> 4 for c in range(-8, 8))  # of the codes of int4
LEVEL_DIVISORS = (142, 130, 119, 110, 102, 95)


@dataclass(frozen=True, slots=True)
class Codec:
    """`bits` per number; `group` consecutive numbers share a scale; an item of `dtype` holds `together` numbers."""

    name: str
    bits: int
    dtype: np.dtype[Any]
    group: int | None = None
    together: int = 1

    def nbytes(self, count: int) -> int:
        """Bytes of a row of `count` numbers with its scales.

        >>> CODECS["int8"].nbytes(128), CODECS["int4"].nbytes(128)
        (136, 72)
        """
        scales = 0 if self.group is None else -(-count // self.group)
        return -(-count * self.bits // 8) + SCALE_BYTES * scales

    def parts(self, count: int) -> tuple[tuple[np.dtype[Any], int], ...]:
        numbers = (self.dtype, -(-count // self.together))
        return (numbers,) if self.group is None else (numbers, (np.dtype(np.float16), -(-count // self.group)))


NATIVE: Mapping[str, Codec] = {name: Codec(name, 8 * size, DTYPES[name]) for name, size in DTYPE_BYTES.items()}
CODECS: Mapping[str, Codec] = {
    **NATIVE,
    "int8": Codec("int8", 8, np.dtype(np.int8), GROUP),
    "int4": Codec("int4", 4, np.dtype(np.uint8), GROUP, 2),
    "fp8": Codec("fp8", 8, np.dtype(np.uint8)),  # as plain bytes, for devices without the type
}
