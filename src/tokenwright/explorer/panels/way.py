"""The way into a cell: one query that meets one key, and what one head makes of it."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels.block import computed
from tokenwright.trace.wire import DERIVED, READ


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """A position that the head reads. score: before the softmax; weight: after it."""

    position: int
    score: float
    weight: float


@dataclass(frozen=True, slots=True)
class WayView:
    """GET /runs/ID/way: the cell of `position` for one head at a step. query, key: [D]; value, mixed: [v].

    group: the KV head that it reads. mixed: what it has read of all positions. reads: those with the largest weights.
    """

    reader: int  # the position whose query it is
    position: int
    layer: int
    head: int
    group: int
    query: tuple[float, ...]
    key: tuple[float, ...]
    products: tuple[float, ...]
    value: tuple[float, ...]
    mixed: tuple[float, ...]
    dot: Annotated[float, READ("", "q · k", "the sum of the products of query and key, number by number")]
    scale: Annotated[float, DERIVED("", "scale", "1 / sqrt(D), or what the model has in its place")]
    score: Annotated[float, READ("", "score", "scale x q · k, and the soft cap of models that have one")]
    weight: Annotated[float, READ("share", "weight", "e^score / the sum of e^score over all positions read")]
    reads: tuple[ReadPosition, ...]


MESSAGES = (ReadPosition, WayView)


def way(explorer: Explorer, identity: str, step: int, layer: int, head: int, position: int) -> WayView:
    from tokenwright.explorer.views import block_view  # with NumPy

    run = explorer.run(identity)
    run.check(layer, head)
    last = run.last_position(step)
    computed(position, last, step)
    return run.look(lambda replay, text: block_view.way(replay, text, last, layer, head, position), last)
