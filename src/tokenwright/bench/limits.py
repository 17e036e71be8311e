"""Measure the limits of this machine: bytes read per second, and multiplications per second.

The native library runs bare loops of the kernels' instructions; without it, torch computes in float32.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from tokenwright.backends.device import CPU, kernel_threads, on_torch, threads_of
from tokenwright.backends.native.native_kernels import NativeKernels, find_kernels, usable
from tokenwright.formats import TABLES
from tokenwright.planner import machine_load
from tokenwright.planner.bandwidth import BandwidthProbe, best_seconds, beyond_caches, cache_sizes

MATRICES: Mapping[str, str] = {  # weight format -> the format whose rate limits its products
    "float32": "float32", "float16": "float32", "bfloat16": "bfloat16", "int8": "int8", "int6": "int8", "int5": "int8",
    "int4": "int4", "int2": "int4", "int1": "int4", **dict.fromkeys(TABLES, "int8"),
}  # fmt: skip
FORMATS = tuple(dict.fromkeys(MATRICES.values()))
TURN = 0.02  # seconds for each limit that `Bound` measures
_CALL = 0.005  # the least seconds of a call, so that waking threads is negligible
_SIDE = 1024

SLOWEST = 0.9  # of one thread's rate; on a quiet machine all threads are faster
SLOWER = "all threads were slower than one"

Kind = Literal["native", "torch"]
Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Rate:
    all_threads: float
    one_thread: float
    busy: str = ""  # why the rate may be too low


@dataclass(frozen=True, slots=True)
class MachineLimits:
    kind: Kind
    threads: int
    memory: Rate
    cache: Rate | None  # repeated reads of `cache_bytes`; None if fewer than two caches are known
    cache_bytes: int
    multiplications: Mapping[str, Rate]  # per second, each with its addition, by format


class Multiplier:
    """Multiplies in a format of FORMATS; a call returns the number of multiplications."""

    def __init__(self, form: str) -> None:
        native = find_kernels()
        self._multiply = _product(form) if native is None else _rounds(native, form)

    def __call__(self) -> int:
        return self._multiply()

    def per_second(self, seconds: float) -> float:
        return self() / best_seconds(self, seconds)


def _rounds(native: NativeKernels, form: str) -> Callable[[], int]:
    rounds = 1024
    while best_seconds(partial(native.multiply, form, rounds), 0) < _CALL:
        rounds *= 2
    return partial(native.multiply, form, rounds)


def _product(form: str) -> Callable[[], int]:
    product = on_torch(CPU).multiplying(_SIDE, "bfloat16" if form == "bfloat16" else "float32")

    def multiply() -> int:
        product()
        return _SIDE**3

    return multiply


@dataclass(frozen=True, slots=True)
class StepWork:
    nbytes: float = 0
    weights: float = 0
    attention: float = 0


@dataclass(frozen=True, slots=True)
class Least:
    """The least seconds for reading and for multiplying, which may overlap."""

    reading: float
    multiplying: float

    @property
    def seconds(self) -> float:
        return max(self.reading, self.multiplying)

    @property
    def bound(self) -> Literal["memory", "matrix"]:
        return "memory" if self.reading >= self.multiplying else "matrix"


class Bound:
    """The least time of work with weights in a format and fp32 attention. Each call measures the limits anew."""

    def __init__(self, nbytes: float, form: str = "float32") -> None:
        self._reader = BandwidthProbe(min(int(nbytes), beyond_caches(CPU)), CPU)
        self._weights, self._attention = Multiplier(MATRICES[form]), Multiplier("float32")

    def __call__(self, work: StepWork) -> Least:
        reading = work.nbytes / self._reader.bytes_per_second(TURN) if work.nbytes else 0.0
        multiplying = work.weights / self._weights.per_second(TURN) if work.weights else 0.0
        if work.attention:
            multiplying += work.attention / self._attention.per_second(TURN)
        return Least(reading, multiplying)


def measure_limits(seconds: float = 0.3, report: Report | None = None) -> MachineLimits:
    """Measure each limit for `seconds`. Calls `report` with (measured, total)."""
    inside, rates = cache_bytes(), dict[str, Rate]()
    names = ("memory", *(("cache",) if inside else ()), *FORMATS)
    for name in names:
        rates[name] = _rate(_probe(name), seconds)
        if report is not None:
            report(len(rates), len(names))
    kind: Kind = "torch" if find_kernels() is None else "native"
    products = {form: rates[form] for form in FORMATS}
    return MachineLimits(kind, kernel_threads.count, rates["memory"], rates.get("cache"), inside, products)


@dataclass(frozen=True, slots=True)
class Probe:
    per_second: Callable[[float], float]
    rival: str = ""
    rival_per_second: Callable[[float], float] | None = None


def _rate(probe: Probe, seconds: float) -> Rate:
    """Measure again while the machine is busy or the rival is faster."""

    def measure() -> tuple[Rate, float]:
        every = probe.per_second(seconds)
        rival = 0.0 if probe.rival_per_second is None else probe.rival_per_second(seconds)
        with threads_of(1):
            return Rate(every, probe.per_second(seconds)), rival

    def doubt(found: tuple[Rate, float]) -> str:
        rate, rival = found
        slower = SLOWER if rate.all_threads < SLOWEST * rate.one_thread else ""
        return machine_load.beaten(probe.rival, rival / rate.all_threads) or slower

    (rate, _), reason = machine_load.quietly(measure, doubt)
    return replace(rate, busy=reason)


def _probe(name: str) -> Probe:
    native = find_kernels()
    if name == "float32" and native is not None and native.isa == usable(native.library)[0]:
        return Probe(Multiplier(name).per_second, "numpy's product", _numpy_per_second)
    if name in FORMATS:
        return Probe(Multiplier(name).per_second)
    reader = BandwidthProbe(cache_bytes() if name == "cache" else beyond_caches(CPU), CPU)
    if name == "memory" and native is not None:
        return Probe(reader.bytes_per_second, "a plain read", reader.plain_bytes_per_second)
    return Probe(reader.bytes_per_second)


def _numpy_per_second(seconds: float) -> float:
    """numpy's rate, scaled to the kernels' threads, as numpy uses all processors."""
    square = np.ones((_SIDE, _SIDE), np.float32)
    product = np.empty_like(square)
    part = min(1.0, kernel_threads.count / (os.cpu_count() or 1))
    return part * _SIDE**3 / best_seconds(partial(np.matmul, square, square, out=product), seconds)


def cache_bytes() -> int:
    """Four times the second-largest caches of all threads, at most half of the largest cache; 0 if unknown."""
    sizes = cache_sizes()
    return min(4 * kernel_threads.count * sizes[-2], sizes[-1] // 2) if len(sizes) > 1 else 0


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
