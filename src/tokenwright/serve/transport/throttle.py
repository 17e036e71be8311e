"""A few requests at a time: how many begin to be worked on in one turn of the event loop.

A thousand requests that come at once would otherwise be checked, parsed and queued in one turn, and whatever else is to
be done waits for them: new connections, /health, the tokens of those that run. Only requests that wait for a place in
the engine anyway go through the door.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 2  # requests of a turn


class Throttle:
    """Lets AT_ONCE requests in per turn of the event loop, in order. Belongs to one event loop."""

    def __init__(self) -> None:
        self._left = AT_ONCE  # of this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Wait for the turn; returns at once where few come."""
        if self._left:
            self._left -= 1
            self._turn_soon()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The next turn: those that wait go first."""
        self._turning, self._left = False, AT_ONCE
        while self._left and self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # its client is still there
                future.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._turn_soon()
