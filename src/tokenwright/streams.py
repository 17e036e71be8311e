"""Streams of the pieces of a request: blocking, and for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from tokenwright.completion import Completion, Piece
from tokenwright.engine.loop import AsyncListener, Delivery, Inbox, RequestHandle
from tokenwright.transcript import Transcript


class Stream:
    """An iterator over the pieces of a request. Closing or garbage-collecting it early frees the request's pages.

    `completion`: the text read so far; final once the iteration has ended. owner: an object to keep alive as long as
    the stream.
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
        """The next piece; blocks until there is one. Raises EngineError if the request failed."""
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
        """Cancel the request; its text ends with the last piece that was read."""
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
    """The asyncio side of one engine: a listener for each event loop, which wakes the tasks that await deliveries."""

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
            if receiver is None:  # its stream was closed
                continue
            receiver.deliveries.append(delivery)
            if receiver.waiter is not None and not receiver.waiter.done():
                receiver.waiter.set_result(None)

    async def read(self, transcripts: Mapping[RequestHandle, Transcript]) -> None:
        """Read the deliveries of requests, whose listener is `listener()`, until all have ended.

        Await it before the event loop runs again, or deliveries are lost.
        """
        receivers = {handle: _Receiver() for handle in transcripts}
        self._receivers.update(receivers)

        async def read_one(handle: RequestHandle, transcript: Transcript) -> None:
            while not transcript.ended:
                transcript.add(await receivers[handle].get())

        try:
            await asyncio.gather(*(read_one(*each) for each in transcripts.items()))
        finally:
            for handle in transcripts:
                del self._receivers[handle]
                handle.cancel()

    async def pieces(self, handle: RequestHandle, transcript: Transcript) -> AsyncGenerator[Piece, None]:
        """The pieces of a request whose listener is `listener()`. Raises EngineError if the request failed.

        Start the iteration before the event loop runs again, or deliveries are lost.
        """
        receiver = self._receivers[handle] = _Receiver()
        try:
            while not transcript.ended:
                for piece in transcript.add(await receiver.get()):
                    yield piece
            transcript.check()
        finally:
            del self._receivers[handle]
            handle.cancel()
