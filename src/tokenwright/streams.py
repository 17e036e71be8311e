"""Pieces of one text as they are written: for a thread that waits, and for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from tokenwright.completion import Completion, Piece
from tokenwright.engine.loop import AsyncListener, Delivery, Inbox, RequestHandle
from tokenwright.transcript import Transcript


class Stream:
    """The pieces of one text as they are written. Dropping or closing it early frees its pages.

    `completion` is what has been read so far; it is final once the iteration has ended. owner: kept alive as long as
    the stream is.
    """

    def __init__(self, handle: RequestHandle, inbox: Inbox, transcript: Transcript, owner: object = None) -> None:
        self._handle = handle
        self._inbox = inbox
        self._transcript = transcript
        self._pieces: deque[Piece] = deque()
        self._owner = owner

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """The next piece. Raises EngineError if the text failed."""
        while not self._pieces:
            if self._transcript.ended:
                self._transcript.check()
                raise StopIteration
            for delivery in self._inbox.get():
                self._pieces.extend(self._transcript.add(delivery))
        return self._pieces.popleft()

    @property
    def completion(self) -> Completion:
        return self._transcript.completion()

    def close(self) -> None:
        """End the text here, behind the last piece that was read."""
        self._handle.cancel()
        self._transcript.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._handle.cancel()


class _Receiver:
    """The deliveries of one request in its event loop."""

    def __init__(self) -> None:
        self.deliveries: deque[Delivery] = deque()
        self.waiter: asyncio.Future[None] | None = None

    async def get(self) -> Delivery:
        while not self.deliveries:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self.deliveries.popleft()


class AsyncStreams:
    """The asyncio side of one engine: a listener for each event loop, which wakes the tasks that wait for news."""

    def __init__(self) -> None:
        self._listeners: WeakKeyDictionary[Any, AsyncListener] = WeakKeyDictionary()
        self._receivers: dict[RequestHandle, _Receiver] = {}

    def listener(self) -> AsyncListener:
        """The listener of the running event loop."""
        event_loop = asyncio.get_running_loop()
        found = self._listeners.get(event_loop)
        if found is None:
            found = self._listeners[event_loop] = AsyncListener(event_loop, self._receive)
        return found

    def _receive(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            receiver = self._receivers.get(delivery.handle)
            if receiver is None:  # nobody reads it any more
                continue
            receiver.deliveries.append(delivery)
            if receiver.waiter is not None and not receiver.waiter.done():
                receiver.waiter.set_result(None)

    async def pieces(self, handle: RequestHandle, transcript: Transcript) -> AsyncGenerator[Piece, None]:
        """The pieces of a request whose listener is `listener()`; called before the event loop runs again."""
        receiver = self._receivers[handle] = _Receiver()
        try:
            while not transcript.ended:
                for piece in transcript.add(await receiver.get()):
                    yield piece
            transcript.check()
        finally:
            del self._receivers[handle]
            handle.cancel()
