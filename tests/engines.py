"""What tests of a running engine share: to wait for what it does, to hold it between two steps, to slow it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.engine.invariants import check_invariants
from tokenwright import LLM
from tokenwright.engine import Engine, Event

HANGS_S = 120.0  # whatever takes longer will not happen any more


def until(condition: Callable[[], Any], hangs_s: float = HANGS_S) -> Any:
    """Wait for a condition; returns what it says."""
    end = time.monotonic() + hangs_s
    while not (found := condition()):
        assert time.monotonic() < end, "this never happens"
        time.sleep(0.005)
    return found


async def reached(condition: Callable[[], Any]) -> None:
    """As `until`, while the event loop goes on."""
    async with asyncio.timeout(HANGS_S):
        while not condition():
            await asyncio.sleep(0.001)


def settled(llm: LLM) -> Engine:
    """The engine once it has read all messages sent until now: cancelled requests have ended."""
    return llm.llm_engine.loop.call(lambda engine: engine)


@contextmanager
def held(llm: LLM) -> Iterator[None]:
    """No step begins meanwhile; requests that are submitted join the same step afterwards."""
    go_on = threading.Event()
    llm.llm_engine.loop.post(lambda _: go_on.wait() and None)
    try:
        yield
    finally:
        go_on.set()


@contextmanager
def slowed(llm: LLM, steps: int = 64) -> Iterator[None]:
    """From now on the engine makes a number of steps; after these, one for each message that it gets.

    So a text of more tokens is still being written when its client goes away, whenever the client comes to it.
    """
    loop = llm.llm_engine.loop
    engine, step, made, over = loop.engine, loop.engine.step, count(), threading.Event()

    def slow() -> list[Event]:
        if next(made) >= steps:
            while loop._mailbox.empty() and not over.wait(0.002):
                pass
        return step()

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        over.set()
        del engine.step  # type: ignore[method-assign]


def assert_at_rest(llm: LLM) -> None:
    """No request is left, every page is free, and the invariants hold."""
    engine = settled(llm)
    check_invariants(engine.scheduler)
    assert not engine.scheduler.sequences, "a request was left behind"
    while engine.scheduler.kv.pins.end_oldest(None):
        pass  # pins outlive their requests
    assert engine.pool.available == engine.pool.pages, "pages were left behind"
