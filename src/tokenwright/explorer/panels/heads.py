"""Panel Heads: all heads, a head's matrix, and the lens, replayed read-only on the engine."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
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


def lens(explorer: Explorer, identity: str, step: int) -> LensCard:
    from tokenwright.explorer.views import heads_view  # with NumPy

    run = explorer.run(identity)
    token = run.frame(step).token
    if token is None:
        raise RequestError(f"step {step + 1} has chosen no token: it computed a part of the prompt")
    return heads_view.lens(run.look, run.last_position(step), step, token, lambda one: explorer.looks([one])[0])


def atlas(explorer: Explorer, identity: str, step: int) -> Generator[AtlasCard | None, None, None]:
    from tokenwright.explorer.views import heads_view  # with NumPy

    run, config = explorer.run(identity), explorer.llm.config
    tokens = run.tokens[: run.last_position(step) + 1]
    yield from heads_view.atlas(run.look, tokens, step, config.layers, config.heads)


def matrix(
    explorer: Explorer, identity: str, step: int, layer: int, head: int
) -> Generator[MatrixCard | None, None, None]:
    from tokenwright.explorer.views import heads_view  # with NumPy

    run = explorer.run(identity)
    run.check(layer, head)
    yield from heads_view.matrix(run.look, run.last_position(step) + 1, step, layer, head)
