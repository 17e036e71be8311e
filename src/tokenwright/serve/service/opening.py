"""Waits for the model, and makes once what all requests of it need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenwright.engine.loop import AsyncListener
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.quota import Quota
from tokenwright.serve.service.types import NotReady

READY_S = 60.0  # a request waits so long for a model that is still being read


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts that requests of a model need. listener: of the service's event loop."""

    preparer: Preprocessor
    listener: AsyncListener


class Opening:
    """The model as it is opened: `wait` for it, then `opened` is there.

    waiting: counts the requests that wait. prepare(): waits for the model itself, and raises NotReady.
    """

    def __init__(self, prepare: Callable[[], Coroutine[Any, Any, Opened]], waiting: Quota) -> None:
        self.waiting = waiting
        self._prepare = prepare
        self._task: asyncio.Task[None] | None = None
        self._opened: Opened | None = None

    @property
    def done(self) -> bool:
        """Whether the model is opened."""
        return self._opened is not None

    @property
    def opened(self) -> Opened:
        """The parts that the model's requests need; only once it is opened."""
        assert self._opened is not None, "an opened model has one"
        return self._opened

    async def wait(self, key: str) -> None:
        """Wait for the model, as a request of this key. Raises NotReady if that takes long or fails."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._open())
            self._task.add_done_callback(heard)
        self.waiting.add(key)
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._task)
        except TimeoutError:
            raise NotReady from None
        finally:
            self.waiting.remove(key)

    async def _open(self) -> None:
        self._opened = await self._prepare()


def heard(work: asyncio.Future[Any]) -> None:
    """Take the exception of a task: perhaps no request waits for it any more, and asyncio would complain."""
    if not work.cancelled():
        work.exception()
