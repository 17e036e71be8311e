"""The lesson's checks run one at a time, in a thread, and end when their client goes away. A few may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from tokenwright.errors import CapacityError
from tokenwright.explorer.explorer import Explorer

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.explorer.learn import CheckWork

T = TypeVar("T")

MOST_WAITING = 4  # checks that may wait for the one that runs


class Desk:
    """Does one piece of work after another, in a thread; cancels the one whose client has gone."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.working: CheckWork | None = None
        self._waiting = 0
        self._turn: asyncio.Lock | None = None  # of the event loop that serves
        self._thread = ThreadPoolExecutor(1, "tokenwright checks")

    def close(self) -> None:
        if (work := self.working) is not None:
            work.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def do(self, do: Callable[[CheckWork], T]) -> T:
        """`do` with the means of a check. Raises CapacityError if too many wait already."""
        if self._waiting > MOST_WAITING:
            raise CapacityError(f"{MOST_WAITING} checks wait already; try again in a minute")
        self._turn = self._turn or asyncio.Lock()
        self._waiting += 1
        try:
            async with self._turn:
                return await self._done(do)
        finally:
            self._waiting -= 1

    async def _done(self, do: Callable[[CheckWork], T]) -> T:
        from tokenwright.explorer.learn import CheckWork

        work = self.working = CheckWork(self.explorer.llm)
        task = asyncio.get_running_loop().run_in_executor(self._thread, do, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            work.cancel()
            with suppress(Exception):
                await task  # the next one begins when this one has ended
            raise
        finally:
            self.working = None
