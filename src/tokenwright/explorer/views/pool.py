"""A snapshot of the page pool, read between two steps: the owners of each page, its fill, and what is shared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenwright.cache import LayerGroup
from tokenwright.engine import Engine
from tokenwright.engine.page_pool import GroupPool
from tokenwright.engine.request import Sequence as EngineSequence
from tokenwright.engine.request import State
from tokenwright.explorer.panels.pages import PoolCard, PoolGroup, PoolPage, PoolSequence, Whose

MOST_LISTED = 2048


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence that the viewer may read."""

    sequence: EngineSequence
    whose: Whose
    place: int = 0
    prompt: str = ""
    text: str = ""


def snapshot(engine: Engine[Any], layers: Sequence[LayerGroup], known: Sequence[Known]) -> PoolCard:
    """The pool, the `known` sequences, ended ones too, and every other one of the engine, without its text."""
    mine = {one.sequence.id for one in known}
    others = [Known(one, "other") for one in engine.scheduler.sequences.values() if one.id not in mine]
    everyone = [*known, *others]
    size = engine.pool.page_size
    pairs = zip(engine.pool.group_pools, layers, strict=True)
    groups = [
        _group(pool, group.layers, size, {n: one.sequence for n, one in enumerate(everyone)}, number)
        for number, (pool, group) in enumerate(pairs)
    ]
    return PoolCard(size, tuple(groups), tuple(_sequence(one) for one in everyone))


def _sequence(known: Known) -> PoolSequence:
    sequence = known.sequence
    return PoolSequence(
        whose=known.whose,
        place=known.place,
        state=_state(sequence),
        prompt=known.prompt,
        text=known.text,
        tokens=len(sequence.tokens),
        computed=sequence.computed if sequence.pages else 0,
        forwarded=sequence.counts.forwarded,
        reused=sequence.counts.reused,
        pages=sequence.pages,
        preemptions=sequence.counts.preemptions,
    )


def _state(sequence: EngineSequence) -> Literal["waiting", "running", "paused", "finished"]:
    if sequence.state is State.FINISHED:
        return "finished"
    if sequence.paused:
        return "paused"
    return "running" if sequence.state is State.RUNNING else "waiting"


def _group(
    pool: GroupPool, layers: tuple[int, ...], size: int, sequences: Mapping[int, EngineSequence], number: int
) -> PoolGroup:
    found: dict[int, tuple[list[int], int, int]] = {}  # page -> owners, its place in their text, filled slots
    for index, sequence in sequences.items():
        for place, page in sequence.tables[number].items():
            owners, _, filled = found.setdefault(page, ([], place, 0))
            owners.append(index)
            here = min(size, max(0, sequence.computed - place * size))
            found[page] = owners, place, max(filled, here)
    listed = [
        PoolPage(page, pool.refcounts[page], filled, tuple(owners), place)
        for page, (owners, place, filled) in found.items()
    ]
    for page in pool.cached:
        before = pool.tail_of.get(pool.hashes[page])
        listed.append(PoolPage(page, 0, size if before is None else before[1], (), None))
    listed.sort(key=lambda one: one.page)
    window = pool.group.window
    more = sum(count - 1 for count in pool.refcounts.values())
    return PoolGroup(
        layers=layers,
        window=window.size,
        sinks=window.sinks,
        pages=pool.group.pages,
        used=len(pool.refcounts),
        shared=sum(count > 1 for count in pool.refcounts.values()),
        cached=len(pool.cached),
        free=len(pool.free),
        page_bytes=pool.group.page_bytes,
        saved_bytes=more * pool.group.page_bytes,
        listed=tuple(listed[:MOST_LISTED]),
        left_out=max(0, len(listed) - MOST_LISTED),
    )
