"""The memory bandwidth of this machine, the one measured figure of a plan."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import numpy as np

from tokenwright.arrays import aligned_bytes
from tokenwright.backends.device import Device, free_memory, kernel_threads, on_torch, resolve_device
from tokenwright.backends.native.expert_pool import THREADS
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.planner import machine_load

_LEAST, _MOST = 1 << 28, 1 << 32
_SECONDS = 0.3
_AHEAD = (0, 4096)  # bytes from a read to its prefetch


@dataclass(frozen=True, slots=True)
class Bandwidth:
    bytes_per_second: float
    kind: Literal["measured", "given"]
    place: str
    busy: str = ""  # why the figure may be too low

    def facts(self) -> dict[str, Any]:
        named = {"bytes_per_second": self.bytes_per_second, "kind": self.kind}
        return named | {"of": self.place, "busy": self.busy}


class BandwidthProbe:
    """A buffer of `nbytes` that a call reads once, by the native kernels or torch's sum."""

    def __init__(self, nbytes: int, place: Device) -> None:
        self._native = find_kernels() if place.type == "cpu" else None
        self._read: Callable[[], object] = self._by_kernels
        if self._native is None:
            self._read, self.nbytes = on_torch(place).summing(nbytes)
        else:
            self._buffer = aligned_bytes(nbytes)
            self._buffer[:] = 1  # makes the system allocate the memory
            self.nbytes = self._buffer.nbytes
        self._ahead = 0
        self()
        if self._native is not None:
            self._ahead = min(_AHEAD, key=self._seconds)

    def __call__(self) -> None:
        self._read()

    def _by_kernels(self) -> None:
        assert self._native is not None, "without kernels torch reads"
        self._native.read(self._buffer, self._ahead)

    def _seconds(self, ahead: int) -> float:
        self._ahead = ahead
        return min(best_seconds(self, 0.0) for _ in range(2))

    def plain_bytes_per_second(self, seconds: float) -> float:
        """The rate of NumPy's maxima over the same buffer, by as many threads."""
        numbers, count = self._buffer.view(np.uint64), kernel_threads.count
        parts = np.array_split(numbers, count)
        with ThreadPoolExecutor(count) as pool:
            return self.nbytes / best_seconds(lambda: list(pool.map(np.max, parts)), seconds)

    def bytes_per_second(self, seconds: float) -> float:
        return self.nbytes / best_seconds(self, seconds)


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    """The fastest of the calls within `seconds`, at least one."""
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(device: str = "auto", seconds: float = _SECONDS) -> Bandwidth:
    place = resolve_device(device)
    reader = BandwidthProbe(beyond_caches(place), place)
    rate, reason = machine_load.quietly(lambda: reader.bytes_per_second(seconds), lambda _: "")
    return Bandwidth(rate, "measured", str(place), reason)


def measure_disk(folder: Path, piece: int) -> Bandwidth:
    """The rate at which THREADS threads read pieces of a new file, past the page cache."""
    pieces = max(4, _LEAST // piece)
    with NamedTemporaryFile(dir=folder) as file:
        for _ in range(pieces):
            file.write(os.urandom(piece))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            read = sum(pool.map(lambda i: len(os.pread(file.fileno(), piece, (7 * i) % pieces * piece)), range(pieces)))
        return Bandwidth(read / (time.perf_counter() - began), "measured", str(folder))


def beyond_caches(place: Device) -> int:
    """At least four times the largest cache, but at most a quarter of the free memory."""
    wanted = _MOST if place.type != "cpu" else max(_LEAST, 4 * max(cache_sizes(), default=0))
    return max(4, min(wanted, _MOST, (free_memory(place) or _MOST) // 4))


def cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> list[int]:
    """Bytes in ascending order; empty if the system does not report them."""
    texts = [file.read_text().strip() for file in folder.glob("index*/size")]
    return sorted(int(text[:-1]) << 10 for text in texts if text.endswith("K") and text[:-1].isdigit())
