"""All heads, as the page shows them. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Literal

from tokenwright.trace.schema import TokenCard

HeadKind = Literal["previous", "induction", "sink", "local", "mixed"]


@dataclass(frozen=True, slots=True)
class HeadCard:
    """One head: means over the atlas's rows, and its row at the step."""

    layer: int
    head: int
    kind: HeadKind
    sink: float  # mean weight of the first token
    previous: float  # of the token before
    local: float  # of the last eight, the row's own included
    induction: float | None  # of the token that followed the same token earlier; null: too few repetitions
    codes: str  # base64: the row at the step, the largest of each column, as round(255 sqrt(weight))


@dataclass(frozen=True, slots=True)
class AtlasCard:
    """GET /runs/ID/atlas: every head, named by what it does: the first kind whose threshold its mean reaches."""

    step: int
    rows: int  # positions over which the means go
    repeats: int  # of these, such as whose token stood in the text before
    needed: int  # repetitions without which induction is not judged
    kinds: tuple[HeadKind, ...]  # in the order in which they are tried
    thresholds: tuple[float, ...]
    heads: tuple[HeadCard, ...]  # by layer, then by head


@dataclass(frozen=True, slots=True)
class MatrixCard:
    """GET /runs/ID/matrix: the weights of one head, rows down, positions across; the largest of each cell."""

    step: int
    layer: int
    head: int
    first: int  # position of the first row and column
    tokens: int  # rows, and columns
    cell: int  # tokens that a cell stands for, in each direction
    size: int  # cells across
    codes: str  # base64: size x size


@dataclass(frozen=True, slots=True)
class LensRow:
    """The residual stream after a layer (-1: the embedding), read as if it were the last one."""

    layer: int
    token: TokenCard  # the most probable
    probability: float
    rank: int  # of the token that was chosen in the end
    chosen: float  # its probability


@dataclass(frozen=True, slots=True)
class LensCard:
    """GET /runs/ID/lens: each layer's guess at the next token, through the final norm and the head."""

    step: int
    chosen: TokenCard
    rows: tuple[LensRow, ...]


MESSAGES = (HeadCard, AtlasCard, MatrixCard, LensRow, LensCard)
