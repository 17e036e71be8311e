"""Loads weights in the kernels' layout: threads pack rows while they read them, with two buffers of a few MiB."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import lcm
from types import MappingProxyType

import numpy as np

from tokenwright.arrays import Array, finite, narrowed
from tokenwright.backends.adapters import Update
from tokenwright.backends.device import each_done
from tokenwright.backends.layout import Formats, Weights, empty_weights
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.packed import LANES, Packed
from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.hub import WEIGHTS
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.folder import Checkpoint, Report, refuse_values
from tokenwright.checkpoints.packed_file import read_weights
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.checkpoints.quantised.codecs import Compound
from tokenwright.checkpoints.tensor_reader import piece_of, read_codes, read_rows
from tokenwright.errors import CheckpointError, RequestError, fetch_again
from tokenwright.formats import DType, WeightFormat
from tokenwright.models.combined import mixtures

Pack = Callable[[Packed, int, Array], int]  # `Packed.pack_rows`, or a faster one

THREADS = 2
SLAB_BYTES = 1 << 20  # read at a time, in whole blocks; fits a core's L2 cache


def load_packed(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    report: Report | None = None,
    cache: WeightCache | None = None,
) -> Weights:
    """A model's weights in `form`, where native means `dtype`: the graph's matrices as Packed, the rest in fp32.

    cache: of weights that this process quantised. Raises CheckpointError for values that are not finite, as stored or
    in `form`; RequestError for a form other than a packed folder's own.
    """
    if checkpoint.packed is not None:
        return read_weights(checkpoint.path / WEIGHTS, checkpoint.graph, own_form(checkpoint, form), report)
    if kept := checkpoint.kept(form):
        return pack_checkpoint(checkpoint, form.resolved(dtype), report, kept)
    form = form.resolved(dtype)
    if cache is None or not form.quantised:
        return pack_checkpoint(checkpoint, form, report)
    weights = cache.load(checkpoint, form, report)
    if weights is None:
        weights = pack_checkpoint(checkpoint, form, report)
        cache.save(checkpoint, form, weights)
    return weights


def own_form(checkpoint: Checkpoint, form: WeightFormat) -> WeightFormat:
    """The format of the loaded weights: `form`, or a packed folder's own. Raises RequestError if `form` is another."""
    own = checkpoint.packed
    if own is None:
        return form
    if form not in (own, WeightFormat("native")):
        raise RequestError(
            f"{checkpoint.path} is kept as {own} and cannot become {form}; leave weights out, or give the model that "
            "it was made from",
            "weights",
        )
    return own


def pack_checkpoint(
    checkpoint: Checkpoint, form: WeightFormat, report: Report | None = None, kept: Formats = MappingProxyType({})
) -> Weights:
    """Pack a checkpoint in a resolved format (not native). kept: matrices whose codes and scales are copied."""
    weights = empty_weights(checkpoint.graph, form, kept)
    _pack_into(weights, checkpoint, kept, report)
    return weights


def load_paged(
    checkpoint: Checkpoint, form: WeightFormat, dtype: DType, cache: WeightCache, report: Report | None = None
) -> Weights:
    """As `load_packed`, but the experts stay in a file: a packed folder's, or one that is added to the cache."""
    graph = checkpoint.graph
    paged = [matrix.name for op in mixtures(graph) for matrix in (op.up, op.down)]
    if checkpoint.packed is not None:
        return read_weights(checkpoint.path / WEIGHTS, graph, own_form(checkpoint, form), report, paged=paged)
    kept, form = checkpoint.kept(form), form.resolved(dtype)
    if (found := cache.load(checkpoint, form, report, kept, paged)) is None:
        cache.make(checkpoint, form, kept, _by_layer(checkpoint, form, kept, report))
        found = cache.load(checkpoint, form, None, kept, paged)
    if found is None:
        raise CheckpointError(f"the weights in {cache.folder} cannot be used; set TOKENWRIGHT_CACHE to another folder")
    return found


def _by_layer(checkpoint: Checkpoint, form: WeightFormat, kept: Formats, report: Report | None) -> Iterator[Weights]:
    names, done = {*checkpoint.graph.matrices, *checkpoint.graph.dense}, 0
    for _, own in groupby(sorted(names, key=_layer_of), _layer_of):
        layer = {*own}
        found = empty_weights(checkpoint.graph, form, kept, names - layer)
        weights = {name: one for name, one in found.items() if name in layer}
        done = _pack_into(weights, checkpoint, kept, report, done)
        yield weights


def _layer_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("layers.") else ""


def _pack_into(weights: Weights, checkpoint: Checkpoint, kept: Formats, report: Report | None, done: int = 0) -> int:
    kernels = find_kernels()
    pack = Packed.pack_rows if kernels is None else kernels.pack
    for nbytes in each_done((partial(job.run, pack) for job in _jobs(checkpoint, weights, kept)), THREADS, "pack"):
        done += nbytes
        if report is not None:
            report(done, checkpoint.nbytes)
    return done


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one of our tensors: rows from `first` on. Adapters' `updates` are added before packing."""

    target: Packed | Array
    first: int
    updates: tuple[Update, ...] = ()

    @property
    def form(self) -> str:
        return self.target.format if isinstance(self.target, Packed) else "float32"

    def put(self, row: int, rows: Array, pack: Pack) -> bool:
        """Write rows [row, ...) of our tensor. False if a value is not finite in the target's format."""
        first = self.first + row
        for update in self.updates:
            rows = update.added_to(rows, row)
        if isinstance(self.target, Packed):
            return pack(self.target, first, rows) == 0
        kept = self.target[first : first + len(rows)]
        kept[...] = narrowed(rows, kept.dtype)
        return finite(kept)


@dataclass(frozen=True, slots=True)
class Job:
    """Rows [first, last) of a stored tensor, which begins at row `start`, and their destinations."""

    name: str
    stored: Stored
    first: int
    last: int
    users: tuple[tuple[TensorSource, Place], ...]
    kept: bool = False  # codes and scales are copied
    start: int = 0

    def run(self, pack: Pack) -> int:
        if self.kept:
            return self._copy()
        raw = read_rows(self.stored, self.first, self.last)
        for source, place in self.users:
            ours = piece_of(raw, source)
            step = len(ours) if ours.flags.c_contiguous else _rows_of_slab(ours[0].nbytes)
            for row in range(0, len(ours), step):
                if not place.put(self._ours(source) + row, np.ascontiguousarray(ours[row : row + step]), pack):
                    refuse_values(raw, self.name, self.stored.file, place.form)
        return self.stored.nbytes * (self.last - self.first) // self.stored.shape[0]

    def _copy(self) -> int:
        for source, place in self.users:
            assert isinstance(place.target, Packed), "matrices are packed"
            codes, scales = read_codes(self.stored, self.first, self.last, place.target.form)
            ours = place.first + self._ours(source), piece_of(codes, source), piece_of(scales, source)
            if place.target.put_codes(*ours):
                raise CheckpointError(
                    f"{self.name} in {self.stored.file} has scales that are not finite, or codes of -128; the file is "
                    f"damaged: {fetch_again(self.stored.file)}"
                )
        return self.stored.nbytes * (self.last - self.first) // self.stored.shape[0]

    def _ours(self, source: TensorSource) -> int:
        row = self.first - self.start
        return row if source.order is None else source.order.ours(row)


def _jobs(checkpoint: Checkpoint, weights: Weights, kept: Formats) -> Iterator[Job]:
    places = _places(checkpoint, weights)
    as_they_lie = {checkpoint.sources[f"{part}.weight"].name.removesuffix(".weight") for part in kept}
    users: dict[str, list[tuple[TensorSource, Place]]] = {}
    for ours, source in checkpoint.sources.items():
        if ours not in places:
            continue
        users.setdefault(source.name, []).append((source, places[ours]))
    for name in sorted(users, key=lambda name: (checkpoint.stored[name].file, checkpoint.stored[name].start)):
        stored, copied = checkpoint.stored[name], name.removesuffix(".weight") in as_they_lie
        for (start, end), targets in _runs(stored, users[name]).items():
            whole = any(source.transpose or source.rows is not None for source, _ in targets)
            together = whole or isinstance(stored, Compound)
            step = end - start if together else _rows_of_slab(stored.nbytes // stored.shape[0])
            step += -step % lcm(LANES, *(source.order.block for source, _ in targets if source.order is not None))
            for first in range(start, end, step):
                yield Job(name, stored, first, min(first + step, end), tuple(targets), copied, start)


def _runs(
    stored: Stored, users: list[tuple[TensorSource, Place]]
) -> dict[tuple[int, int], list[tuple[TensorSource, Place]]]:
    found: dict[tuple[int, int], list[tuple[TensorSource, Place]]] = {}
    for source, place in users:
        if source.stacked and source.rows is not None:
            found.setdefault(source.rows[:2], []).append((replace(source, rows=None), place))
        else:
            found.setdefault((0, stored.shape[0]), []).append((source, place))
    return found


def _places(checkpoint: Checkpoint, weights: Weights) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, matrix in checkpoint.graph.matrices.items():
        packed, first = weights.get(name), 0
        if packed is None:
            continue
        assert isinstance(packed, Packed), "matrices are packed"
        for part, out in matrix.parts:
            places[f"{part}.weight"] = Place(packed, first, checkpoint.updates.get(part, ()))
            if packed.bias is not None:
                places[f"{part}.bias"] = Place(packed.bias, first)
            first += out
    return places | {name: Place(weights[name], 0) for name in checkpoint.graph.dense if name in weights}


def _rows_of_slab(row_bytes: int) -> int:
    return max(1, SLAB_BYTES // (row_bytes * LANES)) * LANES
