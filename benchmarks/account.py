"""The account of a step: where its time goes, op by op, and how near each op is to its limit.

    python -m benchmarks.kernels --account [--model qwen05] [--weights int8] [--kv int8] [--contexts 512 4096]
                                 [--rounds 9] [--out build/benchmarks] [--beside account.json]

The step and its parts are measured in the engine (of decode the fastest of some steps; a pass tells its times). Each op
is measured alone, over the matrices of all layers and over one text per layer, so that weights, K and V come from
where they come from in a step. `rest` is the step less its ops: embedding, rotation, sampling, the engine, and waiting
for threads. Norms, gates and storing run in one thread when they are called alone; their time is divided by the
threads that a step of several rows has. A share is that of the limit measured just before the op. The picture has the
account of a file beside this one, such as an earlier edition's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch

from benchmarks.kernels import CHUNK, PAGE, Case, Point, Texts, measure, normal
from benchmarks.quality import COLOURS, canvas, save, table
from tokenwright import LLM
from tokenwright.arrays import address, empty
from tokenwright.backends.device import kernel_threads, threads_of
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.native.struct_builders import ChunkArray, kv_layer, matrix
from tokenwright.bench.limits import Bound, StepWork, processor
from tokenwright.bench.shapes import default_root, ready
from tokenwright.errors import RequestError
from tokenwright.models.graph import MLP, Attention
from tokenwright.models.op import Matrix
from tokenwright.trace.messages.schema import StepFrame

IN_ENGINE = ", in the engine"
DECODED = 8  # decode steps that are measured, of which the fastest counts


@dataclass(frozen=True)
class Entry:
    """An op of a step, of all layers together. share: of the step's time."""

    step: str
    op: str
    microseconds: float
    share: float
    nbytes: float = 0
    gb_per_second: float = 0
    g_multiplications_per_second: float = 0
    bound: str = ""
    of_limit: float = 0


class StepOps:
    """The ops of a model of attention and MLPs, each as a case over all layers."""

    def __init__(self, kernels: NativeKernels, llm: LLM, kv: str) -> None:
        decoder = llm.loaded.decoder
        assert isinstance(decoder, NativeDecoder), "the native kernels are there"
        self.kernels, self.kv, self.native = kernels, kv, decoder.native
        graph = decoder.graph
        self.attention = [op for op in graph.ops if isinstance(op, Attention)]
        self.mlp = [op for op in graph.ops if isinstance(op, MLP)]
        if not self.attention or 2 + len(self.attention) + len(self.mlp) != len(graph.ops):
            raise RequestError("an account is of models whose layers are attention and an MLP")
        self.head = graph.head

    def cases(self, rows: int, context: int) -> Iterator[tuple[Case, int]]:
        """Each op of a step of `rows` rows up to a context, with its number of threads."""
        threads, one = kernel_threads.count, self.attention[0]
        yield self.linear("qkv", [op.qkv for op in self.attention], rows), threads
        yield self.store(rows), 1
        yield self.attend(rows, context), threads
        yield self.linear("out", [op.out for op in self.attention], rows), threads
        yield self.linear("up", [op.up for op in self.mlp], rows), threads
        yield self.gate(rows), 1
        yield self.linear("down", [op.down for op in self.mlp], rows), threads
        yield self.norm(rows, one.qkv.inner, len(self.attention) + len(self.mlp)), 1
        yield self.linear("head", [self.head.matrix], 1), threads

    def linear(self, name: str, of: Sequence[Matrix], rows: int) -> Case:
        packed = [self.native.packed(one) for one in of]
        structs = [matrix(one) for one in packed]
        x, y = normal(rows, packed[0].inner), empty((rows, packed[0].out))

        def run() -> None:
            for one in structs:
                places = (byref(one), rows, address(x), address(y), kernel_threads.count)
                self.kernels.compute(self.kernels.library.tw_linear, *places)

        nbytes, numel = sum(one.nbytes for one in packed), sum(one.numel for one in packed)
        return Case(f"linear {name}", packed[0].format, rows, StepWork(nbytes, weights=rows * numel), run, 1, (x, y))

    def texts(self, context: int) -> Texts:
        """One text for each layer."""
        one = self.attention[0]
        nbytes = 8 * one.kv_heads * one.head_size * (context + PAGE) * len(self.attention)
        return Texts(self.kernels, self.kv, nbytes, (one.heads, one.kv_heads, one.head_size))

    def attend(self, rows: int, context: int) -> Case:
        found = self.texts(context).case(context, rows, len(self.attention))
        one, pairs = self.attention[0], sum(range(context - rows + 1, context + 1))
        products = len(self.attention) * 2 * one.heads * one.head_size * pairs
        return replace(found, kernel="attention", calls=1, work=replace(found.work, attention=products))

    def store(self, rows: int) -> Case:
        one, texts = self.attention[0], self.texts(rows)
        k, v = (normal(rows, one.kv_heads, one.head_size) for _ in range(2))
        layer, heads = kv_layer(texts.store.view(0)), structs.CHeads(0, *k.shape[1:], k.shape[2], 0, 0)
        array = ChunkArray([(range(rows), 0, (np.arange(-(-rows // PAGE), dtype=np.int32),))])
        library, handle = self.kernels.library, self.kernels.handle

        def run() -> None:
            for _ in self.attention:
                library.tw_store_kv(handle, byref(layer), byref(heads), 1, array.address, PAGE, address(k), address(v))

        nbytes = len(self.attention) * (k.nbytes + v.nbytes + rows * texts.bytes_per_token)
        return Case("store K and V", self.kv, rows, StepWork(nbytes), run, 1, (texts, array))

    def gate(self, rows: int) -> Case:
        op = self.mlp[0]
        up, act = normal(rows, op.up.out), empty((rows, op.down.inner))
        library, kind = self.kernels.library, structs.ACTIVATIONS["silu"]

        def run() -> None:
            for _ in self.mlp:
                library.tw_gated(self.kernels.handle, kind, rows, op.down.inner, address(up), address(act))

        return Case("gate", "float32", rows, StepWork(len(self.mlp) * (up.nbytes + act.nbytes)), run, 1, (up, act))

    def norm(self, rows: int, width: int, count: int) -> Case:
        x, y, scale = normal(rows, width), empty((rows, width)), np.ones(width, np.float32)
        by, library = structs.CNorm(address(scale), None, 1e-6), self.kernels.library

        def run() -> None:
            for _ in range(count):
                library.tw_norm(self.kernels.handle, byref(by), rows, width, address(x), address(y))

        return Case("norms", "float32", rows, StepWork(count * (x.nbytes + y.nbytes)), run, 1, (x, y, scale))


def measured(llm: LLM, context: int) -> dict[str, StepFrame]:
    """The step of a chunk of 512 rows up to a context, and the fastest of some decode steps behind it."""
    ids = np.random.default_rng(0).integers(5, llm.config.vocab_size, context).tolist()
    frames: list[StepFrame] = []
    with llm.run(ids, max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True) as run:
        while not run.ended:
            frames += run.step()
    chunks = [one for one in frames if one.start == context - CHUNK]
    singles = [one for one in frames if one.start >= context]
    return {"chunk of 512": chunks[0], "decode": min(singles, key=lambda one: one.step_us)}


def entries(ops: StepOps, step: str, frame: StepFrame, context: int, rounds: int) -> Iterator[Entry]:
    """The account of one step: its ops, the rest, and the parts that the pass itself tells."""
    whole, counted = frame.step_us, 0.0
    name = f"{step} at {context:,}"
    for case, threads in ops.cases(frame.length, context):
        with threads_of(threads):
            point = measure(case, Bound(case.work.nbytes, _products(case)), rounds)
        took = point.microseconds / (1 if threads > 1 else min(frame.length, kernel_threads.count))
        counted += took
        yield _entry(name, case, point, took, whole)
    yield Entry(name, "rest", whole - counted, 1 - counted / whole)
    parts = {"attention": frame.attention_us, "MLP": frame.mlp_us, "head": frame.head_us, "whole step": whole}
    for part, took in parts.items():
        yield Entry(name, f"{part}{IN_ENGINE}", took, took / whole)


def _products(case: Case) -> str:
    return case.form if case.work.weights else "float32"


def _entry(step: str, case: Case, point: Point, took: float, whole: float) -> Entry:
    faster = point.microseconds / took
    rates = (point.gb_per_second * faster, point.g_multiplications_per_second * faster)
    return Entry(step, case.kernel, took, took / whole, case.work.nbytes, *rates, point.bound, point.share)


def row(one: Entry) -> tuple[str, ...]:
    rates = ("", "", "", "", "")
    if one.nbytes:
        rates = (
            f"{one.nbytes / 1e6:,.1f}",
            f"{one.gb_per_second:,.1f}",
            f"{one.g_multiplications_per_second:,.0f}",
            one.bound,
            f"{one.of_limit:.2f}",
        )
    return (one.step, one.op, f"{one.microseconds:,.0f}", f"{100 * one.share:.1f}", *rates)


def report(found: Iterable[Entry]) -> str:
    head = ("step", "op, all layers", "µs", "% of the step", "MB", "GB/s", "G mult/s", "bound", "share of it")
    return table(head, map(row, found))


def picture(accounts: Mapping[str, Sequence[Entry]], path: Path) -> None:
    """Draw each step as a bar of its ops, one below the other for each account."""
    steps = list(dict.fromkeys(one.step for account in accounts.values() for one in account))
    ops = list(dict.fromkeys(one.op for account in accounts.values() for one in account if IN_ENGINE not in one.op))
    looks = {op: {"color": COLOURS[i % len(COLOURS)], "alpha": 1 - i // len(COLOURS) / 2} for i, op in enumerate(ops)}
    figure, places = canvas(figsize=(9, 0.8 + 0.55 * len(accounts) * len(steps)), nrows=len(steps), squeeze=False)
    for axes, step in zip(places[:, 0], steps, strict=True):
        for label, account in reversed(accounts.items()):
            end = 0.0
            for one in account:
                if one.step == step and one.op in looks and one.microseconds > 0:
                    took = one.microseconds / 1e3
                    axes.barh(label, took, left=end, **looks[one.op])
                    end += took
        axes.set_title(step, loc="left", fontsize=9)
    places[-1, 0].set_xlabel("ms")
    patches = [Patch(label=op, **look) for op, look in looks.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=7)
    save(figure, path)


def write_account(kernels: NativeKernels, arguments: argparse.Namespace) -> None:
    """Measure the steps of a model, print their account and write it as JSON."""
    path = ready(arguments.model, default_root())
    found: list[Entry] = []
    before = os.getloadavg()[0]
    pages = max(arguments.contexts) // PAGE + CHUNK // PAGE
    with LLM(path, weights=arguments.weights, kv=arguments.kv, trace=True, pages=pages) as llm:
        ops = StepOps(kernels, llm, arguments.kv)
        for context in arguments.contexts:
            for step, frame in measured(llm, context).items():
                for one in entries(ops, step, frame, context, arguments.rounds):
                    found.append(one)
                    print(" ".join(row(one)), file=sys.stderr, flush=True)
    formats = f"{arguments.model}, weights {arguments.weights}, K and V {arguments.kv}"
    title = f"{processor()}, {kernels.isa}, {kernel_threads.count} threads, {formats}"
    print(f"{title}, load {before:.2f} before\n\n{report(found)}", end="")
    record = {"about": title, "load": before, "entries": [asdict(one) for one in found]}
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    (Path(arguments.out) / "account.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    accounts = {"now": found}
    if arguments.beside:
        beside = json.loads(arguments.beside.read_text(encoding="utf-8"))
        accounts = {"before": [Entry(**one) for one in beside["entries"]], **accounts}
    picture(accounts, Path(arguments.out) / "account.svg")
