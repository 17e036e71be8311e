"""Several prompts of one reply side by side: the queue refuses only the first, and holds at most ABREAST of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokenwright.serve.service.generation import MOST_UNREAD, Generation
from tokenwright.serve.service.types import Delta, GenerationRequest

T = TypeVar("T")
Start = Callable[[GenerationRequest], Awaitable[Generation]]

ABREAST = 32


class Several:
    def __init__(self, start: Start, each: Sequence[GenerationRequest]) -> None:
        self.generations: list[Generation] = []
        self._start = start
        self._wanted = each
        self._news: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = False  # reading has begun; until then nothing may hold up those that have started
        self._taken = asyncio.Event()

    async def start(self) -> None:
        """Start all. Where one fails, raises its error and cancels the others."""
        if len(self._wanted) == 1:
            self.generations = [await self._start(self._wanted[0])]
            return
        started: list[asyncio.Future[Generation]] = [asyncio.get_running_loop().create_future() for _ in self._wanted]
        parts, abreast = _Parts(), asyncio.Semaphore(ABREAST)
        self._tasks = [asyncio.create_task(self._read(at, parts, abreast, future)) for at, future in enumerate(started)]
        try:
            self.generations = list(await asyncio.gather(*started))
        except BaseException:
            self.cancel()
            raise

    async def _read(
        self, at: int, parts: "_Parts", abreast: asyncio.Semaphore, started: asyncio.Future[Generation]
    ) -> None:
        try:
            async with abreast:
                generation = await self._start(parts.part(at, self._wanted[at]))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            return
        try:
            if not started.cancelled():
                started.set_result(generation)
            async for deltas in generation:
                self._news.put_nowait((at, deltas))
                while self._begun and self._news.qsize() >= MOST_UNREAD:
                    self._taken.clear()
                    await self._taken.wait()  # meanwhile the generation pauses its request
        except Exception as error:
            self._news.put_nowait((at, error))
        finally:
            generation.cancel()
            self._news.put_nowait((at, None))  # the reader waits for it, also where this task is cancelled

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for generation in self.generations:
            generation.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Generation, list[Delta]]]:
        """Prompt number, generation and deltas of its next step. Raises as a generation does."""
        if not self._tasks:
            async for deltas in self.generations[0]:
                yield 0, self.generations[0], deltas
            return
        left, self._begun = len(self._tasks), True
        while left:
            at, news = await self._news.get()
            self._taken.set()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield at, self.generations[at], news


class _Parts:
    def __init__(self) -> None:
        self._asked = time.perf_counter()

    def part(self, at: int, wanted: GenerationRequest) -> GenerationRequest:
        return replace(wanted, since=self._asked) if at else wanted


async def gathered(
    work: Callable[[GenerationRequest], Coroutine[Any, Any, T]], each: Sequence[GenerationRequest]
) -> list[T]:
    if len(each) == 1:
        return [await work(each[0])]
    parts, abreast = _Parts(), asyncio.Semaphore(ABREAST)

    async def worked(at: int, wanted: GenerationRequest) -> T:
        async with abreast:
            return await work(parts.part(at, wanted))

    tasks = [asyncio.create_task(worked(at, wanted)) for at, wanted in enumerate(each)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
