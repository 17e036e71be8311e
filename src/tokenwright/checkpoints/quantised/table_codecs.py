"""Matrices of indices into a table of 16 numbers: nf4 and fp4, as bitsandbytes serialises its state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import Decoded, Parts

_LONGEST_STATE = 1 << 16  # bytes of bitsandbytes' description of a matrix


@dataclass(frozen=True, slots=True)
class FourBit(Decoded):
    """bitsandbytes' nf4 and fp4: an index into 16 numbers, times the largest magnitude of its block."""

    kind: str
    out: int
    inner: int
    block: int
    nested_block: int
    nested_offset: float
    small: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"bitsandbytes {self.kind}"

    def shape(self, parts: Mapping[str, Stored]) -> tuple[int, ...] | None:
        count = self.out * self.inner
        blocks = -(-count // self.block)
        absmax, table = parts.get("absmax"), parts.get("quant_map")
        if absmax is None or table is None or table.shape != (16,) or absmax.shape != (blocks,) or count % 2:
            return None
        if absmax.dtype == "U8":  # quantised itself
            nested, map_ = parts.get("nested_absmax"), parts.get("nested_quant_map")
            if (
                nested is None
                or map_ is None
                or map_.shape != (256,)
                or nested.shape != (-(-blocks // self.nested_block),)
            ):
                return None
        weight = parts["weight"]
        return (self.out, self.inner) if weight.dtype == "U8" and prod(weight.shape) * 2 == count else None

    def numbers(self, parts: Parts) -> Floats:
        both = parts["weight"].reshape(-1)
        index = np.stack((both >> 4, both & 15), -1).reshape(-1)  # the first number in the high bits
        numbers = parts["quant_map"].astype(np.float32)[index]
        absmax = parts["absmax"]
        if absmax.dtype == np.uint8:
            largest = parts["nested_absmax"].astype(np.float32).repeat(self.nested_block)[: len(absmax)]
            absmax = parts["nested_quant_map"].astype(np.float32)[absmax] * largest + np.float32(self.nested_offset)
        steps = absmax.astype(np.float32).repeat(self.block)[: len(numbers)]
        matrix: Floats = (numbers * steps).reshape(self.out, self.inner)
        return matrix


def four_bit(parts: Parts) -> FourBit:
    """The codec of one matrix, from bitsandbytes' description of it. Raises ValueError."""
    [raw] = parts.values()
    if raw.dtype != np.uint8 or raw.size > _LONGEST_STATE:
        raise ValueError("its description is no text")
    try:
        state = json.loads(raw.tobytes())
    except RecursionError as error:
        raise ValueError("its description is nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError(f"its description is {shown(state)}, not an object")
    keys = JsonKeys(state, "quant_state")
    sizes = keys.raw("shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 24 for n in sizes):
        raise ValueError(f"its shape is {shown(sizes)}")
    kind = keys.text("quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"its quant_type is {shown(kind)}")
    block, nested = keys.whole("blocksize", 64, most=1 << 16), keys.whole("nested_blocksize", 256, most=1 << 16)
    return FourBit(kind, sizes[0], sizes[1], block, nested, keys.number("nested_offset", 0.0, least=-1e6))
