"""Streams of the pieces of requests for asyncio."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from tokenwright.engine.loop import AsyncListener
from tokenwright.engine.port import Delivery, RequestHandle
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.outputs import Piece

T = TypeVar("T")


class AsyncStream:
    """The pieces of a request, step by step, in its event loop. Leaving it early cancels the request."""

    def __init__(
        self, receivers: "dict[RequestHandle, AsyncStream]", handle: RequestHandle, transcript: OutputProcessor
    ) -> None:
        self._receivers = receivers
        self._handle = handle
        self._transcript = transcript
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        receivers[handle] = self

    async def pieces(self) -> list[Piece] | None:
        """The pieces of the next step, in order; None after the end. Raises EngineError if the request failed."""
        if self._transcript.ended:
            self._transcript.check()
            return None
        while not self._deliveries:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._transcript.add(self._deliveries.popleft(), split=True)

    async def finish(self) -> None:
        """Read on to the end, also of a request that fails; its transcript has the error."""
        while not self._transcript.ended:
            await self.pieces()

    def receive(self, delivery: Delivery) -> None:
        """Take in the events of a step and wake the task that awaits them."""
        self._deliveries.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._receivers[self._handle]
        self._handle.cancel()


class AsyncStreams:
    """The asyncio side of one engine: a listener for each event loop, which wakes the tasks that await deliveries.

    It owns the thread in which their prompts are tokenised.
    """

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(1, "tokenwright requests")
        self._listeners: WeakKeyDictionary[Any, AsyncListener] = WeakKeyDictionary()
        self._receivers: dict[RequestHandle, AsyncStream] = {}

    def listener(self) -> AsyncListener:
        """The listener of the running event loop."""
        event_loop = asyncio.get_running_loop()
        found = self._listeners.get(event_loop)
        if found is None:
            found = self._listeners[event_loop] = AsyncListener(event_loop, self._receive)
        return found

    async def in_thread(self, prepare: Callable[[], T]) -> T:
        """`prepare()`, called in the streams' own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    def close(self) -> None:
        """End the thread; what waits for it is cancelled."""
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def open(self, handle: RequestHandle, transcript: OutputProcessor) -> AsyncStream:
        """The stream of a request whose listener is `listener()`. Open it before the event loop runs again."""
        return AsyncStream(self._receivers, handle, transcript)

    def _receive(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._receivers.get(delivery.handle)
            if stream is not None:  # else it was left
                stream.receive(delivery)

    async def read(self, transcripts: Mapping[RequestHandle, OutputProcessor]) -> None:
        """Read the deliveries of requests, whose listener is `listener()`, until all have ended or failed.

        Await it before the event loop runs again, or deliveries are lost.
        """
        with ExitStack() as stack:
            for stream in [stack.enter_context(self.open(*each)) for each in transcripts.items()]:
                await stream.finish()
