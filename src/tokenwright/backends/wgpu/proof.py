"""Prove a GPU's kernels against the CPU's before use, on the model's own shapes, weights and cache formats.

Each op starts from the CPU's numbers, so that an error names its kernel. Rows must have the same bits in wide tiles as
by themselves, or such tiles are left out.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import wgpu

from tokenwright.arrays import Array, Floats
from tokenwright.backends.layout import Weights
from tokenwright.backends.native.compile import compiles
from tokenwright.backends.native.native_kernels import NativeKernels, find_kernels
from tokenwright.backends.native.native_passes import NativePasses
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.backends.packed import Packed
from tokenwright.backends.wgpu.gpu import HELP, SHADERS, Gpu
from tokenwright.backends.wgpu.gpu_backend import GpuBackend, GpuDecoder
from tokenwright.backends.wgpu.gpu_memory import GpuMemory
from tokenwright.cache import KVStore, LayerSpec, layer_specs
from tokenwright.engine import Batch, one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.formats import DType, KVFormat
from tokenwright.models.graph import Graph
from tokenwright.models.taps import Site
from tokenwright.regular_file import draft_file, open_regular

PAGE, PAGES = 16, 5
LAST = 4
ROWS, FEW_ROWS = 67, 6  # beyond a block of 64 positions, for the first format; a few for others
CODECS = ("native", "int8", "int4", "fp8")
_KERNELS = {  # site -> the kernels since the site before
    Site.EMBEDDING: "embed", Site.ATTENTION_INPUT: "norm", Site.QUERY: "linear and heads",
    Site.MIXED: "heads and attention", Site.ATTENTION: "linear and norm", Site.MLP_HIDDEN: "linear and activate",
    Site.MLP: "linear and norm, or route and mix",
}  # fmt: skip
# A cache format's largest step between codes, over the largest number.
_STEPS = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7, "int8": 2 / 127, "fp8": 1 / 8, "int4": 1 / 4}


@dataclass(frozen=True, slots=True)
class Finding:
    """The largest difference from the CPU's numbers, over the largest number of its row."""

    kernel: str
    kv: str
    difference: float
    allowed: float

    @property
    def sound(self) -> bool:
        return self.difference <= self.allowed  # False for a NaN


def prove(gpu: Gpu, graph: Graph, weights: Weights, dtype: DType) -> bool:
    """Whether tiles of several rows may be used. Raises RequestError for a GPU that computes other numbers."""
    with gpu.proving:
        gpu.proved = gpu.proved or read_proof(gpu)
        found, wide = proof(gpu, graph, weights, dtype)
        if found:
            keep_proof(gpu)
    for one in found:
        if not one.sound:
            told = f"{one.kernel} (cache {one.kv}) differs by {one.difference:.1e} of the largest number"
            told = f"{told}, and {one.allowed:.1e} is rounding; update its driver, or {HELP}"
            raise RequestError(f"{gpu.name} computes other numbers than the CPU: {told}", "device")
    return wide


def proof(gpu: Gpu, graph: Graph, weights: Weights, dtype: DType) -> tuple[list[Finding], bool]:
    """The findings of kernels and cache formats not yet proved in this process, and whether wide tiles may be used."""
    native = find_kernels()
    if native is None or not compiles(graph):
        raise RequestError(f"a GPU is checked against the native kernels, which are missing here; {HELP}", "device")
    first = first_layers(graph, weights)
    needed = {name: one for name, one in weights.items() if name in first.matrices or name in first.dense}
    decoder = GpuDecoder(first, gpu, {**needed})
    found: list[Finding] = []
    used: set[Any] = set()
    for kv in CODECS:
        # Shaders store keys with their bias.
        specs = tuple(replace(one, unbiased=False) for one in layer_specs(first, dtype, KVFormat.parse(kv)))
        try:
            backend = _backend(decoder, specs)
        except RequestError:  # heads that the format does not fit: it is refused where it is asked for
            continue
        keys = {kernel.key for one in backend.compiled.dispatches for kernel in (one.kernel, one.wide) if kernel}
        used |= keys
        if keys <= gpu.proved.keys():
            continue
        rows = ROWS if kv == "native" else FEW_ROWS
        allowed = _rounding(needed, native), _STEPS[dtype if kv == "native" else kv]
        found += _compared(backend, NativeDecoder(first, native, needed), kv, rows, allowed)
        if not all(one.sound for one in found):
            break
        decoder.wide = decoder.wide and _alike(decoder, specs, rows)
        gpu.proved |= dict.fromkeys(keys, decoder.wide)
    return found, all(gpu.proved.get(key, False) for key in used)


def proof_file(gpu: Gpu) -> Path:
    """Where the proof of an adapter, its driver and these kernels is kept. Raises RequestError without a home."""
    texts = [gpu.altered(one.stem, one.read_text()) for one in sorted(SHADERS.iterdir())]
    name = sha256(json.dumps([gpu.name, wgpu.__version__, texts]).encode()).hexdigest()[:40]
    return Environment.read().cache_folder("gpu") / f"{name}.json"


def read_proof(gpu: Gpu) -> dict[Any, bool]:
    """The kernels proved by earlier processes; none from a link, or a file that another user can write."""
    with suppress(OSError, RequestError, ValueError, TypeError), open_regular(proof_file(gpu), links=False) as stream:
        about = os.fstat(stream.fileno())
        if about.st_uid == os.geteuid() and not about.st_mode & 0o022:
            return {(name, *map(tuple, more)): wide is True for (name, *more), wide in json.load(stream)}
    return {}


def keep_proof(gpu: Gpu) -> None:
    with suppress(OSError, RequestError):  # the next process proves them again
        file = proof_file(gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(file) as draft:
            draft.chmod(0o600)
            draft.write_text(json.dumps(list(gpu.proved.items())), encoding="utf-8")


def first_layers(graph: Graph, weights: Weights) -> Graph:
    """The graph of the first layers, up to the last op unlike all before it, or with weights in another form."""
    seen: set[str] = set()
    most = 0
    for op in graph.blocks:
        layer = getattr(op.parts[0], "layer", most)
        packed = [weights[one.name] for one in op.matrices]
        alike = repr((op, [one.form for one in packed if isinstance(one, Packed)]))
        alike = alike.replace(f".{layer}.", ".").replace(f"layer={layer}", "")
        most = most if alike in seen else layer
        seen.add(alike)
    return replace(graph, blocks=graph.blocks[: len(graph.blocks) - len(graph.blocks_from(most + 1))])


def _backend(decoder: GpuDecoder, specs: tuple[LayerSpec, ...]) -> GpuBackend:
    return GpuBackend(decoder, KVStore(specs, PAGES, PAGE, GpuMemory(decoder.gpu)))


def _batch(graph: Graph, groups: int, start: int, stop: int) -> Batch:
    tokens = [(17 + 31 * place) % graph.vocab_size for place in range(start, stop)]
    table = PageTable({page: PAGES - 1 - page for page in range(PAGES)})
    batch = one_chunk(tokens, start, [table] * groups, PAGE * PAGES)
    batch.logits_rows = batch.logits_rows[-LAST:]
    return batch


def _compared(
    backend: GpuBackend, cpu: NativeDecoder, kv: str, rows: int, allowed: tuple[float, float]
) -> Iterator[Finding]:
    """allowed: for rounding, and beyond that for the codes of K and V."""
    graph, groups = cpu.graph, len(backend.store.groups)
    theirs: dict[tuple[Site, int], Array] = {}
    worst: dict[str, float] = {}

    def keep(site: Site, layer: int, value: Array) -> None:
        theirs[site, layer] = value.copy()

    def compare(site: Site, layer: int, value: Floats) -> None:
        if (expected := theirs.get((site, layer))) is not None:
            name = _KERNELS[site]
            worst[name] = float(np.maximum(worst.get(name, 0.0), _difference(value, expected)))  # a NaN stays

    batch = _batch(graph, groups, 0, rows)
    store = KVStore(backend.store.specs, PAGES, PAGE)
    NativePasses(cpu.over_arrays, cpu.kernels).run(batch, store, keep)
    expected = NativeBackend(cpu, store)(batch)
    backend.forced, backend.gpu.draws = theirs, True
    logits = backend.tapped(batch, compare)
    found = np.asarray(logits.rows)
    worst["linear, summary"] = _difference(found, expected.rows)
    few = [(row, *logits.rows[i].few(0)) for i, row in enumerate(found)]
    highest = all(np.array_equal(np.sort(row[ids]), np.sort(row)[-len(ids) :]) for row, ids, _ in few)
    worst["top"] = float(not highest or any((row[ids] != each).any() for row, ids, each in few))
    totals = np.subtract(logits.log_totals, expected.log_totals)
    worst["summary"] = float(np.abs(totals).max() / max(1e-9, np.abs(expected.log_totals).max()))
    reading = (_KERNELS[Site.MIXED], _KERNELS[Site.ATTENTION])  # with a gate only the latter is compared
    return (Finding(name, kv, one, allowed[0] + allowed[1] * (name in reading)) for name, one in worst.items())


def _alike(decoder: GpuDecoder, specs: tuple[LayerSpec, ...], rows: int) -> bool:
    """Whether rows have the same bits together, in parts and by themselves."""
    graph, whole, parts = decoder.graph, _backend(decoder, specs), _backend(decoder, specs)
    groups = len(whole.store.groups)
    together = np.asarray(whole(_batch(graph, groups, 0, rows)).rows)
    ends = (0, rows - 3, rows - 1, rows)
    found = [np.asarray(parts(_batch(graph, groups, *each)).rows) for each in pairwise(ends)]
    return np.concatenate(found)[-LAST:].tobytes() == together.tobytes()


def _rounding(weights: Weights, native: NativeKernels) -> float:
    """The allowed difference of sums in another order: n 2^-22 of n products, and a code's step."""
    packed = [one for one in weights.values() if isinstance(one, Packed)]
    amx = native.isa == "amx"  # rounds the inputs of bfloat16
    step = max(2 / 127 if one.group else 2**-7 * (amx and one.format == "bfloat16") for one in packed)
    return max(one.inner for one in packed) * 2**-22 + step


def _difference(found: Floats, expected: Floats) -> float:
    """The largest difference, over the largest number of its row; NaN if one is none."""
    rows = len(expected)
    ours, theirs = found.reshape(rows, -1), np.asarray(expected, np.float32).reshape(rows, -1)
    return float((np.abs(ours - theirs).max(1) / np.maximum(np.abs(theirs).max(1), 1e-9)).max())
