"""The threads in which requests are prepared, and whose turn it is: no request waits for the grammars of another key.

without a grammar   ``threads``, in the order in which they come: rendering and tokenising are quick
with a grammar      as many threads as there are grammar workers, for which they wait; keys take turns
only read           as those without a grammar, but one thread stays free for the prompts of those that generate
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenwright.decode.grammars.grammar_trials import WORKERS, Budget
from tokenwright.serve.service.admission import Admission
from tokenwright.serve.service.opening import heard
from tokenwright.serve.service.preprocess import Prepared, Preprocessor
from tokenwright.serve.service.types import ENDING, GenerationRequest, NotReady

T = TypeVar("T")


class Preparation:
    """threads: that render and tokenise. queue: requests that may wait. keys: API keys that share it."""

    def __init__(self, threads: int, queue: int, keys: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "tokenwright requests")
        self._compilers = ThreadPoolExecutor(WORKERS, "tokenwright grammars")
        self.reading = Admission(max(1, threads - 1), queue, keys)
        self._compiling = Admission(WORKERS, queue, keys)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run what takes time (tokenising, templates) in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def read(self, key: str, function: Callable[[], T], deadline_s: float | None) -> T:
        """As `in_thread`, in its turn among those that are only read.

        Raises Busy where too many wait, Late if the deadline passes meanwhile.
        """
        turn = await self.reading.enter(key, 1, 0, deadline_s)
        work = asyncio.ensure_future(self.in_thread(function))
        work.add_done_callback(lambda _: turn.leave())
        work.add_done_callback(heard)
        return await asyncio.shield(work)  # a thread goes on for a client that has gone, and so the turn is held

    async def prepared(self, preparer: Preprocessor, wanted: GenerationRequest) -> Prepared:
        """A request of the engine. Where its client goes, no more of its grammars is begun. Raises RequestError."""
        if preparer.quick(wanted):
            return preparer.prepare(wanted)
        if not preparer.constrained(wanted):
            return await self.in_thread(lambda: preparer.prepare(wanted))
        turn = await self._compiling.enter(wanted.caller.key, 1, wanted.priority, wanted.deadline_s, taken=True)
        budget = Budget()
        work = asyncio.get_running_loop().run_in_executor(self._compilers, preparer.prepare, wanted, budget)
        work.add_done_callback(lambda _: turn.leave())
        work.add_done_callback(heard)
        try:
            return await asyncio.shield(work)
        finally:
            budget.cancelled = True

    def stop(self) -> None:
        """Let every request that waits fail."""
        for queue in (self.reading, self._compiling):
            queue.close(NotReady(ENDING))

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)
