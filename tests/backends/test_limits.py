"""The native limits do the work that is counted: all bytes are read, and as many multiplications made as are told."""

import platform

import numpy as np
import pytest

from tests.backends.native import KERNELS, each_isa, threads
from tokenwright.arrays import Bytes
from tokenwright.backends.device import kernel_threads
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.planner.bandwidth import best_seconds

PIECE = 1 << 16  # the fewest bytes that a thread takes at a time
SIZES = (4, 255, 256, 1000, PIECE, 3 * PIECE + 512, 11 * PIECE + 77)
PORTABLE = (16 if platform.machine() == "aarch64" else 12, 4)  # independent sums, lanes
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")


def random_bytes(count: int) -> Bytes:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def reads_all(kernels: NativeKernels, buffer: Bytes) -> bool:
    """Whether the sum is that of its 32-bit words, and of the bytes behind the last one."""
    data, whole = buffer, buffer.nbytes // 4 * 4
    total = int(data[:whole].view(np.uint32).sum(dtype=np.uint64)) + int(data[whole:].sum(dtype=np.uint64))
    return all(kernels.read(buffer, ahead) == total % 2**32 for ahead in (0, 4096))


def right_count(kernels: NativeKernels, form: str, rounds: int) -> bool:
    """Some independent sums of a register, four products a lane in integers; on AMX four products of tiles."""
    integer = form.startswith("int")
    sums, lanes = {"portable": PORTABLE, "dotprod": PORTABLE, "avx2": (12, 8), "avxvnni": (12, 8)}.get(
        kernels.isa, (16, 16)
    )
    each = sums * lanes * (4 if integer else 1)
    if kernels.isa == "amx" and (integer or form == "bfloat16"):
        each = 4 * 16 * 16 * (64 if integer else 32)
    return kernels.multiply(form, rounds) == rounds * each * kernel_threads.count


class Forgetful(NativeKernels):
    """Leaves out the last line, and counts a round too many."""

    def read(self, buffer: Bytes, ahead: int = 0) -> int:
        return super().read(buffer[:-64], ahead)

    def multiply(self, form: str, rounds: int) -> int:
        return super().multiply(form, rounds + 1)


@each_isa
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_byte_is_read(isa: str, count: int) -> None:
    with threads(count):
        assert all(reads_all(KERNELS[isa], random_bytes(size)) for size in SIZES)


@each_isa
@pytest.mark.parametrize("form", FORMATS)
def test_multiplications_are_as_many_as_are_told(isa: str, form: str) -> None:
    for count in (1, 2):
        with threads(count):
            assert all(right_count(KERNELS[isa], form, rounds) for rounds in (0, 1, 1000))


def best_rate(kernels: NativeKernels, form: str) -> float:
    rounds = 100_000
    return kernels.multiply(form, rounds) / min(
        best_seconds(lambda: kernels.multiply(form, rounds), 0) for _ in range(9)
    )


@each_isa
def test_no_product_is_optimised_away(isa: str) -> None:
    """VNNI makes four times as many products of bytes as of floats, AMX thirty times; an empty loop makes more."""
    with threads(1):
        floats = best_rate(KERNELS[isa], "float32")
        most = 100 if isa == "amx" else 10
        assert all(best_rate(KERNELS[isa], form) < most * floats for form in ("int8", "int4"))


@each_isa
def test_what_is_left_out_is_noticed(isa: str) -> None:
    forgetful = Forgetful(KERNELS[isa].library, isa)
    assert not reads_all(forgetful, random_bytes(2 * PIECE))
    assert not any(right_count(forgetful, form, 10) for form in FORMATS)
