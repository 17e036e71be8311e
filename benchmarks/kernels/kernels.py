"""Each native kernel as a share of its bound: reading its bytes, or its multiplications, whichever takes longer.

    python -m benchmarks.kernels.kernels [--kernels linear attention rest] [--rows 1 2 4 ..] [--contexts 512 1024 ..]
                                 [--rounds 9] [--mib MIB] [--out build/benchmarks]

    linear      a matrix of --mib, larger than any cache, for up to 16 rows; for more rows one of qwen05's, 4,864 x 896
    attention   qwen05's heads (14, and 2 of K and V, of 64), one layer: one row, compared with reading only, and a
                chunk of 512, over the context; sequences of one row follow each other until --mib are read, so that K
                and V come from memory
    rest        norm and gated activation of 512 rows, in one thread, as a native call runs them; argmax and logsumexp
                of one row of 151,936 logits. Their bytes are those read and those written

A round measures the limit and then the kernel, each as the best of the calls in 20 ms; the output gives the median of
the rounds' shares, with the lowest and the highest. Calls come from Python and cost some microseconds, which matters
for short contexts: the output gives the microseconds of each call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from tokenwright.arrays import DTYPES, Floats, address, empty, narrowed
from tokenwright.backends.device import CPU, kernel_threads, threads_of
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels, find_kernels
from tokenwright.backends.native.struct_builders import ChunkArray, kv_layer, matrix
from tokenwright.backends.packed import LANES, Packed, packed_sizes
from tokenwright.bench.limits import TURN, Bound, StepWork, processor
from tokenwright.cache import Heads, KVStore, LayerSpec
from tokenwright.cache.codec import CODECS
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.formats import WeightFormat
from tokenwright.planner.bandwidth import best_seconds, beyond_caches

DRAW = np.random.default_rng(0)
OF_K_QUANTS = (("int4", 32, 256, True), ("int5", 32, 256, True), ("int6", 16, 256, False), ("int6", 16, 256, True))
WEIGHTS = (
    *map(WeightFormat.parse, ("float32", "bfloat16", "int8", "int4", "int4:64")),
    *(WeightFormat(*one) for one in OF_K_QUANTS),
)
ROWS = (1, 2, 4, 8, 16, 64, 512)
FEW = 16  # most rows that are bound by reading
INNER = 4096  # inner size of the matrix larger than any cache
SMALL = (4864, 896)  # [out, in] of qwen05's gate and up projections,
SMALL_OF_SUPER = (4864, 1024)  # and whole super-blocks of 256
CACHES = ("bfloat16", "int8", "int4", "fp8")
CONTEXTS = (512, 1024, 2048, 4096, 8192)
HEADS = (14, 2, 64)  # of qwen05: query heads, KV heads, and their size
PAGE = 16  # tokens
CHUNK = 512  # rows
VOCABULARY = 151_936
KINDS = ("linear", "attention", "rest")


@dataclass(frozen=True)
class Case:
    """A kernel in one format (of weights or of a cache) and size (rows or context).

    calls: the calls of one run. keeps: the objects that the structs of these calls point to.
    """

    kernel: str
    form: str
    size: int
    work: StepWork
    run: Callable[[], object]
    calls: int = 1
    keeps: tuple[object, ...] = ()


@dataclass(frozen=True)
class Group:
    """Cases under one bound, all with the same number of threads."""

    bound: Bound
    threads: int
    cases: Sequence[Case]


@dataclass(frozen=True)
class Point:
    """Medians of the rounds. gb_per_second: of the bytes that the kernel must read and write.

    share: of the limit, with its lowest and highest. of_reading: the share if only reading were the limit.
    """

    kernel: str
    form: str
    size: int
    microseconds: float
    gb_per_second: float
    g_multiplications_per_second: float
    of_reading: float
    bound: str
    share: float
    low: float
    high: float


def measure(case: Case, bound: Bound, rounds: int) -> Point:
    """Measure the limit and the kernel in turn."""
    pairs = [(bound(case.work), best_seconds(case.run, TURN)) for _ in range(rounds)]
    shares = [least.seconds / took for least, took in pairs]
    seconds, work = median(took for _, took in pairs), case.work
    return Point(
        case.kernel,
        case.form,
        case.size,
        seconds / case.calls * 1e6,
        work.nbytes / seconds / 1e9,
        (work.weights + work.attention) / seconds / 1e9,
        median(least.reading / took for least, took in pairs),
        pairs[-1][0].bound,
        median(shares),
        min(shares),
        max(shares),
    )


def normal(*shape: int) -> Floats:
    """Normally distributed numbers."""
    return DRAW.standard_normal(shape, np.float32)


def filled(out: int, inner: int, form: WeightFormat) -> Packed:
    """A packed matrix of random numbers, of whole blocks and slabs: it needs no padding."""
    packed = Packed.empty(out, inner, form)
    if packed.group:
        packed.codes[:] = DRAW.integers(1, 256, packed.codes.size, np.uint8)
        packed.scales.fill(0.01)
    else:
        numbers = packed.codes.view(DTYPES[form.name])
        numbers[:] = narrowed(normal(numbers.size), numbers.dtype)
    return packed


def linear_groups(kernels: NativeKernels, rows: Sequence[int], nbytes: int) -> Iterator[Group]:
    for form in WEIGHTS:
        codes, scales = packed_sizes(LANES, INNER, form)
        large = (max(1, nbytes // (codes + 2 * scales)) * LANES, INNER)
        for shape, counts in (
            (large, [count for count in rows if count <= FEW]),
            (SMALL_OF_SUPER if form.super else SMALL, [count for count in rows if count > FEW]),
        ):
            if counts:
                packed = filled(*shape, form)
                cases = [linear_case(kernels, packed, str(form), count) for count in counts]
                yield Group(Bound(packed.nbytes, packed.format), kernel_threads.count, cases)


def linear_case(kernels: NativeKernels, packed: Packed, name: str, rows: int) -> Case:
    x, y, struct = normal(rows, packed.inner), empty((rows, packed.out)), matrix(packed)

    def run() -> None:
        places = (byref(struct), rows, address(x), address(y), kernel_threads.count)
        kernels.compute(kernels.library.tw_linear, *places)

    work = StepWork(packed.nbytes, weights=rows * packed.numel)
    return Case("linear", name, rows, work, run, keeps=(packed, x, y))


class Texts:
    """K and V of one layer in one format, filled with random numbers: as many sequences as fit.

    heads: query heads, KV heads, and their size.
    """

    def __init__(self, kernels: NativeKernels, form: str, nbytes: int, heads: tuple[int, int, int] = HEADS) -> None:
        self.kernels, self.form, self.heads = kernels, form, heads
        of = Heads(heads[1], heads[2])
        spec = LayerSpec(of, AttentionWindow(), CODECS[form], CODECS[form], native=CODECS["bfloat16"])
        self.bytes_per_token = spec.bytes_per_token
        self.pages = nbytes // (PAGE * self.bytes_per_token)
        self.store = KVStore([spec], self.pages, PAGE)
        for first in range(0, self.pages * PAGE, max(CONTEXTS)):
            slots = np.arange(first, min(first + max(CONTEXTS), self.pages * PAGE))
            k, v = (normal(len(slots), *heads[1:]) for _ in range(2))
            kernels.store(self.store.view(0), [slots], k, v)

    def case(self, context: int, rows: int, texts: int) -> Case:
        """Attention of the last `rows` rows of each of at most `texts` sequences, one call per sequence."""
        each = -(-context // PAGE)
        tables = [np.arange(at * each, (at + 1) * each, dtype=np.int32) for at in range(min(texts, self.pages // each))]
        arrays = [ChunkArray([(range(rows), context - rows, (table,))]) for table in tables]
        count_of, kv_heads, size = self.heads
        layer, heads = kv_layer(self.store.view(0)), structs.CHeads(count_of, kv_heads, size, size, size**-0.5)
        q, width = normal(rows, count_of, size), count_of * size
        out = empty(q.shape)
        queries = structs.CQueries(0, 0, 0, 0, address(q), None, address(out), width, width, width)
        kernels, count = self.kernels, kernel_threads.count
        attend = kernels.library.tw_attend

        def run() -> None:
            for one in arrays:
                kernels.compute(attend, byref(layer), byref(heads), 1, one.address, PAGE, byref(queries), count)

        work = StepWork(len(arrays) * context * self.bytes_per_token)
        if rows > 1:  # one row is compared with reading only
            pairs = sum(range(context - rows + 1, context + 1))  # pairs of a row and a token that it reads
            work = replace(work, attention=len(arrays) * 2 * width * pairs)
        kernel = f"attention, {rows} row{'s' if rows > 1 else ''}"
        return Case(kernel, self.form, context, work, run, len(arrays), (self.store, q, out))


def attention_groups(kernels: NativeKernels, contexts: Sequence[int], nbytes: int) -> Iterator[Group]:
    for form in CACHES:
        texts = Texts(kernels, form, max(nbytes, max(contexts) * HEADS[1] * HEADS[2] * 2 * 4))
        each = [texts.case(context, 1, 1 << 16) for context in contexts]
        chunks = [texts.case(context, CHUNK, 1) for context in contexts if context >= CHUNK]
        yield Group(Bound(max(one.work.nbytes for one in each)), kernel_threads.count, each)
        if chunks:
            yield Group(Bound(max(one.work.nbytes for one in chunks)), kernel_threads.count, chunks)


def rest_groups(kernels: NativeKernels) -> Iterator[Group]:
    """The groups of the other kernels, which write at most as many numbers as they read."""
    out, inner = SMALL
    x, normed, scale = normal(CHUNK, inner), empty((CHUNK, inner)), np.ones(inner, np.float32)
    up, gated, logits = normal(CHUNK, 2 * out), empty((CHUNK, out)), normal(1, VOCABULARY)
    by, library, handle = structs.CNorm(address(scale), None, 1e-6), kernels.library, kernels.handle

    def norm() -> None:
        library.tw_norm(handle, byref(by), CHUNK, inner, address(x), address(normed))

    def gate() -> None:
        library.tw_gated(handle, structs.ACTIVATIONS["silu"], CHUNK, out, address(up), address(gated))

    for kernel, run, count, nbytes in (
        ("norm", norm, 1, x.nbytes + normed.nbytes),
        ("gated", gate, 1, up.nbytes + gated.nbytes),
        ("summary", lambda: kernels.summarise(logits), kernel_threads.count, logits.nbytes),
    ):
        yield Group(Bound(nbytes), count, [Case(kernel, "float32", CHUNK if count == 1 else 1, StepWork(nbytes), run)])


def groups(kernels: NativeKernels, arguments: argparse.Namespace) -> Iterator[Group]:
    if "linear" in arguments.kernels:
        yield from linear_groups(kernels, arguments.rows, arguments.mib << 20)
    if "attention" in arguments.kernels:
        yield from attention_groups(kernels, arguments.contexts, arguments.mib << 20)
    if "rest" in arguments.kernels:
        yield from rest_groups(kernels)


def measure_all(kernels: NativeKernels, arguments: argparse.Namespace) -> list[Point]:
    found = []
    for group in groups(kernels, arguments):
        with threads_of(group.threads):
            for case in group.cases:
                found.append(measure(case, group.bound, arguments.rounds))
                print(" ".join(row(found[-1])), file=sys.stderr, flush=True)
    return found


def row(point: Point) -> tuple[str, ...]:
    return (
        point.kernel,
        point.form,
        f"{point.size:,}",
        f"{point.microseconds:,.1f}",
        f"{point.gb_per_second:,.1f}",
        f"{point.g_multiplications_per_second:,.0f}",
        f"{point.of_reading:.2f}",
        point.bound,
        f"{point.share:.2f} ({point.low:.2f} to {point.high:.2f})",
    )


def report(points: Sequence[Point]) -> str:
    head = ("kernel", "form", "rows or context", "µs a call", "GB/s", "G mult/s", "of reading", "bound", "share")
    rule = ("---", *("---:" for _ in head[1:]))
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *map(row, points)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=beyond_caches(CPU) >> 20, help="of what comes from memory")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    kernels = find_kernels()
    if kernels is None:
        parser.error("there are no native kernels here, or TOKENWRIGHT_KERNELS asks for others")
    before = os.getloadavg()[0]
    points = measure_all(kernels, arguments)
    title = f"{processor()}, {kernels.isa}, {kernel_threads.count} threads"
    print(f"{title}, load {before:.2f} before\n\n{report(points)}", end="")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"about": title, "load": before, "points": [asdict(one) for one in points]}
    (arguments.out / "kernels.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
