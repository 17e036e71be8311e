"""Has an idle engine compute the beginnings of conversations' next turns."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from tokenwright.errors import RequestError

log = logging.getLogger(__name__)

Warm = Literal["off", "auto", "on"]
MOST_ANSWERED = 16  # conversations; the oldest leave first


class NextTurns:
    """The conversations that were answered last. busy: whether there is a request. run: runs a function in a thread."""

    def __init__(self, busy: Callable[[], bool], run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._busy, self._run = busy, run
        self._answered: deque[Callable[[], None]] = deque(maxlen=MOST_ANSWERED)
        self._task: asyncio.Task[None] | None = None

    def ended(self, follow: Callable[[], None] | None) -> None:
        """A request has ended. follow: prepares the conversation's next turn, which takes time; None: it has none."""
        if follow is not None:
            self._answered.append(follow)
        if self._answered and self._task is None and not self._busy():
            self._task = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            while self._answered and not self._busy():
                with suppress(RequestError):  # the template refuses the placeholder for the next words
                    await self._run(self._answered.popleft())
        except Exception:
            log.exception("the next turn of a conversation could not be prepared")
        finally:
            self._task = None
