"""Generates one reply's prompts concurrently. A full queue refuses only the first; MOST_STARTING wait at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokenwright.serve.service.generation import MOST_UNREAD, Generation
from tokenwright.serve.service.types import Delta, GenerationRequest

T = TypeVar("T")
Start = Callable[[GenerationRequest], Awaitable[Generation]]

MOST_STARTING = 32


class PromptGroup:
    def __init__(self, start: Start, requests: Sequence[GenerationRequest]) -> None:
        self.generations: list[Generation] = []
        self._start = start
        self._requests = _with_arrival(requests)
        self._news: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._reading = False  # until the client reads, a full queue of news pauses no generation
        self._taken = asyncio.Event()

    async def start(self) -> None:
        """Start all. If one fails, cancels the others and raises its error."""
        if len(self._requests) == 1:
            self.generations = [await self._start(self._requests[0])]
            return
        started: list[asyncio.Future[Generation]] = [asyncio.get_running_loop().create_future() for _ in self._requests]
        starting = asyncio.Semaphore(MOST_STARTING)
        self._tasks = [asyncio.create_task(self._read(at, starting, future)) for at, future in enumerate(started)]
        try:
            self.generations = list(await asyncio.gather(*started))
        except BaseException:
            self.cancel()
            raise

    async def _read(self, at: int, starting: asyncio.Semaphore, started: asyncio.Future[Generation]) -> None:
        try:
            async with starting:
                generation = await self._start(self._requests[at])
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            return
        try:
            if not started.cancelled():
                started.set_result(generation)
            async for deltas in generation:
                self._news.put_nowait((at, deltas))
                while self._reading and self._news.qsize() >= MOST_UNREAD:
                    self._taken.clear()
                    await self._taken.wait()  # meanwhile the generation pauses its request
        except Exception as error:
            self._news.put_nowait((at, error))
        finally:
            generation.cancel()
            self._news.put_nowait((at, None))  # __aiter__ waits for it, even if this task is cancelled

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for generation in self.generations:
            generation.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Generation, list[Delta]]]:
        """Yields the prompt's number, its generation and the deltas of a step. Raises what a generation raises."""
        if not self._tasks:
            async for deltas in self.generations[0]:
                yield 0, self.generations[0], deltas
            return
        left, self._reading = len(self._tasks), True
        while left:
            at, news = await self._news.get()
            self._taken.set()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield at, self.generations[at], news


def _with_arrival(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    now = time.perf_counter()
    return [replace(request, arrival=now) if at else request for at, request in enumerate(requests)]


async def gather(
    work: Callable[[GenerationRequest], Coroutine[Any, Any, T]], requests: Sequence[GenerationRequest]
) -> list[T]:
    if len(requests) == 1:
        return [await work(requests[0])]
    starting = asyncio.Semaphore(MOST_STARTING)

    async def run(request: GenerationRequest) -> T:
        async with starting:
            return await work(request)

    tasks = [asyncio.create_task(run(request)) for request in _with_arrival(requests)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
