"""Panel Block: one token in one layer; and the way into a cell: a query meets a key, and what a head makes of it."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.wire import COUNTED, DERIVED, READ


@dataclass(frozen=True, slots=True)
class BlockStage:
    name: str  # input, norm, query, key, value, attention, output, residual, mlp_norm, hidden, mlp_output, result
    shape: tuple[int, ...]
    norm: Annotated[float, READ("", "norm", "the length of the vector, of all its numbers together: in a replay")]
    heads: tuple[float, ...]
    numbers: tuple[float, ...]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs", "2 x inputs x outputs, or 4 H D for each token read")]
    share: Annotated[float, DERIVED("share", "share", "of the FLOPs of this token in this layer")]


@dataclass(frozen=True, slots=True)
class HeadRead:
    head: int
    position: int  # the one that the head reads most
    weight: float


@dataclass(frozen=True, slots=True)
class ContextShare:
    context: int
    share: float


@dataclass(frozen=True, slots=True)
class BlockView:
    position: int
    layer: int
    context: Annotated[int, COUNTED("tokens", "read", "tokens that this one attends to, itself included")]
    kv_bytes: Annotated[int, DERIVED("B", "K and V kept", "of this token in this layer")]
    flops: Annotated[int, DERIVED("FLOP", "FLOPs of the layer", "for this token, in this layer")]
    model_flops: Annotated[int, DERIVED("FLOP", "FLOPs of the model", "2 (P_b + P_lm) + A(t): all layers and the head")]
    stages: tuple[BlockStage, ...]
    reads: tuple[HeadRead, ...]
    by_context: tuple[ContextShare, ...]


@dataclass(frozen=True, slots=True)
class ReadPosition:
    position: int
    score: float
    weight: float


@dataclass(frozen=True, slots=True)
class WayView:
    reader: int
    position: int
    layer: int
    head: int
    group: int  # its KV head
    query: tuple[float, ...]  # [D], like the key
    key: tuple[float, ...]
    plain: tuple[float, ...]  # [D], the key before its rotation; empty where no rotation follows from the position
    plain_query: tuple[float, ...]  # likewise
    angles: tuple[float, ...]  # [D / 2], radians: number i and number i + D / 2 turn by angle i
    products: tuple[float, ...]
    value: tuple[float, ...]
    mixed: tuple[float, ...]  # [v], over all positions
    dot: Annotated[float, READ("", "q · k", "the sum of the products of query and key, number by number")]
    scale: Annotated[float, DERIVED("", "scale", "1 / sqrt(D), or what the model has in its place")]
    score: Annotated[float, READ("", "score", "scale x q · k, and the soft cap of models that have one")]
    weight: Annotated[float, READ("share", "weight", "e^score / the sum of e^score over all positions read")]
    reads: tuple[ReadPosition, ...]  # those with the largest weights


MESSAGES = (BlockStage, HeadRead, ContextShare, BlockView, ReadPosition, WayView)


def block(explorer: Explorer, identity: str, step: int, layer: int, position: int | None = None) -> BlockView:
    from tokenwright.explorer.views import block_view

    run = explorer.run(identity)
    last = run.last_position(step)
    at = computed(position, last, step)
    run.check(layer, 0)
    return run.look(lambda replay, text: block_view.block(replay, text, at, layer), at)


def way(explorer: Explorer, identity: str, step: int, layer: int, head: int, position: int) -> WayView:
    from tokenwright.explorer.views import block_view

    run = explorer.run(identity)
    run.check(layer, head)
    last = run.last_position(step)
    computed(position, last, step)
    return run.look(lambda replay, text: block_view.way(replay, text, last, layer, head, position), last)


def computed(position: int | None, last: int, step: int) -> int:
    """A position that a step knows, by default its last. Raises RequestError for a later one."""
    if position is not None and not 0 <= position <= last:
        raise RequestError(f"position must be from 0 to {last}: later tokens are not computed at step {step + 1}")
    return last if position is None else position
