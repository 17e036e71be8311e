"""Arrays in memory. NumPy lacks bfloat16 and fp8: such arrays only hold bits for `widened` and `narrowed`."""

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[Any]  # uint8, which type checkers lose in shifts and masks
Floats = NDArray[np.float32]

BFLOAT16 = np.dtype("V2")  # the upper half of a float32; NumPy copies such bytes as fast as numbers
FLOAT8_E4M3 = np.dtype([("e4m3fn", "u1")])  # 4 bits of exponent, no infinity
FLOAT8_E5M2 = np.dtype([("e5m2", "u1")])  # the upper half of a float16
FLOAT8_E8M0 = np.dtype([("e8m0fnu", "u1")])  # powers of two, as scales
DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
}

ALIGNMENT = 64  # bytes: a cache line, and the widest register
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
HUGE_PAGE = 1 << 21  # bytes
# The exponents of 16-bit floats, all ones where a number is infinite or NaN.
_EXPONENTS: Mapping[np.dtype[Any], int] = {BFLOAT16: 0x7F80, np.dtype(np.float16): 0x7C00}


def _e4m3() -> Floats:
    """All 256 numbers: (-1)^s 2^(e - 7) (1 + m / 8), subnormal for e = 0, NaN for the highest."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    numbers = np.ldexp(np.where(exponent == 0, fraction, 8 + fraction), np.maximum(exponent, 1) - 10)
    numbers[byte & 127 == 127] = np.nan
    signed: Floats = np.where(byte < 128, numbers, -numbers).astype(np.float32)
    return signed


_E4M3 = _e4m3()


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Uninitialised, as `aligned_bytes`."""
    sizes, kind = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
    found: Array = aligned_bytes(prod(sizes) * kind.itemsize).view(kind).reshape(sizes)
    return found


def aligned_bytes(nbytes: int) -> Bytes:
    """64-byte aligned; from 4 MiB on in huge pages of 2 MiB, where a sum took 15 % less time."""
    if nbytes < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -place_of(whole) % ALIGNMENT
        return whole[start : start + nbytes]
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(room, np.uint8)
    start = -place_of(whole) % HUGE_PAGE
    with suppress(OSError):  # a kernel built without huge pages
        room.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes]


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Zeros, whose memory the system hands out when a page is first written. Raises OSError or OverflowError."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # aligned to a page
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def populate(array: Array) -> None:
    """Have the system hand out an array's memory now, where it can; the contents stay."""
    if sys.platform == "linux" and array.size:
        start = place_of(array) // mmap.PAGESIZE * mmap.PAGESIZE
        length = place_of(array) + array.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


def as_bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def address(array: Array | None) -> int | None:
    if array is None or not array.size:
        return None
    assert array.flags.c_contiguous, "kernels read plain memory"
    return place_of(array)


def place_of(array: Array) -> int:
    place: int = array.__array_interface__["data"][0]  # `array.ctypes` takes longer
    return place


def finite(array: Array) -> bool:
    if (exponent := _EXPONENTS.get(array.dtype)) is not None:  # by their bits, which is faster
        return not bool(((array.view(np.uint16) & exponent) == exponent).any())
    if array.dtype.itemsize == 1 or not array.size:
        return bool(np.isfinite(widened(array)).all())
    # In one pass without a copy: any NaN or infinity reaches the minimum or maximum.
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def widened(array: Array) -> Floats:
    """In fp32, which holds each float of 16 and 8 bits exactly."""
    if array.dtype == BFLOAT16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if array.dtype == FLOAT8_E5M2:
        return (array.view(np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if array.dtype == FLOAT8_E4M3:
        return _E4M3[array.view(np.uint8)]
    if array.dtype == FLOAT8_E8M0:
        exponents = array.view(np.uint8).astype(np.uint32)
        return np.where(exponents == 0, 1 << 22, exponents << 23).astype(np.uint32).view(np.float32)
    return array.astype(np.float32, copy=False)


def narrowed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Rounded to nearest; numbers beyond the range of `dtype` become infinite, without a warning."""
    if array.dtype == dtype:
        return array
    if array.dtype == BFLOAT16:
        array = widened(array)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != BFLOAT16:
            return array.astype(dtype, copy=False)
        wide = array.astype(np.float32, order="C", copy=False)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
    return np.where(np.isnan(wide), bits >> 16 & 0x8000 | 0x7FC0, rounded).astype(np.uint16).view(BFLOAT16)


def padded(array: Array, width: int, value: float = 0) -> Array:
    """With the last dimension filled up to `width`."""
    missing = width - array.shape[-1]
    if not missing:
        return array
    return np.concatenate((array, np.full((*array.shape[:-1], missing), value, array.dtype)), -1)
