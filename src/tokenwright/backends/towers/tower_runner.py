"""Runs a vision tower over pixels, op by op, in slices. Each row attends to all rows of its frame or window."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.backends.device import accelerator_of
from tokenwright.backends.layout import nbytes
from tokenwright.backends.torch.kernels import Kernels, Linear, Values, library_of
from tokenwright.backends.torch.op_batch import ForwardState, OpBatch
from tokenwright.backends.torch.op_parts import Weights, linear, norm, parted
from tokenwright.backends.torch.ops import TorchAttention, TorchMLP
from tokenwright.cache import HOST, ChunkRows, KVStore, LayerSpec
from tokenwright.cache.codec import CODECS
from tokenwright.config import Heads, Rope
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.engine.pictures import Pixels
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.rotary import RotaryTable, Rotation
from tokenwright.models.taps import ignore
from tokenwright.models.tower import BOUNDS, LearnedGrid, Patches, Projector, Squares, Tower

Grid = tuple[int, int, int]  # frames, rows, columns
Ints = NDArray[np.int64]
T = TypeVar("T")
Slices = Generator[None, None, T]

WORK = 1 << 31  # multiplications of a slice: less than a tenth of a second of a processor
_PAGE = 64
_TILE = 16  # rows that kernels compute together


class TowerRunner:
    """A tower over weights. mean, deviation: [3], of pixels from 0 to 1. tensors: converts arrays for the kernels."""

    def __init__(
        self,
        tower: Tower,
        kernels: Kernels,
        weights: Weights,
        mean: Sequence[float],
        deviation: Sequence[float],
        tensors: Callable[[Any], Any] = lambda one: one,
    ) -> None:
        self.tower, self.kernels, self._tensors = tower, kernels, tensors
        self.weight_bytes = nbytes(weights)
        self._colours = np.array(mean, np.float32), np.array(deviation, np.float32)
        self._learned = {name: weights[name] for name in tower.patches.learned_shapes}
        clipped = [matrix for one in tower.layers if one.clipped for matrix in one.matrices]
        self._clips = {one.name: _clip(one, weights) for one in clipped}
        for name in tower.dense:
            weights[name] = kernels.own(weights[name])
        self._embed = linear(weights, tower.patches.matrix)
        self._norms = [norm(one, kernels, weights) for one in (tower.patches.norm, tower.norm)]
        self._layers: list[tuple[Any, ...]] = [
            (
                TorchAttention(one.attention, kernels, weights),
                TorchMLP(one.mlp, kernels, weights),
                one.windowed,
                [weights[f"{name}.weight"] for name in one.scales],
                sum(matrix.out * matrix.inner for matrix in (one.attention.out, one.mlp.up, one.mlp.down)),
            )
            for one in tower.layers
        ]
        self._projector = self._steps(tower.projector, weights)
        self._deep = {layer: self._steps(one, weights) for layer, one in tower.deep}

    def slices(self, pixels: Pixels) -> Slices[Floats]:
        """Compute a picture, and yield after each slice of about WORK multiplications.

        Returns [1 + deep, n, width] in fp32: the embeddings of a picture's rows, and what its Deepstacks add to them.
        """
        tower = self.tower
        patches, grid = patches_of(pixels, tower.patches, *self._colours)
        order, frames, windows = _arranged(grid, tower)
        x = yield from self._linear(self._tensors(patches), self._embed)
        del patches
        library = library_of(x)
        x = x + library.asarray(self._tensors(self._positions(grid)), dtype=x.dtype)
        if tower.patches.class_token:
            x = library.concat((library.asarray(self._tensors(self._class()), dtype=x.dtype), x), 0)
        yield
        x = self._norms[0](x)[self._tensors(order)]
        back = np.argsort(order)[int(tower.patches.class_token) :]
        found = []
        for one, steps in (yield from self._layered(x, grid, order, frames, windows)):
            found.append((yield from self._projected(one, steps, grid, back)))
        return np.stack(found).astype(np.float32, copy=False)

    def _layered(
        self, x: Values, grid: Grid, order: Ints, frames: list[range], windows: list[range]
    ) -> Slices[list[tuple[Values, Any]]]:
        heads, size = self.tower.head
        codec = CODECS[str(x.dtype).removeprefix("torch.")]
        spec = LayerSpec(Heads(heads, size), AttentionWindow(), codec, codec, native=codec)
        device: Any = getattr(x, "device", "cpu")
        memory = HOST if str(device) == "cpu" else accelerator_of(device)
        store = KVStore([spec], -(-len(x) // _PAGE), _PAGE, memory)
        rope = self.tower.rotary
        rotation = None if rope is None else self._rotation(rope, grid, order)
        found: list[tuple[Values, Any]] = []
        for number, layer in enumerate(self._layers):
            x = yield from self._layer(x, layer, store, rotation, windows if layer[2] else frames)
            if number in self._deep:
                found.append((x, self._deep[number]))
        return [(self._norms[1](x), self._projector), *found]

    def _layer(
        self, x: Values, layer: tuple[Any, ...], store: KVStore, rotation: Rotation | None, parts: list[range]
    ) -> Slices[Values]:
        """The rows after a layer; all K and V are stored before the first row reads them. parts: see `_state`."""
        attention, mlp, _, scales, each = layer
        first, second = scales or (1, 1)
        each += 2 * max(map(len, parts)) * attention.op.out.inner
        q = yield from _joined(
            len(x),
            attention.qkv.numel,
            lambda rows: attention.projected(x[rows], self._state(store, rows, rotation, ()))[0],
        )

        def added(rows: slice) -> Values:
            state = self._state(store, rows, None, parts)
            y = x[rows] + attention.attended(q[rows], None, None, state) * first
            return y + mlp.added(y, state) * second

        return (yield from _joined(len(x), each, added))

    def _state(self, store: KVStore, rows: slice, rotation: Rotation | None, parts: Sequence[range]) -> ForwardState:
        """The state of a pass over `rows`. The rows of each range in `parts` attend to each other."""
        chunks = []
        for part in parts:
            first, last = max(part.start, rows.start), min(part.stop, rows.stop)
            if first < last:
                places = np.arange(len(part))
                within = range(first - rows.start, last - rows.start)
                start = len(part) - len(within)  # kernels read no position after a chunk's rows
                chunk = ChunkRows(within, start, (places + part.start,), (places,), np.full(len(within), len(part)))
                chunks.append(self._tensors(chunk))
        turns, rope = {}, self.tower.rotary
        if rotation is not None and rope is not None:
            turns[rope] = self._tensors(Rotation(rotation.cos[rows], rotation.sin[rows]))
        slots = (self._tensors(np.arange(rows.start, rows.stop)),)
        return ForwardState(OpBatch(None, None, slots, tuple(chunks), turns, {}, {}), store, ignore, clips=self._clips)

    def _rotation(self, rope: Rope, grid: Grid, order: Ints) -> Rotation:
        """cos and sin [n, D] of the rows' place in height, and then in width."""
        _, size = self.tower.head
        places = [np.tile(one.reshape(-1), grid[0])[order] for one in np.indices(grid[1:])]
        alternate = self.tower.alternate
        table = RotaryTable(rope, size if alternate else size // 2)
        halves = [table.rows(one, 0) for one in places]
        taken = [slice(at, size // 2, 2) if alternate else slice(size // 4) for at in range(2)]
        both = [(half.cos[:, part], half.sin[:, part]) for half, part in zip(halves, taken, strict=True)]
        return Rotation(*(np.concatenate(one + one, 1) for one in zip(*both, strict=True)))

    def _positions(self, grid: Grid) -> Floats:
        of = self.tower.patches.positions
        if of is None:
            return np.zeros((1, self.tower.patches.matrix.out), np.float32)
        table: Floats = np.asarray(self._learned["positions.weight"], np.float32)[int(of.first) :]
        return np.tile(fitted(table, of, grid[1], grid[2]), (grid[0], 1))

    def _class(self) -> Floats:
        of, row = self.tower.patches.positions, np.asarray(self._learned["class.weight"], np.float32)
        first = np.asarray(self._learned["positions.weight"], np.float32)[0] if of is not None and of.first else 0
        return (row + first)[None]

    def _steps(self, projector: Projector, weights: Weights) -> list[Any]:
        found: list[Any] = []
        for one in projector.steps:
            made: Any = one
            if isinstance(one, Matrix):
                made = linear(weights, one)
            elif isinstance(one, Norm):
                made = norm(one, self.kernels, weights)
            found.append((one, made))
        return found

    def _projected(self, x: Values, steps: list[Any], grid: Grid, back: Ints) -> Slices[Floats]:
        x = x[self._tensors(back)]
        _, rows, columns = grid
        for step, made in steps:
            match step:
                case Squares(side, mean, channels_first):
                    blocks = x.reshape(grid[0], rows // side, side, columns // side, side, -1)
                    rows, columns = rows // side, columns // side
                    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
                    blocks = blocks.transpose(order) if isinstance(blocks, np.ndarray) else blocks.permute(order)
                    x = blocks.mean((3, 4)) if mean else blocks
                    x = x.reshape(grid[0] * rows * columns, -1)
                case Matrix():
                    x = yield from self._linear(x, made)
                case Norm():
                    x = made(x)
                case _:
                    x = self.kernels.activate(x, made)
        return np.asarray(x if isinstance(x, np.ndarray) else x.float().cpu(), np.float32)

    def _linear(self, x: Values, weight: Linear) -> Slices[Values]:
        return (yield from _joined(len(x), weight.numel, lambda rows: self.kernels.linear(x[rows], weight)))


def _joined(rows: int, each: int, compute: Callable[[slice], Values]) -> Slices[Values]:
    size = max(_TILE, WORK // each // _TILE * _TILE)
    parts = []
    for first in range(0, rows, size):
        parts.append(compute(slice(first, min(first + size, rows))))
        yield
    return library_of(parts[0]).concat(parts, 0)


def _clip(matrix: Matrix, weights: Weights) -> Callable[[Values, Callable[[Values], Values]], Values]:
    """Parts that clip their inputs alike are multiplied together."""
    bounds = [[float(weights[f"{name}.{one}.weight"].reshape(-1)[0]) for one in BOUNDS] for name, _ in matrix.parts]
    sizes = [out for _, out in matrix.parts]

    def clip(x: Values, multiply: Callable[[Values], Values]) -> Values:
        library = library_of(x)
        made = {(low, high): parted(multiply(library.clip(x, low, high)), sizes, 1) for low, high, *_ in bounds}
        each = [library.clip(made[low, high][at], *ends) for at, (low, high, *ends) in enumerate(bounds)]
        return library.concat(each, 1)

    return clip


def patches_of(pixels: Pixels, of: Patches, mean: Floats, deviation: Floats) -> tuple[Floats, Grid]:
    """The normalised patches [n, 3 x frames x side x side], and their grid; a last frame is repeated."""
    side, frames = of.side, of.frames
    raw = np.frombuffer(pixels.data, np.uint8).reshape(pixels.frames, pixels.height, pixels.width, 3)
    if rest := -len(raw) % frames:
        raw = np.concatenate((raw, np.repeat(raw[-1:], rest, 0)))
    grid = len(raw) // frames, pixels.height // side, pixels.width // side
    raw = raw[:, : grid[1] * side, : grid[2] * side]  # as convolutions do
    x = (raw.astype(np.float32) * np.float32(1 / 255) - mean) / deviation
    blocks = x.reshape(grid[0], frames, grid[1], side, grid[2], side, 3)
    order = (1, 3, 5, 6) if of.colours_last else (6, 1, 3, 5)
    rows: Floats = blocks.transpose(0, 2, 4, *order).reshape(grid[0] * grid[1] * grid[2], -1)
    return rows, grid


def _arranged(grid: Grid, tower: Tower) -> tuple[Ints, list[range], list[range]]:
    """The rows window by window, and the ranges of each frame and window in that order."""
    frames, rows, columns = grid
    first, each = int(tower.patches.class_token), rows * columns
    parts = [range(first * (at > 0) + at * each, first + (at + 1) * each) for at in range(frames)]
    if not tower.window:
        return np.arange(first + frames * each), parts, []
    assert not first, "no tower has both windows and a class token"
    side = tower.window
    number = np.arange(frames * each).reshape(frames, rows, columns)
    windows = [
        number[frame, row : row + side, column : column + side].reshape(-1)
        for frame in range(frames)
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    ends = np.cumsum([len(one) for one in windows]).tolist()
    return np.concatenate(windows), parts, [range(end - len(one), end) for end, one in zip(ends, windows, strict=True)]


def fitted(table: Floats, of: LearnedGrid, rows: int, columns: int) -> Floats:
    """A learned table [side x side, width] for a grid: [rows x columns, width]."""
    side = of.side
    if of.fit == "bucketed":
        bounds = (1 / side + np.arange(side - 1) / side).astype(np.float32)  # as in training
        shares = [np.arange(n, dtype=np.float32) * np.float32(1 / n) for n in (rows, columns)]
        places = [np.searchsorted(bounds, np.minimum(one, np.float32(1 - 1e-6)), side="right") for one in shares]
        bucketed: Floats = table[(places[0][:, None] * side + places[1]).reshape(-1)]
        return bucketed
    if of.fit == "summed":
        summed: Floats = table[side : side + rows, None] + table[None, :columns]
        return summed.reshape(rows * columns, -1)
    if of.fit == "exact":
        assert (rows, columns) == (side, side), "the processor resizes pictures to the tower's size"
        return table
    wide = table.reshape(side, side, -1).astype(np.float64)
    weights = _corners if of.fit == "linear" else _resized
    found: NDArray[np.float64] = np.einsum(
        "ra,cb,abw->rcw", weights(side, rows), weights(side, columns), wide, optimize=True
    )
    return found.reshape(rows * columns, -1).astype(np.float32)


def _corners(side: int, count: int) -> NDArray[np.float64]:
    """Weights [count, side] of linear interpolation with the corners aligned."""
    at = np.linspace(0, side - 1, count)
    low = np.minimum(at.astype(np.int64), side - 1)
    found = np.zeros((count, side))
    np.add.at(found, (np.arange(count), low), 1 - (at - low))
    np.add.at(found, (np.arange(count), np.minimum(low + 1, side - 1)), at - low)
    return found


def _resized(side: int, count: int) -> NDArray[np.float64]:
    """Weights [count, side] of a triangular filter, as wide as the step between two results or two sources."""
    step = side / count
    centres = (np.arange(count) + 0.5) * step - 0.5
    found: NDArray[np.float64] = np.maximum(0, 1 - np.abs(np.arange(side) - centres[:, None]) / max(1, step))
    found /= found.sum(1, keepdims=True)
    return found
