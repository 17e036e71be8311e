"""Run a vision tower over pixels, op by op. Every row attends to the end of its frame, or of its window."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.arrays import Floats
from tokenwright.backends.layout import nbytes
from tokenwright.backends.torch.kernels import Kernels, Values, library_of
from tokenwright.backends.torch.op_batch import ForwardState, OpBatch
from tokenwright.backends.torch.op_parts import Weights, linear, norm
from tokenwright.backends.torch.ops import TorchAttention, TorchMLP
from tokenwright.cache import ChunkRows, KVStore, LayerSpec
from tokenwright.cache.codec import CODECS
from tokenwright.config import Heads, Rope
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.engine.pictures import Pixels
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.rotary import RotaryTable, Rotation
from tokenwright.models.taps import ignore
from tokenwright.models.tower import JoinRows, LearnedGrid, Pool, Projector, Tower

Grid = tuple[int, int, int]  # frames, rows, columns
Ints = NDArray[np.int64]


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
        for name in tower.dense:
            weights[name] = kernels.own(weights[name])
        self._embed = linear(weights, tower.patches.matrix)
        self._first_norm = norm(tower.patches.norm, kernels, weights)
        self._layers: list[tuple[Any, ...]] = [
            (
                TorchAttention(one.attention, kernels, weights),
                TorchMLP(one.mlp, kernels, weights),
                one.windowed,
                [weights[f"{name}.weight"] for name in one.scales],
            )
            for one in tower.layers
        ]
        self._norm = norm(tower.norm, kernels, weights)
        self._projector = self._steps(tower.projector, weights)
        self._deep = {layer: self._steps(one, weights) for layer, one in tower.deep}

    def __call__(self, pixels: Pixels) -> Floats:
        """[1 + deep, n, width] in fp32: the embeddings of a picture's rows, and what its Deepstacks add to them."""
        tower = self.tower
        patches, grid = patches_of(pixels, tower.patches.side, tower.patches.frames, *self._colours)
        order, frames, windows = _arranged(grid, tower)
        x = self.kernels.linear(self._tensors(np.ascontiguousarray(patches)), self._embed)
        library = library_of(x)
        x = x + library.asarray(self._tensors(self._positions(grid)), dtype=x.dtype)
        if tower.patches.class_token:
            x = library.concat((library.asarray(self._tensors(self._class()), dtype=x.dtype), x), 0)
        x = self._first_norm(x)[self._tensors(order)]
        deep = self._layered(x, grid, order, frames, windows)
        back = np.argsort(order)[int(tower.patches.class_token) :]
        return np.stack([self._projected(one, steps, grid, back) for one, steps in deep]).astype(np.float32, copy=False)

    def _layered(
        self, x: Values, grid: Grid, order: Ints, frames: list[range], windows: list[range]
    ) -> list[tuple[Values, Any]]:
        """The rows for each projector: behind the last layer's norm, and at deep layers."""
        heads, size = self.tower.head
        codec = CODECS[str(x.dtype).removeprefix("torch.")]
        spec = LayerSpec(Heads(heads, size), AttentionWindow(), codec, codec, native=codec)
        memory = getattr(x, "device", "cpu")
        store = KVStore([spec], -(-len(x) // _PAGE), _PAGE, *self._memory(memory))
        states = [self._state(store, len(x), grid, order, each) for each in (frames, windows)]
        found: list[tuple[Values, Any]] = []
        for number, (attention, mlp, windowed, scales) in enumerate(self._layers):
            state = states[windowed]
            first, second = scales or (1, 1)
            x = x + attention.added(x, state) * first
            x = x + mlp.added(x, state) * second
            if number in self._deep:
                found.append((x, self._deep[number]))
        return [(self._norm(x), self._projector), *found]

    def _memory(self, device: Any) -> tuple[Any, ...]:
        if str(device) == "cpu":
            return ()
        from tokenwright.backends.kv_sizing import memory_of

        return (memory_of(device),)

    def _state(self, store: KVStore, rows: int, grid: Grid, order: Ints, parts: list[range]) -> ForwardState:
        """parts: ranges of rows that attend to each other."""
        chunks = []
        for part in parts:
            slots, places = np.arange(part.start, part.stop), np.arange(len(part))
            chunk = ChunkRows(part, 0, (slots,), (places,), np.full(len(part), len(part)))
            chunks.append(self._tensors(chunk))
        rope = self.tower.rotary
        turns = {} if rope is None else {rope: self._tensors(self._rotation(rope, grid, order))}
        batch = OpBatch(None, None, (self._tensors(np.arange(rows)),), tuple(chunks), turns, {}, {})
        return ForwardState(batch, store, ignore)

    def _rotation(self, rope: Rope, grid: Grid, order: Ints) -> Rotation:
        """cos and sin [n, D] of the rows' place in height, and then in width."""
        _, size = self.tower.head
        height, width = (np.tile(one.reshape(-1), grid[0]) for one in np.indices(grid[1:]))
        if self.tower.alternate:
            table = RotaryTable(rope, size)
            halves = [table.rows(one[order], 0) for one in (height, width)]
            parts = [[one[:, at : size // 2 : 2] for one in (half.cos, half.sin)] for at, half in enumerate(halves)]
        else:
            table = RotaryTable(rope, size // 2)
            halves = [table.rows(one[order], 0) for one in (height, width)]
            parts = [[one[:, : size // 4] for one in (half.cos, half.sin)] for half in halves]
        cos, sin = (np.concatenate(2 * [one[at] for one in parts], 1) for at in range(2))
        return Rotation(cos, sin)

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

    def _projected(self, x: Values, steps: list[Any], grid: Grid, back: Ints) -> Floats:
        x = x[self._tensors(back)]
        _, rows, columns = grid
        for step, made in steps:
            match step:
                case JoinRows(side, channels_first) | Pool(side, channels_first):
                    blocks = x.reshape(grid[0], rows // side, side, columns // side, side, -1)
                    rows, columns = rows // side, columns // side
                    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
                    blocks = _axes(blocks, order)
                    x = blocks.mean((3, 4)) if isinstance(step, Pool) else blocks
                    x = x.reshape(grid[0] * rows * columns, -1)
                case Matrix():
                    x = self.kernels.linear(x, made)
                case Norm():
                    x = made(x)
                case _:
                    x = self.kernels.activate(x, made)
        return np.asarray(x if isinstance(x, np.ndarray) else x.float().cpu(), np.float32)


_PAGE = 64


def _axes(x: Values, order: tuple[int, ...]) -> Values:
    return x.transpose(order) if isinstance(x, np.ndarray) else x.permute(order)


def patches_of(pixels: Pixels, side: int, frames: int, mean: Floats, deviation: Floats) -> tuple[Floats, Grid]:
    """The normalised patches [n, 3 x frames x side x side], and their grid; a last frame is repeated."""
    raw = np.frombuffer(pixels.data, np.uint8).reshape(pixels.frames, pixels.height, pixels.width, 3)
    if rest := -len(raw) % frames:
        raw = np.concatenate((raw, np.repeat(raw[-1:], rest, 0)))
    grid = len(raw) // frames, pixels.height // side, pixels.width // side
    x = (raw.astype(np.float32) * np.float32(1 / 255) - mean) / deviation
    blocks = x.reshape(grid[0], frames, grid[1], side, grid[2], side, 3)
    rows: Floats = blocks.transpose(0, 2, 4, 6, 1, 3, 5).reshape(grid[0] * grid[1] * grid[2], -1)
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
    if of.fit == "exact":
        assert (rows, columns) == (side, side), "the processor resizes pictures to the tower's size"
        return table
    wide = table.reshape(side, side, -1).astype(np.float64)
    found: NDArray[np.float64] = np.einsum(
        "ra,cb,abw->rcw", _corners(side, rows), _corners(side, columns), wide, optimize=True
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
