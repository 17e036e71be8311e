"""What tests of a running engine share: to wait until it is at rest, to hold it between two steps, to slow it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tokenwright import LLM
from tokenwright.engine import Engine, Event


def settled(llm: LLM) -> Engine[Any]:
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
    engine.scheduler.check()
    assert not engine.scheduler.sequences, "a request was left behind"
    while engine.scheduler.kv.pins.make_way(None):
        pass  # pins outlive their requests
    assert engine.pool.available == engine.pool.pages, "pages were left behind"
