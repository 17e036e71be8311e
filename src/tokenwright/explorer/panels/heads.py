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
    layer: int
    head: int
    kind: HeadKind
    sink: float  # mean weight of the first token, over the atlas's rows
    previous: float  # of the token before
    local: float  # of the last eight, its own included
    few: float  # of the three earlier tokens that a row reads most, but for the first one and the newest two
    induction: float | None  # of the token after an earlier same one; null: too few repetitions
    codes: str  # base64: the row at the step, each column's largest, as round(255 sqrt(weight))


@dataclass(frozen=True, slots=True)
class AtlasCard:
    step: int
    rows: int  # positions that the means are over
    repeats: int  # of these, positions whose token stood in the text before
    needed: int  # repetitions for judging induction
    kinds: tuple[HeadKind, ...]  # a head is of the first one whose threshold its mean reaches
    thresholds: tuple[float, ...]
    heads: tuple[HeadCard, ...]


@dataclass(frozen=True, slots=True)
class MatrixCard:
    step: int
    layer: int
    head: int
    first: int  # position of the first row and column
    tokens: int  # rows, and columns
    cell: int  # its tokens, in each direction
    size: int  # cells across
    codes: str  # base64: size x size, the largest weight of each cell; rows are queries


@dataclass(frozen=True, slots=True)
class LensRow:
    layer: int  # the stream after it is read as the last one; -1: the embedding
    token: TokenCard
    probability: float
    rank: int
    chosen: float


@dataclass(frozen=True, slots=True)
class LensCard:
    step: int
    chosen: TokenCard
    rows: tuple[LensRow, ...]


MESSAGES = (HeadCard, AtlasCard, MatrixCard, LensRow, LensCard)


def lens(explorer: Explorer, identity: str, step: int) -> LensCard:
    from tokenwright.explorer.views import heads_view

    run = explorer.run(identity)
    token = run.frame(step).token
    if token is None:
        raise RequestError(f"step {step + 1} has chosen no token: it computed a part of the prompt")
    return heads_view.lens(run.look, run.last_position(step), step, token, lambda one: explorer.looks([one])[0])


def atlas(explorer: Explorer, identity: str, step: int) -> Generator[AtlasCard | None, None, None]:
    from tokenwright.explorer.views import heads_view

    run, config = explorer.run(identity), explorer.llm.config
    tokens = run.tokens[: run.last_position(step) + 1]
    yield from heads_view.atlas(run.look, tokens, step, config.layers, config.heads)


def matrix(
    explorer: Explorer, identity: str, step: int, layer: int, head: int
) -> Generator[MatrixCard | None, None, None]:
    from tokenwright.explorer.views import heads_view

    run = explorer.run(identity)
    run.check(layer, head)
    yield from heads_view.matrix(run.look, run.last_position(step) + 1, step, layer, head)
