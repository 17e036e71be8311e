"""Loading a model's weights in the form that kernels read: packed as they come, slab by slab, without a second copy.

Memory for all packed weights is taken first. Then two threads each read some rows of a tensor, pack them into their
place and read the next, so that beside the weights there are only two buffers of a few MiB (or two whole tensors, where
a checkpoint stores them transposed).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from tokenwright.backends.layout import Weights, dense_names, empty_weights, matrices
from tokenwright.backends.native.kernels import find_kernels
from tokenwright.backends.packed import LANES, Packed
from tokenwright.checkpoints.families import Source
from tokenwright.checkpoints.folder import Checkpoint, Report, piece_of, read_rows, refuse_values
from tokenwright.checkpoints.hub import WEIGHTS
from tokenwright.checkpoints.packed_file import read_weights
from tokenwright.checkpoints.safetensors import Stored
from tokenwright.checkpoints.weight_cache import WeightCache
from tokenwright.config import DType, WeightFormat
from tokenwright.errors import RequestError

Pack = Callable[[Packed, int, torch.Tensor], int]  # `Packed.pack_rows`, or a faster one

THREADS = 2  # that read and pack
SLAB_BYTES = 1 << 20  # read at a time, in whole blocks; small enough for a core's own cache


def load_packed(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    report: Report | None = None,
    cache: WeightCache | None = None,
) -> Weights:
    """A model's weights in `form`, where native means `dtype`.

    Keys: "embed", "head" (the same object where it is tied), "layers.{i}.attention.qkv" (q, k and v joined), ".o",
    "layers.{i}.mlp.gate_up" (or ".up"), ".down" as Packed with their biases; all other tensors in fp32.

    A folder that `tokenwright quantize` wrote has its own form, and is asked for as it or as native. `cache` keeps
    weights that were quantised here. `report` is called with (bytes read, bytes in all).

    Raises CheckpointError for values that are not finite, here or in `form`; RequestError for another form than the
    folder's own.
    """
    if checkpoint.packed is not None:
        return read_weights(checkpoint.path / WEIGHTS, checkpoint.config, own_form(checkpoint, form), report)
    form = form.resolved(dtype)
    if cache is None or not form.quantised:
        return pack_checkpoint(checkpoint, form, report)
    weights = cache.load(checkpoint, form, report)
    if weights is None:
        weights = pack_checkpoint(checkpoint, form, report)
        cache.save(checkpoint, form, weights)
    return weights


def own_form(checkpoint: Checkpoint, form: WeightFormat) -> WeightFormat:
    """The format that weights asked for in `form` are kept in: a packed folder's own, and no other.

    Raises RequestError where another is asked for.
    """
    own = checkpoint.packed
    if own is None:
        return form
    if form not in (own, WeightFormat("native")):
        raise RequestError(
            f"the weights in {checkpoint.path} are kept as {own} and cannot become {form}; leave the format out, or "
            "give the model that they were made from"
        )
    return own


def pack_checkpoint(checkpoint: Checkpoint, form: WeightFormat, report: Report | None = None) -> Weights:
    """The weights of a checkpoint's own tensors, in a format that is not native."""
    checkpoint.check_tied_head()
    weights = empty_weights(checkpoint.config, form)
    kernels = find_kernels()
    pack = Packed.pack_rows if kernels is None else kernels.pack
    done, total = 0, checkpoint.nbytes
    pool = ThreadPoolExecutor(THREADS, "tokenwright-pack")
    try:
        for ended in as_completed([pool.submit(job.run, pack) for job in _jobs(checkpoint, weights)]):
            done += ended.result()
            if report is not None:
                report(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return weights


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of ours goes: rows from `first` on of a matrix, or all of a tensor."""

    target: Packed | torch.Tensor
    first: int

    def put(self, row: int, rows: torch.Tensor, pack: Pack) -> bool:
        """Write rows [row, ...) of our tensor. False where a number has no finite form there."""
        first = self.first + row
        if isinstance(self.target, Packed):
            return pack(self.target, first, rows) == 0
        kept = self.target[first : first + len(rows)].copy_(rows)
        return bool(kept.isfinite().all())


@dataclass(frozen=True, slots=True)
class Job:
    """Rows [first, last) of a stored tensor, and what of them goes where."""

    name: str
    stored: Stored
    first: int
    last: int
    users: tuple[tuple[Source, Place], ...]

    def run(self, pack: Pack) -> int:
        """Read and pack; returns the bytes read."""
        raw = read_rows(self.stored, self.first, self.last)
        for source, place in self.users:
            ours = piece_of(raw, source)
            step = len(ours) if ours.is_contiguous() else _rows_of_slab(ours[0].nbytes)
            for row in range(0, len(ours), step):
                if not place.put(self.first + row, ours[row : row + step].contiguous(), pack):
                    refuse_values(raw, self.name, self.stored.file, _form_name(place))
        return raw.nbytes


def _form_name(place: Place) -> str:
    return place.target.format if isinstance(place.target, Packed) else "float32"


def _jobs(checkpoint: Checkpoint, weights: Weights) -> Iterator[Job]:
    """All that is to be read, in the order of the files."""
    places = _places(checkpoint, weights)
    users: dict[str, list[tuple[Source, Place]]] = {}
    for ours, source in checkpoint.sources.items():
        users.setdefault(source.name, []).append((source, places[ours]))
    for name in sorted(users, key=lambda name: (checkpoint.stored[name].file, checkpoint.stored[name].start)):
        stored, targets = checkpoint.stored[name], tuple(users[name])
        whole = any(source.transpose or source.part is not None for source, _ in targets)
        rows = stored.shape[0]
        step = rows if whole else _rows_of_slab(stored.nbytes // rows)
        for first in range(0, rows, step):
            yield Job(name, stored, first, min(first + step, rows), targets)


def _places(checkpoint: Checkpoint, weights: Weights) -> dict[str, Place]:
    """Where each tensor of `config.shapes` goes."""
    shapes = checkpoint.config.shapes
    places: dict[str, Place] = {}
    for name, parts in matrices(checkpoint.config).items():
        matrix, first = weights[name], 0
        assert isinstance(matrix, Packed), "matrices are packed"
        for part in parts:
            places[f"{part}.weight"] = Place(matrix, first)
            if matrix.bias is not None:
                places[f"{part}.bias"] = Place(matrix.bias, first)
            first += shapes[f"{part}.weight"][0]
    return places | {name: Place(weights[name], 0) for name in dense_names(checkpoint.config)}


def _rows_of_slab(row_bytes: int) -> int:
    """Rows that are read and packed together."""
    return max(1, SLAB_BYTES // (row_bytes * LANES)) * LANES
