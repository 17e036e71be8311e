"""Several requests of the service side by side: the prompts of one completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from tokenwright.serve.contract import Delta, Wanted
from tokenwright.serve.generation import Generation
from tokenwright.serve.service import Service

T = TypeVar("T")


class Several:
    """The generations of several prompts, read side by side."""

    def __init__(self, service: Service, each: Sequence[Wanted]) -> None:
        self.generations: list[Generation] = []
        self._service = service
        self._wanted = each
        self._news: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all. Raises what the first that fails raises, with none of them left."""
        if len(self._wanted) == 1:
            self.generations = [await self._service.start(self._wanted[0])]
            return
        started: list[asyncio.Future[Generation]] = [asyncio.get_running_loop().create_future() for _ in self._wanted]
        self._tasks = [asyncio.create_task(self._read(at, future)) for at, future in enumerate(started)]
        try:
            self.generations = list(await asyncio.gather(*started))
        except BaseException:
            self.cancel()
            raise

    async def _read(self, at: int, started: asyncio.Future[Generation]) -> None:
        try:
            generation = await self._service.start(self._wanted[at])
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            return
        try:
            if not started.cancelled():
                started.set_result(generation)
            async for deltas in generation:
                self._news.put_nowait((at, deltas))
            self._news.put_nowait((at, None))
        except Exception as error:
            self._news.put_nowait((at, error))
        finally:
            generation.cancel()

    def cancel(self) -> None:
        """End all that have not ended."""
        for task in self._tasks:
            task.cancel()
        for generation in self.generations:
            generation.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Generation, list[Delta]]]:
        """The number of the prompt, its generation, and the deltas of its next step. Raises EngineError."""
        if not self._tasks:
            async for deltas in self.generations[0]:
                yield 0, self.generations[0], deltas
            return
        left = len(self._tasks)
        while left:
            at, news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield at, self.generations[at], news


async def gathered(each: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; where one fails, the others are cancelled."""
    if len(each) == 1:
        return [await each[0]]
    tasks = [asyncio.create_task(one) for one in each]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
