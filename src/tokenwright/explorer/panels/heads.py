"""Panel Heads: all heads, a head's matrix, and the lens, replayed read-only on the engine."""

import base64
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from tokenwright.arrays import Array, Bytes, Floats
from tokenwright.decode.logits_processors import Doubles, log_softmax
from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.replay import AttentionReplay, QueryTap, ReplayedText, StreamTap
from tokenwright.trace.rows import LOCAL
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
    run = explorer.run(identity)
    token = run.frame(step).token
    if token is None:
        raise RequestError(f"step {step + 1} has chosen no token: it computed a part of the prompt")
    return lens_card(run.look, run.last_position(step), step, token, lambda one: explorer.looks([one])[0])


def atlas(explorer: Explorer, identity: str, step: int) -> Generator[AtlasCard | None, None, None]:
    run, config = explorer.run(identity), explorer.llm.config
    tokens = run.tokens[: run.last_position(step) + 1]
    yield from atlas_card(run.look, tokens, step, config.layers, config.heads)


def matrix(
    explorer: Explorer, identity: str, step: int, layer: int, head: int
) -> Generator[MatrixCard | None, None, None]:
    run = explorer.run(identity)
    run.check(layer, head)
    yield from matrix_card(run.look, run.last_position(step) + 1, step, layer, head)


T = TypeVar("T")

ROWS = 128  # positions of the atlas
MOST_WEIGHTS = 2**26  # of a layer's part
START = 2 * LOCAL  # the first position that counts: earlier ones are nearly all local
COLUMNS = 48  # of a head's row in the atlas
NEEDED = 8  # repeated tokens for judging induction
KINDS: tuple[HeadKind, ...] = ("previous", "induction", "sink", "local")
THRESHOLDS = (0.5, 0.4, 0.5, 0.7)
MOST_MATRIX = 2048  # a matrix's last tokens
SLICE = 512  # rows a part
CELLS = 256


class Look(Protocol):
    """Calls `read` between two steps, with the replay and a text of which it can replay `rows` rows."""

    def __call__(self, read: Callable[[AttentionReplay, ReplayedText], T], position: int, rows: int = 1) -> T: ...


def atlas_card(
    look: Look, tokens: Sequence[int], step: int, layers: int, heads: int
) -> Generator[AtlasCard | None, None, None]:
    """Every head over the last rows of `tokens`, the text up to the step's last token."""
    stop = len(tokens)
    rows = min(stop, ROWS, max(1, MOST_WEIGHTS // (heads * stop)))
    first = stop - rows
    seen = QueryTap()
    look(lambda replay, text: replay.replayed(text, first, seen, rows), first, rows)
    yield None
    found, pairs = list[HeadCard](), _repeats(tokens, first)
    for layer in range(layers):

        def read(replay: AttentionReplay, text: ReplayedText, at: int = layer) -> Floats:
            return replay.weights(text, text.chunk(first, rows), seen, at)

        found += _cards(look(read, first, rows), layer, first, pairs)
        yield None
    counted = len(_counted(first, stop))
    yield AtlasCard(step, counted, len(pairs), NEEDED, KINDS, THRESHOLDS, tuple(found))


def _counted(first: int, stop: int) -> range:
    return range(max(first, START if stop > START else 1), stop)


def _repeats(tokens: Sequence[int], first: int) -> list[tuple[int, int]]:
    """Positions whose token stood in the text before, each with the position after its last occurrence."""
    last: dict[int, int] = {}
    found = []
    for position, token in enumerate(tokens):
        before = last.get(token)
        if before is not None and before + 1 < position and position >= max(1, first):
            found.append((position, before + 1))
        last[token] = position
    return found


def _cards(weights: Floats, layer: int, first: int, pairs: list[tuple[int, int]]) -> list[HeadCard]:
    stop = weights.shape[-1]
    counted = list(_counted(first, stop)) or [stop - 1]
    places = np.array(counted)
    chosen = weights[:, places - first].astype(np.float64)  # [H, n, stop]
    sink = chosen[:, :, 0].mean(1)
    before = chosen[:, np.arange(len(counted)), (places - 1).clip(min=0)].mean(1)
    near = np.stack([chosen[:, n, max(0, at + 1 - LOCAL) : at + 1].sum(1) for n, at in enumerate(counted)]).mean(0)
    earlier = chosen * ((np.arange(stop) > 0) & (np.arange(stop) < places[:, None] - 1))  # [H, n, stop]
    few = np.sort(earlier, -1)[..., -3:].sum(-1).mean(1)
    again: Doubles | None = None
    if len(pairs) >= NEEDED:
        at, target = np.array(pairs).T
        again = weights[:, at - first, target].astype(np.float64).mean(1)
    found = []
    for head in range(len(weights)):
        induction = None if again is None else round(float(again[head]), 6)
        means = (float(before[head]), induction, float(sink[head]), float(near[head]) if stop > START else None)
        row = base64.b64encode(_coded(_pooled(weights[head, -1], COLUMNS))).decode()
        on_first, previous, local, most = (round(float(one[head]), 6) for one in (sink, before, near, few))
        found.append(HeadCard(layer, head, _kind(means), on_first, previous, local, most, induction, row))
    return found


def _kind(means: Sequence[float | None]) -> HeadKind:
    for kind, mean, least in zip(KINDS, means, THRESHOLDS, strict=True):
        if mean is not None and mean >= least:
            return kind
    return "mixed"


def _pooled(row: Floats, columns: int) -> Floats:
    """The largest of each of at most `columns` parts of a row [t]; neighbours may share a number."""
    if len(row) <= columns:
        return row
    borders = ((at * len(row) // columns, -(-(at + 1) * len(row) // columns)) for at in range(columns))
    return np.array([row[start:stop].max() for start, stop in borders])


def _coded(weights: Floats) -> bytes:
    codes: Bytes = (np.sqrt(weights.clip(0, 1)) * np.float32(255)).round().astype(np.uint8)
    return bytes(codes)


def _cells(weights: Floats, cell: int) -> Floats:
    """The largest of each square of `cell` rows and columns of weights [n, t], smaller at the far edges."""
    rows = np.maximum.reduceat(weights, np.arange(0, weights.shape[0], cell), 0)
    pooled: Floats = np.maximum.reduceat(rows, np.arange(0, weights.shape[1], cell), 1)
    return pooled


def matrix_card(look: Look, stop: int, step: int, layer: int, head: int) -> Generator[MatrixCard | None, None, None]:
    first = max(0, stop - MOST_MATRIX)
    tokens = stop - first
    cell = -(-tokens // CELLS)
    size = -(-tokens // cell)
    found = np.zeros((size, size), np.float32)
    rows = max(cell, SLICE // cell * cell)
    for start in range(first, stop, rows):
        count = min(rows, stop - start)

        def read(replay: AttentionReplay, text: ReplayedText, at: int = start, count: int = count) -> Array:
            chunk = replay.replayed(text, at, seen := QueryTap(layer), count)
            one: Array = replay.weights(text, chunk, seen, layer, head)[0]
            return one

        weights = look(read, start, count)[:, first:]
        pooled = _cells(weights, cell)
        down = (start - first) // cell
        found[down : down + len(pooled), : pooled.shape[1]] = pooled
        yield None
    codes = base64.b64encode(_coded(found)).decode()
    yield MatrixCard(step, layer, head, first, tokens, cell, size, codes)


def lens_card(look: Look, position: int, step: int, chosen: int, card: Callable[[int], TokenCard]) -> LensCard:
    def read(replay: AttentionReplay, text: ReplayedText) -> Doubles:
        replay.replayed(text, position, tap := StreamTap())
        return log_softmax(replay.passes.logits(np.ascontiguousarray(tap.streams()[:, -1])))  # [L + 1, V]

    rows = []
    for layer, logprobs in enumerate(look(read, position), start=-1):
        best, own = int(logprobs.argmax()), logprobs[chosen]
        rank = int((logprobs > own).sum())
        rows.append(LensRow(layer, card(best), float(np.exp(logprobs[best])), rank, float(np.exp(own))))
    return LensCard(step, card(chosen), tuple(rows))
