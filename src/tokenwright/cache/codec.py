"""The forms in which numbers are kept, and the bytes they take there; the accounting alone.

A codec is a width in bits, and for the quantised ones a group: so many numbers in a row share one float16 scale. A row
is what belongs together: one head of one token in the cache, one row along the input of a weight matrix. The cache's
layouts (`spec.py`) and the planner count their bytes here; nothing is encoded yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenwright.config import DTYPE_BYTES

SCALE_BYTES = 2  # a float16
GROUP = 32  # numbers to a scale


@dataclass(frozen=True, slots=True)
class Codec:
    """`bits` for each number; `group` consecutive numbers share a scale, None where there are no scales."""

    name: str
    bits: int
    group: int | None = None

    def nbytes(self, count: int) -> int:
        """Bytes of a row of `count` numbers, its scales included; a last group that is shorter has its own.

        >>> CODECS["int8"].nbytes(128), CODECS["int4"].nbytes(128)
        (136, 72)
        """
        scales = 0 if self.group is None else -(-count // self.group)
        return -(-count * self.bits // 8) + SCALE_BYTES * scales


NATIVE: Mapping[str, Codec] = {name: Codec(name, 8 * size) for name, size in DTYPE_BYTES.items()}
CODECS: Mapping[str, Codec] = {
    **NATIVE,
    "int8": Codec("int8", 8, GROUP),
    "int4": Codec("int4", 4, GROUP),
    "fp8": Codec("fp8", 8),  # e4m3: its own exponent takes the place of a scale
}
