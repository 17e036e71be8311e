"""What this machine can do at most, by a clock: bytes read, and multiplications made, in a second.

The native kernels measure it with their own instructions. Where there are none torch does: a sum reads, and a product
of square matrices multiplies, in float32 for int8 as well, since the reference kernels decode quantised weights.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tokenwright.backends.native.kernels import NativeKernels, find_kernels
from tokenwright.planner.bandwidth import Reader, best_seconds, beyond_caches, cache_sizes

CPU = torch.device("cpu")
MATRICES: Mapping[str, str] = {  # the format whose rate bounds a product with weights in that one
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int8",
}
FORMATS = tuple(dict.fromkeys(MATRICES.values()))
TURN = 0.02  # seconds of one limit, where it is measured again beside what it bounds
_CALL = 0.005  # seconds of a call at least, beside which waking threads is nothing
_SIDE = 1024  # of the matrices that torch multiplies

Kind = Literal["native", "torch"]
Report = Callable[[int, int], None]  # how much is done, and of how much


@dataclass(frozen=True, slots=True)
class Rate:
    """So much in a second: with all threads, and with one."""

    all_threads: float
    one_thread: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine can do at most. `kind`: who measured it.

    memory, cache: bytes read; `cache_bytes` are read from the largest cache again and again, and no cache is told where
    the system does not name two. multiplications: by format, each with its addition, so that operations are twice that.
    """

    kind: Kind
    threads: int
    memory: Rate
    cache: Rate | None
    cache_bytes: int
    multiplications: Mapping[str, Rate]


class Multiplier:
    """Multiplications in a format of FORMATS, with torch's threads; a call makes as many as take a while."""

    def __init__(self, form: str) -> None:
        native = find_kernels()
        self._multiply = _product(form) if native is None else _rounds(native, form)

    def __call__(self) -> int:
        """Returns how many it made."""
        return self._multiply()

    def per_second(self, seconds: float) -> float:
        """By the best of several calls, made for so long."""
        return self() / best_seconds(self, seconds)


def _rounds(native: NativeKernels, form: str) -> Callable[[], int]:
    rounds = 1024
    while best_seconds(partial(native.multiply, form, rounds), 0) < _CALL:
        rounds *= 2
    return partial(native.multiply, form, rounds)


def _product(form: str) -> Callable[[], int]:
    square = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)

    def multiply() -> int:
        torch.mm(square, square)
        return _SIDE**3

    return multiply


@dataclass(frozen=True, slots=True)
class Work:
    """What something cannot do without: bytes to read, and multiplications with weights and in attention."""

    nbytes: float = 0
    weights: float = 0
    attention: float = 0


@dataclass(frozen=True, slots=True)
class Least:
    """The seconds that reading takes, and that multiplying does. At best one hides behind the other."""

    reading: float
    multiplying: float

    @property
    def seconds(self) -> float:
        return max(self.reading, self.multiplying)

    @property
    def bound(self) -> Literal["memory", "matrix"]:
        """Which of the two it is that bounds."""
        return "memory" if self.reading >= self.multiplying else "matrix"


class Bound:
    """What bounds work with weights of a format, measured anew at every call.

    nbytes: of the work, which are read where they would lie: in a cache that holds them, and else in memory. Attention
    is computed in float32 whatever is stored.
    """

    def __init__(self, nbytes: float, form: str = "float32") -> None:
        self._reader = Reader(min(int(nbytes), beyond_caches(CPU)), CPU)
        self._weights, self._attention = Multiplier(MATRICES[form]), Multiplier("float32")

    @property
    def nbytes(self) -> int:
        """Of the buffer that is read."""
        return self._reader.nbytes

    def __call__(self, work: Work) -> Least:
        reading = work.nbytes / self._reader.bytes_per_second(TURN) if work.nbytes else 0.0
        multiplying = work.weights / self._weights.per_second(TURN) if work.weights else 0.0
        if work.attention:
            multiplying += work.attention / self._attention.per_second(TURN)
        return Least(reading, multiplying)


def measure_limits(seconds: float = 0.3, report: Report | None = None) -> Limits:
    """All limits, each measured for so long. `report` is called with (measured, to be measured)."""
    inside, rates = cache_bytes(), dict[str, Rate]()
    names = ("memory", *(("cache",) if inside else ()), *FORMATS)
    for name in names:
        per_second = _probe(name)
        every = per_second(seconds)
        with threads(1):
            rates[name] = Rate(every, per_second(seconds))
        if report is not None:
            report(len(rates), len(names))
    kind: Kind = "torch" if find_kernels() is None else "native"
    products = {form: rates[form] for form in FORMATS}
    return Limits(kind, torch.get_num_threads(), rates["memory"], rates.get("cache"), inside, products)


def _probe(name: str) -> Callable[[float], float]:
    """What measures the limit of that name for so many seconds, with torch's threads."""
    if name in FORMATS:
        return Multiplier(name).per_second
    return Reader(cache_bytes() if name == "cache" else beyond_caches(CPU), CPU).bytes_per_second


def cache_bytes() -> int:
    """Bytes that the largest cache holds and the smaller ones do not, as far as there are such; 0 if they are unknown.

    Four times the next smaller caches of all threads, and at most half of the largest, which others use too.
    """
    sizes = cache_sizes()
    return min(4 * torch.get_num_threads() * sizes[-2], sizes[-1] // 2) if len(sizes) > 1 else 0


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor() -> str:
    """Its name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
