"""What tests of a running engine share: to wait until it is at rest, and to hold it between two steps."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenwright import LLM
from tokenwright.engine import Engine


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


def assert_at_rest(llm: LLM) -> None:
    """No request is left, every page is free, and the invariants hold."""
    engine = settled(llm)
    engine.scheduler.check()
    assert not engine.scheduler.sequences, "a request was left behind"
    assert engine.pool.available == engine.pool.pages, "pages were left behind"
