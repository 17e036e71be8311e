"""A vision tower: the ops that make rows of embeddings from a picture's patches. No tensors here.

    patches -> layers (attention over all patches, or within windows; MLP) -> norm -> projector -> rows

Attention reads all rows of a frame; K and V live for one layer, so all layers have the number 0 and share one layer's
memory (`backends/towers/tower_runner.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from tokenwright.config import Rope
from tokenwright.models.graph import MLP, Attention
from tokenwright.models.op import Activation, Matrix, Norm, Op, OpList, Shape, union


@dataclass(frozen=True, slots=True)
class LearnedGrid:
    """A learned table [rows, width] of patch positions, `side` x `side`, and how it fits other grids.

    bucketed: by a patch's share of the side. linear: between the corners of the grid. resized: as a picture is, with a
    wider filter for smaller grids. summed: of two tables of `side` rows, for columns and rows. first: of a class token.
    """

    side: int
    fit: Literal["exact", "bucketed", "linear", "resized", "summed"] = "exact"
    first: bool = False


@dataclass(frozen=True)
class Patches(Op):
    """x = norm(matrix(patch) + position) of side x side pixels in `frames` frames."""

    matrix: Matrix
    side: int
    frames: int = 1
    positions: LearnedGrid | None = None
    class_token: bool = False  # a learned first row
    norm: Norm | None = None
    colours_last: bool = False  # of a patch's numbers; else each colour stands in one block

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        if self.positions is not None:
            side = self.positions.side
            rows = 2 * side if self.positions.fit == "summed" else side * side + self.positions.first
            found["positions.weight"] = (rows, self.matrix.out)
        return found | ({"class.weight": (self.matrix.out,)} if self.class_token else {})


@dataclass(frozen=True, slots=True)
class Squares:
    """`side` x `side` neighbouring rows become one, or their mean. channels_first: one channel's numbers in a block."""

    side: int
    mean: bool = False
    channels_first: bool = False


Step = Squares | Norm | Matrix | Activation
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class Projector(Op):
    """Steps from the tower's rows to embeddings of the text model, or to a Deepstack's additions."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class TowerLayer(Op):
    attention: Attention
    mlp: MLP
    windowed: bool = False  # attention stays within windows
    scales: tuple[str, ...] = ()  # names of factors [width] of attention's and MLP's results
    clipped: bool = False  # each part of a matrix has BOUNDS of the numbers that it reads and writes

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        parts = [part for matrix in self.matrices if self.clipped for part, _ in matrix.parts]
        bounds: dict[str, Shape] = {f"{part}.{one}.weight": (1,) for part in parts for one in BOUNDS}
        return bounds | {f"{one}.weight": (self.attention.out.out,) for one in self.scales}


@dataclass(frozen=True)
class Tower(OpList):
    patches: Patches
    layers: tuple[TowerLayer, ...]
    norm: Norm | None
    projector: Projector
    rotary: Rope | None = None  # in two dimensions
    alternate: bool = False  # rows and columns take the frequencies in turn, else each over half of a head
    window: int = 0  # its side in patches
    deep: tuple[tuple[int, Projector], ...] = ()  # layers, and the projectors of the rows behind them

    tied_head = False  # as a graph's

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.patches, *self.layers, self.projector, *(one for _, one in self.deep)

    @property
    def cell(self) -> int:
        """The side, in pixels, of the square behind one row of the result."""
        return self.patches.side * prod(step.side for step in self.projector.steps if isinstance(step, Squares))

    def working_bytes(self, pixels: int) -> int:
        """The most memory, in fp32, that a picture takes while it is computed."""
        rows, width = 4 * pixels // self.patches.side**2, self.patches.matrix.out
        # K, V, q, and the rows before a layer and behind it, in parts and joined; a Deepstack's stay.
        layers = rows * (3 * prod(self.head) + (3 + len(self.deep)) * width)
        return max(2 * 12 * self.patches.frames * pixels, layers)

    @property
    def head(self) -> tuple[int, int]:
        return self.layers[0].attention.heads, self.layers[0].attention.head_size

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return union(one.shapes for one in (*self.ops, self.norm) if one is not None)
