"""The way into a cell: one query that meets one key, and what one head makes of it."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels.block import computed
from tokenwright.trace.wire import DERIVED, READ


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


MESSAGES = (ReadPosition, WayView)


def way(explorer: Explorer, identity: str, step: int, layer: int, head: int, position: int) -> WayView:
    from tokenwright.explorer.views import block_view

    run = explorer.run(identity)
    run.check(layer, head)
    last = run.last_position(step)
    computed(position, last, step)
    return run.look(lambda replay, text: block_view.way(replay, text, last, layer, head, position), last)
