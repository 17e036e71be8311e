"""Number formats of K and V: the parts that a codec stores a row as, and the bytes that these take.

A row is one head of one token in the cache. Its encoding depends on the row alone, not on the rows that are stored with
it. A codec stores a row as one array or several, its parts: numbers, and for the quantised formats one float16 scale
for each group of 32 numbers.

    native    the dtype itself                                    parts: numbers [D]
    int8      round(x / scale), scale = max |x| / 127             parts: codes [D], scales [D / 32]
    int4      the nearest level to H x / scale, two a byte        parts: codes [D / 2], scales [D / 32]
    fp8       e4m3: each number's exponent replaces a scale       parts: bytes [D]

In int4, H is the Hadamard matrix of the group's 32 numbers. It spreads a large one over all of them, which come out
nearly Gaussian: so the levels lie closer near 0. A last group of fewer numbers, n, is cut into blocks of the largest
power of two that divides n. The scale is the extreme over minus one of `LEVEL_DIVISORS`: the one of least squared
error, the first among equals. A decoded number is a sum of 32 levels with their signs, times scale / 32, which is exact
in fp32. On Gaussian groups the mean squared error is 0.61 times that of round(x / scale) in -7..7.

No codec hides a NaN or an infinity: fp8 returns NaN for it, and the quantised formats return NaN for its whole group,
whose scale it sets. These formats saturate finite numbers beyond their range. The kernels encode and decode: the native
ones in `cpp/kernels/attention/kv_rows.h`, those of torch in `backends/torch/kv_codec.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenwright.arrays import DTYPES
from tokenwright.formats import DTYPE_BYTES

SCALE_BYTES = 2  # a float16
GROUP = 32  # numbers per scale
LEVELS = tuple(c * (c * c + 164) >> 4 for c in range(-8, 8))  # of the codes of int4
LEVEL_DIVISORS = (142, 130, 119, 110, 102, 95)


@dataclass(frozen=True, slots=True)
class Codec:
    """`bits` per number; `group` consecutive numbers share a scale, None for a codec without scales.

    dtype: of the part with the numbers; it holds `together` of them in one.
    """

    name: str
    bits: int
    dtype: np.dtype[Any]
    group: int | None = None
    together: int = 1

    def nbytes(self, count: int) -> int:
        """Bytes of a row of `count` numbers, its scales included; a shorter last group has its own scale.

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
    "fp8": Codec("fp8", 8, np.dtype(np.uint8)),  # as plain bytes, so that devices without the type can store it too
}
